"""How fast a plan could be at best: a roofline, an upper bound that no engine reaches.

    decode tokens/s   ≤ bandwidth / (weights read for a token + keys and values of half the context)
    time to first     ≥ operations / peak, and ≥ weights / bandwidth, for the vision tower and for prefill

Operations: 2 per parameter and patch or token, and 4 · width · length² / 2 (causal) or · length² (vision) per
layer of attention. Source: Williams et al. 2009, https://doi.org/10.1145/1498765.1498785.

Layers in host memory cross PCI Express for every forward pass, after one another and after what the GPU does:

    decode tokens/s   = 1 / (bytes on the GPU / its bandwidth + bytes that cross / rate of the link)

That is a prediction, no bound. accelerate copies from pageable memory: the driver copies it once more, into a
pinned buffer of its own, on one thread. So the rate is half of the slot's, and never more than `STAGED_RATE`,
which is assumed (`benchmarks/LOG.md`: offload). An unknown slot counts as PCI Express 4.0 × 8, the
narrowest of the cards that people have.

Without a GPU both bounds take assumed rates of host memory and processor: two channels of DDR5, eight cores.
Narrower weights are dequantized there for every token, no quicker than float32 (16.8 million values a row
on two cores: bf16 9.8 to 10.7 ms, float32 6.4 to 14.6), so every weight counts four bytes.

Experts of a mixture in host memory are read there by a processor, at three quarters of what two channels of
its memory give, and at 10 GB/s a core at most. Where nobody said its kind it is taken from the card's age,
and the speed is given with the slowest and the quickest kind as well.

Of experts in host memory with copies on the GPU those without a copy cross, once a token, and once for every
step of a prompt. How often a token finds its experts there was published for an eighth and a quarter of them
(`HITS`); between, it is taken as linear. Such steps are no CUDA graphs: a layer takes `EAGER_S` to be
started, which is assumed.

A streamed vision tower crosses once a picture, from pinned memory at the rate of the slot and while the GPU
computes: the longer of both is its bound.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from snugvl.core.sizes import format_size
from snugvl.hardware.machine import HOST_RATE, LANE_BYTES_PER_S, Gpu, ddr_bandwidth
from snugvl.planner.budget import Budget
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.transformers.footprint import layer_bytes, vision_bytes
from snugvl.planner.footprint.images import ImageSize, largest_image
from snugvl.planner.footprint.kv import kv_bytes
from snugvl.planner.footprint.weights import codes_of_byte, crossing_bytes, part_bytes
from snugvl.planner.inventory import Inventory, Part, widths
from snugvl.planner.settings import Settings

PROMPT_TEXT_TOKENS = 64
ASSUMED_LINK = 8 * LANE_BYTES_PER_S[4]  # bytes per second
HOST_BANDWIDTH = 60e9  # bytes per second of host memory
HOST_FLOPS = 0.5e12  # of a processor
SHORT_WAIT_S = 0.1  # too short to be felt
MANY_TOKENS = 1000  # a second; beyond, other things than memory decide
WIDE_BYTES = 4  # of a weight as a processor multiplies it
STAGED_RATE = 10e9  # bytes per second that one thread copies
HOST_SHARE = 0.75  # of the bandwidth of host memory that a processor reaches
CORE_RATE = 10e9  # bytes per second of 4-bit weights that a core multiplies
# Host memory beside cards of this compute capability and newer ones, as it was sold with them.
ASSUMED_DDR = (((10, 0), "DDR5-5600"), ((8, 0), "DDR4-3200"), ((7, 5), "DDR4-2666"), ((0, 0), "DDR4-2133"))
# Share of a layer's experts that have copies, and of a token's that are among them (llama.cpp PR 27861).
HITS = ((0.0, 0.0), (1 / 8, 0.67), (1 / 4, 0.81), (1.0, 1.0))
EAGER_S = 350e-6  # a third of it the choice on the host, by a CPU here
SLOWEST_DDR, QUICKEST_DDR = "DDR4-2133", "DDR5-6000"


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one request alone: tokens per second, and seconds to the first token after one full image.

    Both are bounds; predictions where `crossing_bytes` are copied from host memory for every token.
    `assumed`: by assumed rates of host memory. `predicted`: the decoding rate is no bound (llama.cpp's).
    `ddr`: the kind of host memory that is assumed, and the rates with the slowest and the quickest kind.
    """

    decode_tokens_per_s: float | None
    first_token_s: float | None
    crossing_bytes: int = 0
    assumed: bool = False
    predicted: bool = False
    ddr: tuple[str, float, float] | None = None


def speed_text(speed: Speed) -> str | None:
    """The speed for people: a bound, or a prediction where the link decides; None where it is unknown."""
    if speed.decode_tokens_per_s is None:
        return None
    if speed.predicted:
        assumed = ", by assumed rates of host memory" if speed.assumed else ""
        if speed.ddr is not None:
            kind, slow, quick = speed.ddr
            assumed = (
                f", with {kind}, which is assumed: {slow:,.0f} with {SLOWEST_DDR}, {quick:,.0f} with "
                f"{QUICKEST_DDR}; --ddr says what it is"
            )
        return f"about {speed.decode_tokens_per_s:,.0f} tokens/s{_wait(speed)} (predicted{assumed})"
    if speed.crossing_bytes:
        crossing = f"because {format_size(speed.crossing_bytes)} cross PCI Express for every token"
        first = "" if speed.first_token_s is None else f"; first token after {seconds(speed.first_token_s)}"
        return f"about {speed.decode_tokens_per_s:,.1f} tokens/s, {crossing}{first} (predicted)"
    many = speed.decode_tokens_per_s > MANY_TOKENS
    bound = f"at most {speed.decode_tokens_per_s:,.0f} tokens/s"
    if many:
        bound = f"not limited by memory, which allows over {MANY_TOKENS:,} tokens/s"
    bound += _wait(speed)
    rates = "assumed rates of host memory" if speed.assumed else "the card's rates"
    return f"{bound} (roofline, by {rates}; real use is slower)"


def _wait(speed: Speed) -> str:
    """The clause on the wait for the first token; empty where it is too short to be felt."""
    least_s = speed.first_token_s
    if least_s is None or least_s < SHORT_WAIT_S:
        return ""
    return f", first token after at least {seconds(least_s)}"


def seconds(duration_s: float) -> str:
    """A duration for people, in seconds with about two digits."""
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"


def copy_rate(gpu: Gpu) -> float:
    """Bytes per second from pageable host memory to a GPU."""
    return min((gpu.link_bandwidth or ASSUMED_LINK) / 2, STAGED_RATE)


def tower_crossing_s(model: Inventory, settings: Settings, gpu: Gpu | None) -> float:
    """Least seconds in which a streamed vision tower is copied for a picture; 0 where none streams."""
    return crossing_bytes(model, settings) / ((gpu and gpu.link_bandwidth) or ASSUMED_LINK)


def hit_rate(share: float) -> float:
    """Share of a token's experts that have copies on the GPU, where `share` of all have."""
    (before, low), (after, high) = next(pair for pair in pairwise(HITS) if share <= pair[1][0])
    return low + (high - low) * (share - before) / (after - before)


def _experts_crossing_s(model: Inventory, settings: Settings, budget: Budget) -> tuple[int, float, float]:
    """Bytes of experts in host memory that cross for a token, their seconds, and those of a prompt."""
    mixture, gpu, slots = model.facts.text.mixture, budget.gpu, settings.expert_slots
    if mixture is None or slots is None or gpu is None:
        return 0, 0.0, 0.0
    rate = copy_rate(gpu) if budget.system == "wsl2" else gpu.link_bandwidth or ASSUMED_LINK
    total, share = part_bytes(model, settings, "decoder", experts=True), slots / mixture.count
    crossing = total * model.experts_read * (1 - hit_rate(share))
    tokens = min(settings.context, settings.images * largest_image(model, settings.max_pixels).tokens)
    chunks = -(-(tokens + PROMPT_TEXT_TOKENS) // settings.chunk)
    started = model.facts.text.num_layers * EAGER_S
    return round(crossing), crossing / rate + started, chunks * (total * (1 - share) / rate + started)


def roofline(model: Inventory, settings: Settings, budget: Budget) -> Speed:
    """The bounds on one device; each is None where the device's bandwidth or peak is unknown."""
    gpu, cpu = budget.gpu, budget.device.cpu
    rate = HOST_BANDWIDTH if cpu else gpu.bandwidth if gpu is not None else None
    flops = HOST_FLOPS if cpu else gpu.bf16_flops if gpu is not None else None
    rules = rules_of(settings.engine)
    if rules.predicts_rate:
        kind, (likely, *ends) = host_rates(settings, budget)
        decode = rules.decode_rate(model, settings, gpu, likely)
        first = _first_token_s(model, settings, flops, gpu)
        ddr = None
        if kind and decode is not None:
            slow, quick = (rules.decode_rate(model, settings, gpu, each) or 0.0 for each in ends)
            ddr = kind, slow, quick
        return Speed(decode, first, assumed=cpu and budget.ram_bandwidth is None, predicted=True, ddr=ddr)
    if rate is None:
        return Speed(None, None)
    bandwidth = rate * settings.tensor_parallel
    crossing = layer_bytes(model, settings) if settings.offloaded else 0
    # The output projection is the embedding itself where it is tied.
    head: Part = "lm_head" if _elements(model, "lm_head") else "embedding"
    if cpu:
        read = WIDE_BYTES * (_values(model, "decoder") + _values(model, head))
        experts = WIDE_BYTES * _elements(model, "decoder", experts=True)
    else:
        read = part_bytes(model, settings, "decoder") + part_bytes(model, settings, head) - crossing
        # Experts that cross all do, used or not.
        experts = 0 if crossing else part_bytes(model, settings, "decoder", experts=True)
    sharing = settings.tensor_parallel * settings.pipeline_parallel  # GPUs of one copy of the model
    # A window's blocks also hold a prefill step's tokens; a decode step reads the window.
    cache = kv_bytes(model, replace(settings, chunk=1), settings.context // 2) * sharing
    across = crossing / copy_rate(gpu) if gpu is not None else 0.0
    idle = experts * (1 - model.experts_read)
    brought, token_s, prompt_s = _experts_crossing_s(model, settings, budget)
    crossing, across = crossing + brought, across + token_s
    decode = 1 / ((read - idle + cache) / bandwidth + across)
    if flops is None:
        return Speed(decode, None, crossing, cpu)
    peak = flops * settings.tensor_parallel
    image = largest_image(model, settings.max_pixels)
    prefill = max(_prefill_flops(model, settings, image) / peak, read / bandwidth) + (prompt_s or across)
    vision = 0.0
    if settings.images and image.patches:
        reading = part_bytes(model, settings, "vision") / bandwidth
        computing = max(_vision_flops(model, image.patches) / peak, reading)
        vision = settings.images * max(computing, tower_crossing_s(model, settings, gpu))
    if settings.images and gpu is not None:
        vision += vision_bytes(model, settings) / copy_rate(gpu)
    return Speed(decode, prefill + vision, crossing, cpu)


def host_rates(settings: Settings, budget: Budget) -> tuple[str, tuple[float, ...]]:
    """Bytes per second that a processor reads of host memory: what is likely.

    Where experts are there and nobody said its kind: the kind that is assumed, and the slowest and the
    quickest rate behind the likely one.
    """
    if budget.ram_bandwidth is None and not settings.host_experts:
        return "", (HOST_RATE,)
    most = (budget.cores or 64) * CORE_RATE
    if budget.ram_bandwidth is not None:
        return "", (min(HOST_SHARE * budget.ram_bandwidth, most),)
    since = (budget.gpu and budget.gpu.compute_capability) or (8, 0)
    kind = next(kind for least, kind in ASSUMED_DDR if since >= least)
    found = (ddr_bandwidth(each) or 0.0 for each in (kind, SLOWEST_DDR, QUICKEST_DDR))
    return kind, tuple(min(HOST_SHARE * each, most) for each in found)


def _first_token_s(
    model: Inventory, settings: Settings, flops: float | None, gpu: Gpu | None
) -> float | None:
    """Least seconds to a GGUF's first token: arithmetic, where the device's peak is known, and experts that
    cross for each step of a prompt."""
    if settings.offloaded or settings.vision == "cpu":
        return None
    image = largest_image(model, settings.max_pixels)
    pictures = settings.images * _vision_flops(model, image.patches)
    computed = (_prefill_flops(model, settings, image) + pictures) / flops if flops else 0.0
    crossing = rules_of(settings.engine).step_crossing_bytes(model, settings)
    if not crossing or gpu is None:
        return computed or None
    tokens = min(settings.context, settings.images * image.tokens + PROMPT_TEXT_TOKENS)
    return computed + -(-tokens // settings.chunk) * crossing / copy_rate(gpu)


def _prefill_flops(model: Inventory, settings: Settings, image: ImageSize) -> float:
    """Number of operations of a prompt with its images and some text."""
    w, tokens = widths(model), min(settings.context, settings.images * image.tokens + PROMPT_TEXT_TOKENS)
    attention = 2.0 * w.q * tokens**2 * model.facts.text.num_layers
    idle = _elements(model, "decoder", experts=True) * (1 - model.experts_read)
    return 2.0 * (_elements(model, "decoder") - idle) * tokens + attention


def _vision_flops(model: Inventory, patches: int) -> float:
    vision = model.facts.vision
    if vision is None:
        return 0.0
    attention = 4.0 * vision.hidden_size * float(patches) ** 2 * vision.depth
    return 2.0 * _elements(model, "vision") * patches + attention


def _values(model: Inventory, part: Part) -> int:
    """Number of weights of a part, packed ones unpacked."""
    each = codes_of_byte(model)
    packed = (group for group in model.groups if (group.part, group.kind) == (part, "packed"))
    unpacked = sum((group.nbytes * each - group.elements) * group.count for group in packed)
    return _elements(model, part) + unpacked


def _elements(model: Inventory, part: Part, *, experts: bool = False) -> int:
    return sum(
        group.elements * group.count
        for group in model.groups
        if group.part == part and group.kind not in ("scale", "scale8") and (group.expert or not experts)
    )

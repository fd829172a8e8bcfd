"""How fast a plan is likely to be: a roofline that counts arithmetic beside bytes, with its range.

A decode step of one request, half of its context filled, on a GPU:

    reading    = bytes of the weights of a token, keys, values and states / (bandwidth · `Pace.share`)
    arithmetic = weights · `Format.instructions` / (multiprocessors · clock · `LANES`)
    seconds    = layers · `Pace.layer_s` + √(reading² + arithmetic²)

as loads and instructions overlap in part: wholly they would take the larger of both, not at all their sum.
The constants are fitted to what was measured (`tests/planner/planned_speed.py --fit`); that script also sets
a prediction beside every measured speed, and says how many lie within the range. On a card on which the
engine was measured the range is `Pace.within`, the factor within which those speeds lie. On others it is
computed:

    quickest = layers · `Pace.layer_s` / 2 + max(reading · share / `MOST_SHARE`, arithmetic)
    slowest  = (layers · `Pace.layer_s` + arithmetic) · `MORE` + reading

llama.cpp's rules have a formula of their own. The time to the first token is a bound that no engine reaches,
as none is published for a picture on a consumer card:

    time to first     ≥ operations / peak, and ≥ weights / bandwidth, for the vision tower and for prefill

Operations: 2 per parameter and patch or token, and 4 · width · length² / 2 (causal) or · length² (vision) per
layer of attention. Source: Williams et al. 2009, https://doi.org/10.1145/1498765.1498785.

Layers in host memory cross PCI Express for every forward pass, after one another and after what the GPU does:
their bytes / rate of the link are added. accelerate copies from pageable memory: the driver copies it once
more, into a pinned buffer of its own, on one thread. So the rate is half of the slot's, and never more than
`STAGED_RATE`, which is assumed (`benchmarks/LOG.md`: offload; measured once, within `CROSSING_WITHIN`). An
unknown slot counts as PCI Express 4.0 × 8, the narrowest of the cards that people have.

Without a GPU narrower weights are dequantized for every token, no quicker than float32 (16.8 million values a
row on two cores: bf16 9.8 to 10.7 ms, float32 6.4 to 14.6), so every weight counts four bytes. Two cores read
5 GB/s of them as they are, 2.5 GB/s of quantised ones (SmolLM2-135M in float32, 9.7 tokens/s, in int8 4 to 6;
a GGUF of 1.5B 0.4). More cores were not measured: the range ends with all that two channels of DDR5 give.

Experts of a mixture in host memory are read there by a processor, at three quarters of what two channels of
its memory give, and at 10 GB/s a core at most. Where its kind wasn't given it is taken from the card's age,
and the speed is given with the slowest and the quickest kind as well.

Of experts in host memory with copies on the GPU those without a copy cross, once a token, and once for every
step of a prompt. How often a token finds its experts there was published for an eighth and a quarter of them
(`HITS`); between, it is taken as linear. From page-locked memory the GPU fetches them, in CUDA graphs, at the
rate of the slot. Elsewhere the host does: a layer takes `EAGER_S` to be started, and experts come at
`PAGEABLE_RATE`. One H200 has been measured (`benchmarks/expert_cache.py`).

A streamed vision tower crosses once a picture, from pinned memory at the rate of the slot and while the GPU
computes: the longer of both is its bound.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from snugvl.core.formats import FORMATS
from snugvl.core.sizes import format_size
from snugvl.hardware.machine import HOST_RATE, LANE_BYTES_PER_S, Gpu, ddr_bandwidth
from snugvl.planner.budget import Budget
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.transformers.footprint import layer_bytes, vision_bytes
from snugvl.planner.footprint.kv import kv_bytes
from snugvl.planner.footprint.vision import ImageSize, largest_image
from snugvl.planner.footprint.weights import codes_of_byte, crossing_bytes, part_bytes, recordable_tokens
from snugvl.planner.inventory import Inventory, Part, widths
from snugvl.planner.settings import Settings

PROMPT_TEXT_TOKENS = 64
ASSUMED_LINK = 8 * LANE_BYTES_PER_S[4]  # bytes per second
HOST_BANDWIDTH = 60e9  # bytes per second of host memory
HOST_FLOPS = 0.5e12  # of a processor
SHORT_WAIT_S = 0.1  # too short to be felt
WIDE_BYTES = 4  # of a weight as a processor multiplies it
STAGED_RATE = 10e9  # bytes per second that one thread copies
CROSSING_WITHIN = 1.5  # of what was predicted, where layers cross
HOST_SHARE = 0.75  # of the bandwidth of host memory that a processor reaches
CORE_RATE = 10e9  # bytes per second of 4-bit weights that a core multiplies
ASSUMED_CORES = 8
PLAIN_CORE_RATE, QUANTIZED_CORE_RATE = 2.5e9, 1.25e9  # bytes per second a core, every weight four bytes
CORES_WITHIN = 2.0  # of those rates, below
LANES = 128  # instructions of one thread that a multiprocessor begins in a clock cycle
MOST_SHARE = 0.95  # of a card's bandwidth that anything reads
MORE = 1.5  # times as much, where nothing was measured
BLOCK_INSTRUCTIONS = 9.1  # of a weight in a GGUF's blocks, as `Format.instructions`
# Host memory beside cards of this compute capability and newer ones, as it was sold with them.
ASSUMED_DDR = (((10, 0), "DDR5-5600"), ((8, 0), "DDR4-3200"), ((7, 5), "DDR4-2666"), ((0, 0), "DDR4-2133"))
# Share of a layer's experts that have copies, and of a token's that are among them (llama.cpp PR 27861).
HITS = ((0.0, 0.0), (1 / 8, 0.67), (1 / 4, 0.81), (1.0, 1.0))
FETCH_S = 17e-6  # of a layer whose experts the GPU fetches by itself, beside the bytes (an H200)
EAGER_S = 1.1e-3  # of a layer whose experts the host chooses and copies, likewise
PAGEABLE_RATE = 3.6e9  # bytes per second of single experts in memory that isn't page-locked, likewise
SLOWEST_DDR, QUICKEST_DDR = "DDR4-2133", "DDR5-6000"


@dataclass(frozen=True, slots=True)
class Pace:
    """Costs of an engine's decode step on a GPU beside its bytes.

    Attributes:
        layer_s: seconds of a layer beside its products: attention, norms, launches.
        mixed_layer_s: the same of a mixture's layer, whose products are more and smaller.
        eager_layer_s: the same without CUDA graphs, where the host launches every kernel.
        step_s: seconds that the host needs for a step, however small the model.
        share: part of the card's bandwidth at which weights are read.
        computes: the arithmetic of unpacking is counted, as `Format.instructions` has it.
        within: factor within which the measured speeds lie.
        cards: the cards of these speeds, by their drivers' names.
        elsewhere: factor instead of a computed range, where arithmetic isn't counted or can't be.
    """

    layer_s: float
    mixed_layer_s: float
    within: float
    eager_layer_s: float = 0.0
    step_s: float = 0.0
    share: float = 0.9
    computes: bool = False
    cards: frozenset[str] = frozenset()
    elsewhere: float = 1.5


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one request alone: tokens per second, and seconds to the first token after one full image.

    Attributes:
        decode_tokens_per_s: likely rate, in the middle of the range. None: the device isn't known.
        first_token_s: least seconds to the first token; a prediction where `crossing_bytes` are copied for
            every token.
        least, most: the range of the rate.
        measured: whether the engine was measured on this card; else the range is computed.
        assumed: whether the rates of host memory are assumed.
        ddr: the kind of host memory that is assumed, and the rates with the slowest and the quickest kind.
    """

    decode_tokens_per_s: float | None
    first_token_s: float | None
    crossing_bytes: int = 0
    assumed: bool = False
    least: float | None = None
    most: float | None = None
    measured: bool = False
    ddr: tuple[str, float, float] | None = None


def speed_text(speed: Speed) -> str | None:
    """The speed for people, with its range and where that comes from; None where it is unknown."""
    rate, least, most = speed.decode_tokens_per_s, speed.least, speed.most
    if rate is None or least is None or most is None:
        return None
    known = f"about {rate_text(rate)} tokens/s ({rate_text(least)} to {rate_text(most)}"
    if speed.ddr is not None:
        kind, slow, quick = speed.ddr
        return (
            f"{known} with {kind}, which is assumed; {rate_text(slow)} with {SLOWEST_DDR}, "
            f"{rate_text(quick)} with {QUICKEST_DDR}; --ddr says what it is){_wait(speed)}"
        )
    if speed.crossing_bytes:
        first = "" if speed.first_token_s is None else f"; first token after {seconds(speed.first_token_s)}"
        return (
            f"{known}), because {format_size(speed.crossing_bytes)} cross PCI Express for every token{first} "
            "(predicted)"
        )
    basis = "computed: nobody has measured this card"
    if speed.measured:
        basis = "as measured on this card"
    elif speed.assumed:
        basis = "computed, by assumed rates of host memory"
    return f"{known}, {basis}){_wait(speed)}"


def rate_text(rate: float) -> str:
    """A rate for people: two digits below ten, whole numbers above."""
    return f"{rate:.2g}" if rate < 9.95 else f"{rate:,.0f}"


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
    """Bytes of experts in host memory that cross for a token, the seconds of that, and those of a prompt's
    steps beside its arithmetic."""
    mixture, gpu, slots = model.facts.text.mixture, budget.gpu, settings.expert_slots
    if mixture is None or slots is None or gpu is None:
        return 0, 0.0, 0.0
    fast = gpu.link_bandwidth or ASSUMED_LINK
    one, many = (fast, fast) if settings.page_locked else (PAGEABLE_RATE, copy_rate(gpu))
    total, share = part_bytes(model, settings, "decoder", experts=True), slots / mixture.count
    crossing = total * model.experts_read * (1 - hit_rate(share))
    tokens = min(settings.context, settings.images * largest_image(model, settings.max_pixels).tokens)
    chunks = -(-(tokens + PROMPT_TEXT_TOKENS) // settings.chunk)
    started = 0.0 if settings.page_locked else model.facts.text.num_layers * EAGER_S
    return round(crossing), crossing / min(one, fast), chunks * (total * (1 - share) / many + started)


def roofline(model: Inventory, settings: Settings, budget: Budget) -> Speed:
    """The speed on one device; figures are None where the device's bandwidth or peak is unknown."""
    gpu, cpu = budget.gpu, budget.device.cpu
    rules = rules_of(settings.engine)
    flops = HOST_FLOPS if cpu else gpu.bf16_flops if gpu is not None else None
    measured = gpu is not None and gpu.name in rules.pace.cards
    if rules.predicts_rate:
        kind, (likely, *ends) = host_rates(settings, budget)
        decode = rules.decode_rate(model, settings, gpu, likely)
        first = _first_token_s(model, settings, flops, gpu)
        ddr = None
        if kind and decode is not None:
            slow, quick = (rules.decode_rate(model, settings, gpu, each) or 0.0 for each in ends)
            ddr = kind, slow, quick
        assumed = cpu and budget.ram_bandwidth is None
        within = rules.pace.within if measured else rules.pace.elsewhere
        return _ranged(Speed(decode, first, assumed=assumed, measured=measured, ddr=ddr), within)
    crossing = layer_bytes(model, settings) if settings.offloaded else 0
    if cpu:
        times = _processor_step_s(model, settings, budget)
    elif gpu is None or gpu.bandwidth is None:
        return Speed(None, None)
    else:
        times = _gpu_step_s(model, settings, gpu, crossing)
        if measured:
            times = times[0], times[0] / rules.pace.within, times[0] * rules.pace.within
    across = crossing / copy_rate(gpu) if gpu is not None else 0.0
    brought, token_s, prompt_s = _experts_crossing_s(model, settings, budget)
    first = _least_first_token_s(model, settings, budget, flops, crossing, prompt_s or across)
    decode, most, least = (1 / (each + across + token_s) for each in times)
    crossing += brought
    speed = Speed(decode, first, crossing, cpu, least, most, measured)
    return _ranged(speed, CROSSING_WITHIN) if crossing else speed


def _ranged(speed: Speed, within: float) -> Speed:
    """The speed with a range of a factor around its rate."""
    rate = speed.decode_tokens_per_s
    return speed if rate is None else replace(speed, least=rate / within, most=rate * within)


def _gpu_step_s(
    model: Inventory, settings: Settings, gpu: Gpu, crossing: int = 0
) -> tuple[float, float, float]:
    """Seconds of a decode step that are likely, the least and the most that they may be.

    Args:
        crossing: bytes of the layers that stay in host memory.
    """
    assert gpu.bandwidth is not None
    pace, text = rules_of(settings.engine).pace, model.facts.text
    rate = gpu.bandwidth * settings.tensor_parallel
    issue = LANES * (gpu.cycles_per_s or 0.0) * settings.tensor_parallel
    layer_s = pace.mixed_layer_s if model.mixed else pace.layer_s
    if settings.expert_slots is not None:
        eager_s = layer_s + FETCH_S if recordable_tokens(model, settings) else EAGER_S
    else:
        eager_s = pace.eager_layer_s if settings.eager else 0.0
    layers = text.num_layers * max(layer_s, eager_s)
    mid, quick, slow = layers, layers / 2, layers * MORE
    for nbytes, instructions in step_reads(model, settings, crossing):
        reading = nbytes / (rate * pace.share)
        arithmetic = instructions / issue if issue and pace.computes else 0.0
        mid += math.hypot(reading, arithmetic)
        quick += max(nbytes / (rate * MOST_SHARE), arithmetic)
        slow += reading + MORE * arithmetic
    mid = max(mid, pace.step_s)
    if not (pace.computes and issue):
        return mid, max(quick, mid / pace.elsewhere), mid * pace.elsewhere
    return mid, max(quick, pace.step_s / MORE), max(slow, pace.step_s * MORE)


def step_reads(model: Inventory, settings: Settings, crossing: int = 0) -> Iterator[tuple[float, float]]:
    """(bytes, instructions) of what a decode step reads: the layers, the output projection, and the cache.

    Instructions are those that unpack weights.

    Args:
        crossing: bytes of the layers that stay in host memory. Their experts all cross, used or not.
    """
    experts = 0.0 if crossing else 1 - model.experts_read
    idle = part_bytes(model, settings, "decoder", experts=True) * experts
    used = _values(model, "decoder") - _elements(model, "decoder", experts=True) * experts
    nbytes = part_bytes(model, settings, "decoder") - crossing - idle
    blocks = model.has("blocks", "decoder")
    yield nbytes, used * (BLOCK_INSTRUCTIONS if blocks else instructions(settings.weights))
    head = _head(model)
    in_blocks = model.has("blocks", head)
    each = BLOCK_INSTRUCTIONS if in_blocks else instructions(settings.head)
    yield part_bytes(model, settings, head), _values(model, head) * each
    sharing = settings.tensor_parallel * settings.pipeline_parallel  # GPUs of one copy of the model
    # A window's blocks also hold a prefill step's tokens; a decode step reads the window.
    yield kv_bytes(model, settings._replace(chunk=1), settings.context // 2) * sharing, 0.0


def instructions(weights: str) -> float:
    """Instructions that a GPU thread executes to unpack one weight of a precision; 0 where it needs none."""
    return FORMATS[weights].instructions if weights in FORMATS else 0.0


def _head(model: Inventory) -> Part:
    """The part that is the output projection: the embedding itself where it is tied."""
    return "lm_head" if _elements(model, "lm_head") else "embedding"


def _processor_step_s(model: Inventory, settings: Settings, budget: Budget) -> tuple[float, float, float]:
    """Seconds of a decode step without a GPU that are likely, the least and the most that they may be."""
    idle = _elements(model, "decoder", experts=True) * (1 - model.experts_read)
    read = WIDE_BYTES * (_values(model, "decoder") + _values(model, _head(model)) - idle)
    nbytes = read + kv_bytes(model, settings._replace(chunk=1), settings.context // 2)
    cores = budget.cores or ASSUMED_CORES
    plain = not instructions(settings.weights) and not model.has("blocks", "decoder")
    core = PLAIN_CORE_RATE if plain else QUANTIZED_CORE_RATE
    likely = min(cores * core, HOST_RATE)
    return nbytes / likely, nbytes / HOST_BANDWIDTH, nbytes / likely * CORES_WITHIN


def _least_first_token_s(
    model: Inventory, settings: Settings, budget: Budget, flops: float | None, crossing: int, across_s: float
) -> float | None:
    """Least seconds to the first token of an engine that reads safetensors; None without a known peak.

    Args:
        crossing: bytes of the layers that stay in host memory.
        across_s: seconds in which what the prompt needs of host memory is copied.
    """
    gpu, cpu = budget.gpu, budget.device.cpu
    rate = HOST_BANDWIDTH if cpu else gpu.bandwidth if gpu is not None else None
    if flops is None or rate is None:
        return None
    bandwidth, peak = rate * settings.tensor_parallel, flops * settings.tensor_parallel
    head = _head(model)
    if cpu:
        read = WIDE_BYTES * (_values(model, "decoder") + _values(model, head))
    else:
        read = part_bytes(model, settings, "decoder") + part_bytes(model, settings, head) - crossing
    image = largest_image(model, settings.max_pixels)
    prefill = max(_prefill_flops(model, settings, image) / peak, read / bandwidth) + across_s
    vision = 0.0
    if settings.images and image.patches:
        reading = part_bytes(model, settings, "vision") / bandwidth
        computing = max(_vision_flops(model, image.patches) / peak, reading)
        vision = settings.images * max(computing, tower_crossing_s(model, settings, gpu))
    if settings.images and gpu is not None:
        vision += vision_bytes(model, settings) / copy_rate(gpu)
    return prefill + vision


def host_rates(settings: Settings, budget: Budget) -> tuple[str, tuple[float, ...]]:
    """Bytes per second that a processor reads of host memory: what is likely.

    Where experts are there and its kind wasn't given: the assumed kind, and the slowest and the
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

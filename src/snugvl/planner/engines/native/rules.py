"""The planner's rules for our own engine, and what to try for a model on a device, best first.

That is formats of the decoder's matrices, and on a GPU, with each of them, formats and places of embedding,
head and vision tower:

    all in bf16 on the GPU > embedding in host memory > both heads in int8 > tower in int8 > tower streamed

An embedding in host memory costs neither quality nor time worth naming: the GPU reads a row of it for each
token, some kilobytes. So it comes before any coarser format. But that memory has to be page-locked, of which
WSL2 gives little and at times nothing: there it comes on request alone. An embedding that is the head as
well is read whole for every token, and stays on the GPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.gguf_network import ours
from snugvl.core.formats import FEW_BITS, FORMATS, INTEGERS, Precision
from snugvl.core.memory_kinds import Kind
from snugvl.core.options import SPECIAL, EmbeddingName, TowerName
from snugvl.core.sizes import format_size
from snugvl.planner.capabilities import WHOLE, Option, Parts, no_kernels, prefers_fp32, stored_format, too_old
from snugvl.planner.engines.native.footprint import native_components, native_cpu_components
from snugvl.planner.engines.native.hybrid import NATIVE_STEPS, steps
from snugvl.planner.engines.native.step_graphs import step_graph_components
from snugvl.planner.engines.rules import EngineRules
from snugvl.planner.footprint import kv
from snugvl.planner.footprint.total import Component, Device, Reason
from snugvl.planner.footprint.vision import native_vision_components
from snugvl.planner.footprint.weights import (
    expert_cache_bytes,
    expert_host_bytes,
    keeps_fp8,
    part_bytes,
    weight_components,
)
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import DEFAULT_SEQUENCES, Placement, Settings
from snugvl.planner.speed import Pace
from snugvl.planner.wishes import Wishes

MEASURED: Final = frozenset(("NVIDIA H100 80GB HBM3", "NVIDIA H200"))  # benchmarks/results/speeds.csv
RESIDENT: Final = (WHOLE, Parts("int8"), Parts("int8", "int8"))
# Of the formats of a streamed tower the leaner crosses sooner. Without a wish the head gives way first.
STREAMED: Final = tuple(replace(each, vision="streamed") for each in RESIDENT)


class NativeRules(EngineRules):
    """Rules of this package's own engine."""

    engine = "native"
    title = "snugvl's own engine"
    kind = "snugvl's own (native)"
    rank = 3
    honours = SPECIAL
    own_layout = True
    has_parts = True
    pooled = True
    in_process = True
    pace = Pace(15e-6, 60e-6, within=1.25, step_s=1e-4, computes=True, cards=MEASURED)

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """Formats, best first; on a GPU each with all its parts. A GGUF is taken as our engine holds it.

        Options that stream the vision tower come last, unless that is wished.
        """
        if model.facts.gguf is not None:
            model = _renamed(model)
        stored, capability = stored_format(model), device.compute_capability
        if model.facts.gguf is not None and model.facts.gguf.why_not:
            return Reason("native", model.facts.gguf.why_not)
        if model.facts.native_refusal:
            return Reason("native", model.facts.native_refusal)
        if not model.facts.native:
            what = f"run the {model.facts.family} family yet"
            if stored in INTEGERS:
                what = f"run this {model.facts.family} in the {stored} form that it is stored in"
            return Reason("native", f"our engine does not {what}")
        if model.has("packed", "embedding", "lm_head", "vision"):
            return Reason("native", "our engine reads pre-quantized integers of the decoder's layers alone")
        why = too_old(model.facts, capability, cpu=device.cpu) or _no_experts(model, device, wishes)
        if why is not None:
            return Reason("native", why)
        tower = "resident" if wishes.language_only else wishes.tower
        every = parts_of(model, device, tower, wishes.embedding)
        if isinstance(every, str):
            return Reason("native", every)
        if device.cpu:
            return _on_cpu(model, device, wishes)
        every = tuple(dict.fromkeys(_as_stored(parts, model) for parts in every))
        formats: list[Precision] = ["fp8", "bf16", "int8", *_few_bits(wishes)]
        if stored in FEW_BITS or model.facts.own or model.has("blocks", "decoder"):
            formats = [stored]
        elif keeps_fp8(model) and wishes.weights != "bf16":
            formats.remove("bf16")  # the same quality in twice the memory
        elif not keeps_fp8(model):
            formats.remove("fp8")
        if wishes.weights in formats and (why := no_kernels(wishes.weights, capability)):
            return Reason("native", f"our engine has no {wishes.weights} weights here: {why}")
        if model.facts.text.mixture and (more := _split([*formats, stored])):
            if wishes.weights in more or stored in more:
                why = f"our engine's experts have no {' or '.join(more)} weights on a GPU"
                return Reason("native", f"{why}; use int4 or int8")
            formats = [each for each in formats if each not in more]
        formats = [each for each in formats if not no_kernels(each, capability)]
        wide = bool(wishes.float32)
        apart, beside, held = wishes.experts == "cpu", 0, dict[Precision, int]()
        if apart:
            every = tuple(replace(parts, experts="cpu") for parts in every)
            beside = min(host_memory_bytes(parts, model) for parts in every)
            wished = [each for each in formats if wishes.weights in (None, each)] or formats
            held = {each: beside + expert_bytes(each, model) for each in formats}
            formats = [each for each in formats if _room_for(held[each], device)]
            if not set(wished) & set(formats):
                least = min(wished, key=lambda each: held[each])
                return Reason("native", _too_many_experts(held[least], least, device))
        return [
            Option(
                model,
                "native",
                "fp32" if wide and weights == "bf16" else weights,
                stored if weights == "bf16" else weights,
                parts,
                float32=wide,
            )
            for _, alike in groupby(every, lambda parts: parts.vision)
            for weights, parts in product(formats, list(alike))
            if not apart or _room_for(held[weights] - beside + host_memory_bytes(parts, model), device)
        ]

    def stored_as(self, option: Option) -> str:
        """Why it has no other formats, as a clause: FP8 in other blocks than its kernels' is made wide."""
        if stored_format(option.model) == "fp8" and not keeps_fp8(option.model):
            why = "its FP8 isn't in blocks of 128 × 128, each within one matrix"
            return f"{why}, so our engine makes it bf16, or rounds it again"
        return super().stored_as(option)

    def context_limit(self, facts: ModelFacts) -> int:
        """Tokens of the longest context: our rotary embeddings may reach less far."""
        most, here = facts.text.max_position_embeddings, facts.native_positions
        return most if here is None else min(most, here)

    def at_once(self, sequences: int, concurrency: int) -> int:
        """Number of requests that may run at once: all `sequences`, as they share one pool."""
        return sequences

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """Settings that differ in chunk and sequences alone, fastest first; one on a CPU."""
        if cpu:
            yield base._replace(sequences=max(DEFAULT_SEQUENCES, base.sequences))
            return
        mixture = model.facts.text.mixture
        if base.expert_slots is not None and mixture is not None:
            # Slots come before more sequences at once, which read other experts each; between none and all,
            # they are filled later.
            chunks = list(dict.fromkeys(chunk for chunk, _ in NATIVE_STEPS))
            for chunk, slots in ((chunks[0], mixture.count), *((chunk, 0) for chunk in chunks)):
                yield base._replace(chunk=chunk, expert_slots=slots)
            return
        for chunk, sequences in steps(model, base):
            if sequences >= base.sequences or (chunk, sequences) == NATIVE_STEPS[0]:
                yield base._replace(eager=False, chunk=chunk, sequences=max(sequences, base.sequences))

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Components of weights, pool, states, pictures, and the workspace of its steps."""
        cache = kv.pool_component(model, settings)
        parts = [*weight_components(model, settings), cache, kv.state_component(model, settings)]
        parts += [kv.checkpoint_component(model, settings), kv.predictor_component(model, settings)]
        parts += native_vision_components(model, settings)
        parts.append(
            Component(
                "encoder cache", Kind.ENCODINGS, settings.encoder_cache_bytes, why="for the next question"
            )
        )
        if device.cpu:
            return parts + native_cpu_components(model, settings)
        scratch, many = device.cublas_bytes, device.multiprocessors
        parts += native_components(model, settings, cache.nbytes, scratch, many)
        return parts + step_graph_components(model, settings, scratch, many)

    def host_bytes(self, model: Inventory, settings: Settings) -> int:
        """Bytes of weights that stay in host memory beside a GPU."""
        parts = Parts(settings.head, settings.vision_weights, settings.vision, settings.embedding)
        return expert_host_bytes(model, settings) + host_memory_bytes(parts, model)

    def host_text(self, choice: Choice) -> str | None:
        """Experts in host memory, and how many have a copy on the GPU, for people; None where none are."""
        settings, model = choice.settings, choice.option.model
        mixture = model.facts.text.mixture
        if settings.expert_slots is None or mixture is None:
            return None
        held, cached = (format_size(of(model, settings)) for of in (expert_host_bytes, expert_cache_bytes))
        return (
            f"the experts stay in host memory ({held}), {settings.expert_slots} of {mixture.count} of each "
            f"layer have copies on the GPU ({cached}); measured on an H200 alone"
        )

    def kv_component(self, model: Inventory, settings: Settings) -> Component:
        """The component of the KV pool, which all requests share."""
        return kv.pool_component(model, settings)

    def why(self, choice: Choice) -> str | None:
        """The reason for choosing it: it is the first choice where it runs a model."""
        return f"our own engine runs the {choice.option.model.facts.family} family, and is preferred"


@lru_cache(maxsize=64)
def _renamed(model: Inventory) -> Inventory:
    """A GGUF's inventory with the tensors of our network."""
    return inventory(ours(model.facts))


def _split(formats: Iterable[Precision]) -> list[Precision]:
    """Formats among these whose codes are in two planes, which the product of experts doesn't read."""
    return [each for each in dict.fromkeys(formats) if each in FORMATS and FORMATS[each].upper]


def _few_bits(wishes: Wishes) -> list[Precision]:
    """Formats of few bits that a plan may try: those of known cost, and the one that is asked for."""
    return [each for each in FEW_BITS if FORMATS[each].offered or each == wishes.weights]


def _as_stored(parts: Parts, model: Inventory) -> Parts:
    """The parts, but with those that the file has quantised left as they are stored."""
    head = "bf16" if model.has("blocks", "embedding", "lm_head") else parts.head
    tower = parts.vision_weights if model.has("tower", "vision") else "bf16"
    return replace(parts, head=head, vision_weights=tower)


def _on_cpu(model: Inventory, device: Device, wishes: Wishes) -> list[Option]:
    """Options of our engine on a CPU: as stored first, then formats that save memory and cost time."""
    stored = stored_format(model)
    wide = prefers_fp32(model, device) if wishes.float32 is None else wishes.float32
    kinds = (True, False) if wide and wishes.float32 is None else (wide,)
    formats: list[Precision] = ["fp32"] if wide else ["bf16"]
    if wide and wishes.float32 is None:
        formats.append("bf16")
    formats += [*(("fp8",) if keeps_fp8(model) else ()), "int8", *_few_bits(wishes)]
    if stored in FEW_BITS or model.facts.own or model.has("blocks", "decoder"):
        formats = [stored]
    return [
        Option(
            model,
            "native",
            weights,
            stored if weights in ("fp32", "bf16") else weights,
            float32=weights == "fp32" or (plenty and weights != "bf16"),
        )
        for weights in formats
        for plenty in kinds[: 1 if weights in ("fp32", "bf16") else None]
    ]


def parts_of(
    model: Inventory, device: Device, tower: TowerName = "auto", embedding: EmbeddingName = "auto"
) -> tuple[Parts, ...] | str:
    """Parts to try on a device, best first, or why the wished places are impossible."""
    if why := _impossible(model, device, tower, embedding):
        return why
    found = [
        parts for formats in _towers(model, tower) for parts in _embeddings(formats, model, device, embedding)
    ]
    return tuple(found) or _too_much(model, device, tower, embedding)


def _impossible(model: Inventory, device: Device, tower: TowerName, embedding: EmbeddingName) -> str | None:
    if tower == "streamed" and (device.cpu or model.facts.vision is None):
        why = "there is no GPU to stream it to" if device.cpu else "the model has none"
        return f"the vision tower can't be streamed: {why}"
    if embedding == "cpu" and (device.cpu or model.facts.tied):
        why = (
            "there is no GPU to read it"
            if device.cpu
            else "it is lm_head as well, read whole for every token"
        )
        return f"the embedding can't be apart in host memory: {why}"
    return None


def _towers(model: Inventory, wish: TowerName) -> list[tuple[Parts, ...]]:
    """Parts to try, grouped by the tower's place, best first."""
    if model.facts.vision is None:
        return [RESIDENT[:2]]
    if wish == "streamed":
        return [STREAMED]
    return [RESIDENT] if wish == "resident" else [RESIDENT, STREAMED[1:]]


def _embeddings(
    formats: tuple[Parts, ...], model: Inventory, device: Device, wish: EmbeddingName
) -> list[Parts]:
    """The parts with each place of the embedding, without those that host memory has no room for."""
    on_gpu = [parts for parts in formats if _has_room(parts, model, device)]
    beside = [replace(parts, embedding="cpu") for parts in formats]
    beside = [parts for parts in beside if _has_room(parts, model, device)]
    if wish == "cpu":
        return beside
    scarce = device.cpu or device.pinned_bytes is not None
    if wish == "gpu" or scarce or model.facts.tied or not beside:
        return on_gpu
    return [*(parts for parts in on_gpu if parts.head == "bf16"), *beside]


def host_memory_bytes(parts: Parts, model: Inventory) -> int:
    """Bytes that stay in host memory, at most."""
    settings = Settings("native", head=parts.head, vision_weights=parts.vision_weights)
    tower = part_bytes(model, settings, "vision") if parts.vision == "streamed" else 0
    return tower + (part_bytes(model, settings, "embedding") if parts.embedding == "cpu" else 0)


def expert_bytes(weights: Precision, model: Inventory) -> int:
    """Bytes of all experts in host memory, in a format."""
    return expert_host_bytes(model, Settings("native", weights, expert_slots=0))


def _no_experts(model: Inventory, device: Device, wishes: Wishes) -> str | None:
    """Why experts can't be in host memory where that is wished, or None."""
    dense = model.facts.text.mixture is None
    if wishes.experts != "cpu" or not (dense or device.cpu):
        return None
    why = "the model is not a mixture of experts" if dense else "there is no GPU to have copies of them"
    return f"experts can't be apart in host memory: {why}"


def _room_for(nbytes: int, device: Device) -> bool:
    """Whether host memory, page-locked or not, has room for experts."""
    return device.host_bytes is None or nbytes <= device.host_bytes


def _too_many_experts(nbytes: int, weights: Precision, device: Device) -> str:
    return (
        f"the experts can't be in host memory: in {weights} they take {format_size(nbytes)} of it, of which "
        f"{format_size(device.host_bytes or 0)} may be used"
    )


def _has_room(parts: Parts, model: Inventory, device: Device) -> bool:
    room = _room(device)
    return room is None or host_memory_bytes(parts, model) <= room


def _room(device: Device) -> int | None:
    known = [room for room in (device.host_bytes, device.pinned_bytes) if room is not None]
    return min(known, default=None)


def _too_much(model: Inventory, device: Device, tower: TowerName, embedding: EmbeddingName) -> str:
    """The sentence why host memory has no room for what is wished there."""
    place: Placement = "streamed" if tower == "streamed" else "gpu"
    other: Placement = "cpu" if embedding == "cpu" else "gpu"
    least = host_memory_bytes(Parts("int8", "int8", place, other), model)
    wished = [
        *(["the vision tower can't be streamed"] if place == "streamed" else []),
        *(["the embedding can't be in host memory"] if other == "cpu" else []),
    ]
    room = format_size(_room(device) or 0)
    return (
        f"{', and '.join(wished)}: it takes {format_size(least)} of host memory, of which {room} may be used"
    )


RULES = NativeRules()

"""Options of each engine for a model on a device, best first, or why it has none.

What a generation of GPUs lacks stands in `generations.py`, sizes in `footprint/`. Embedding, head and vision
tower of our engine on a GPU: in which formats, and where, best first.

    all in bf16 on the GPU > embedding in main memory > both heads in int8 > tower in int8 > tower streamed

An embedding in main memory costs neither quality nor time worth naming: the GPU reads a row of it for each
token, some kilobytes. So it comes before any coarser format. But that memory has to be page-locked, of which
WSL2 gives little and at times nothing: there it comes for who asks. An embedding that is the head as well is
read whole for every token, and stays on the GPU.
"""

from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Final

from snugvl.checkpoint.gguf_network import ours as of_our_engine
from snugvl.checkpoint.quantized import OWN_INSTEAD
from snugvl.core.options import EmbeddingName, TowerName
from snugvl.core.sizes import format_size
from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import embedding_bytes, keeps_fp8, tower_bytes
from snugvl.planner.generations import PLANES, not_here, older, too_old
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import (
    ENGINE_NAMES,
    ENGINES,
    FEW_BITS,
    Engine,
    HeadFormat,
    KVFormat,
    Placement,
    Settings,
    VisionFormat,
    WeightFormat,
)
from snugvl.planner.wishes import Wishes

PACKED: Final = "the package that made the {} weights (compressed-tensors, gptqmodel, …); loading names it"
BITS: Final = "bitsandbytes, which makes {} weights with transformers (pip install bitsandbytes)"
OWN: Final = f"it doesn't read snugvl's own format; {OWN_INSTEAD}"
# (--max-num-batched-tokens, --max-num-seqs), fastest first. It pre-empts: only `concurrency` is sure of room.
VLLM_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
READ_NO_GGUF: Final[tuple[Engine, ...]] = ("transformers", "vllm")
LLAMACPP_CHUNKS: Final = (512, 256, 128)  # of `-ub`, fastest first
# (EngineConfig.max_batched_tokens, max_num_seqs) that allocation tries, fastest first
NATIVE_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))


@dataclass(frozen=True, slots=True)
class Parts:
    """One way to have them.

    Attributes:
        head: format of embedding and lm_head; int8 costs next to no quality, so it comes where it gains
            larger images or a longer context.
        vision_weights: format of the vision tower; int8 costs little, so it comes where an int8 head isn't
            enough.
        vision: where the vision tower is; "streamed" costs time for every picture, so without a wish it comes
            where nothing else fits.
        embedding: where the embedding is, "gpu" or "cpu".
    """

    head: HeadFormat = "bf16"
    vision_weights: VisionFormat = "bf16"
    vision: Placement = "gpu"
    embedding: Placement = "gpu"


WHOLE: Final = Parts()
RESIDENT: Final = (WHOLE, Parts("int8"), Parts("int8", "int8"))
# Of the formats of a streamed tower the leaner crosses sooner. Without a wish the head gives way first.
STREAMED: Final = tuple(replace(each, vision="streamed") for each in RESIDENT)


@dataclass(frozen=True, slots=True)
class Option:
    """A model in a format on an engine.

    Attributes:
        stored_quality: the format whose quality it has: an FP8 checkpoint stays FP8 when it runs as bf16.
        parts: embedding, head and vision tower; of our engine alone other than bf16 and on the GPU.
        offload: decoder layers may stay in main memory.
        needs: what has to be installed besides, as a sentence, or None.
        float32: activations, cache and what isn't quantised are float32.
    """

    model: Inventory
    engine: Engine
    weights: WeightFormat
    stored_quality: WeightFormat
    parts: Parts = WHOLE
    offload: bool = False
    needs: str | None = None
    float32: bool = False

    @property
    def made(self) -> bool:
        """The format is made while loading, and not the stored one."""
        return self.weights in ("int8", *FEW_BITS) and self.weights != self.model.facts.quantization

    @property
    def by_bits(self) -> bool:
        """bitsandbytes makes the format, for transformers."""
        return self.made and self.engine == "transformers"

    def gives(self, settings: Settings) -> bool:
        """Whether settings are of this option."""
        parts = (settings.head, settings.vision_weights, settings.vision, settings.embedding)
        mine = self.parts.head, self.parts.vision_weights, self.parts.vision, self.parts.embedding
        same = (settings.engine, settings.weights) == (self.engine, self.weights)
        same = same and settings.predictor == self.model.facts.predicts
        return same and (self.engine != "native" or parts == mine) and settings.float32 == self.float32

    @property
    def kv_formats(self) -> tuple[KVFormat, ...]:
        """KV formats that this engine can use, best first. Which are taken is `kv_formats_on`."""
        return ("bf16",) if self.engine == "transformers" else ("bf16", "fp8")

    @property
    def context_limit(self) -> int:
        """Tokens of the longest context that this engine runs with this model."""
        most = self.model.facts.text.max_position_embeddings
        ours = self.model.facts.native_positions if self.engine == "native" else None
        return most if ours is None else min(most, ours)

    @property
    def title(self) -> str:
        """Short name in a report."""
        parts = self.parts
        said = {
            "vision tower streamed": parts.vision == "streamed",
            "embedding in main memory": parts.embedding == "cpu",
        }
        beside = "".join(f", {what}" for what, so in said.items() if so)
        settings = Settings(self.engine, self.weights, head=parts.head, vision_weights=parts.vision_weights)
        weights = self.model.facts.gguf.file_type if self.model.facts.gguf else settings.weights_name
        return f"{self.model.name} in {weights}{beside}, with {ENGINE_NAMES[self.engine]}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that can't run a model on this machine, and why."""

    engine: Engine
    reason: str


def options(
    model: Inventory, device: Device, system: OperatingSystem, wishes: Wishes
) -> tuple[list[Option], list[Refusal]]:
    """Everything that could be tried with one model on one kind of device."""
    if model.facts.gguf is not None:
        stored, ours = _stored(model), inventory(of_our_engine(model.facts))
        made: tuple[list[Option] | Refusal, ...]
        made = native_options(ours, device, wishes), [Option(model, "llamacpp", stored, stored)]
        refused = [Refusal(engine, "it reads no GGUF; llama.cpp does") for engine in READ_NO_GGUF]
    else:
        own = model.facts.own
        made = (
            native_options(model, device, wishes),
            Refusal("transformers", OWN) if own else _transformers(model, device, wishes),
            Refusal("vllm", OWN) if own else _vllm(model, device),
        )
        refused = [Refusal("llamacpp", "llama.cpp reads GGUF files; name one (owner/name:Q4_K_M, or a file)")]
    nowhere = {engine: why for engine in ENGINES if (why := not_here(engine, device, system))}
    refused += [Refusal(engine, why) for engine, why in nowhere.items()]
    found = [option for each in made if not isinstance(each, Refusal) for option in each]
    found = [option for option in found if option.engine not in nowhere]
    return found, [*(each for each in made if isinstance(each, Refusal)), *refused]


def _stored(model: Inventory) -> WeightFormat:
    return model.facts.quantization or "bf16"


def native_options(model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Refusal:
    """Formats of our engine, best first; on a GPU each with all its parts.

    Options that stream the vision tower come last, unless that is wished.
    """
    stored, capability = _stored(model), device.compute_capability
    if model.facts.gguf is not None and model.facts.gguf.why_not:
        return Refusal("native", model.facts.gguf.why_not)
    if not model.facts.native:
        what = f"run the {model.facts.family} family yet"
        if stored in ("int8", *FEW_BITS):
            what = f"run this {model.facts.family} in the {stored} form that it is stored in"
        return Refusal("native", f"our engine does not {what}")
    if model.has("packed", "embedding", "lm_head", "vision"):
        return Refusal("native", "our engine reads ready-made integers of the decoder's layers alone")
    if why := too_old(model.facts, capability):
        return Refusal("native", why)
    tower = "resident" if wishes.language_only else wishes.tower
    every = parts_of(model, device, tower, wishes.embedding)
    if isinstance(every, str):
        return Refusal("native", every)
    if device.cpu:
        return _on_cpu(model, device, wishes)
    every = tuple(dict.fromkeys(_as_stored(parts, model) for parts in every))
    formats: list[WeightFormat] = ["fp8", "bf16", "int8", *FEW_BITS]
    if stored in FEW_BITS or model.facts.own or model.has("blocks", "decoder"):
        formats = [stored]
    elif keeps_fp8(model) and wishes.weights != "bf16":
        formats.remove("bf16")  # the same quality in twice the memory
    elif not keeps_fp8(model):
        formats.remove("fp8")
    if older(capability, PLANES):
        formats = [each for each in formats if each not in ("int6", "int5")]
    wide = bool(wishes.float32)
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
    ]


def _as_stored(parts: Parts, model: Inventory) -> Parts:
    """The same without rounding what is quantised in the file."""
    head = "bf16" if model.has("blocks", "embedding", "lm_head") else parts.head
    tower = parts.vision_weights if model.has("tower", "vision") else "bf16"
    return replace(parts, head=head, vision_weights=tower)


def _on_cpu(model: Inventory, device: Device, wishes: Wishes) -> list[Option]:
    """Formats of our engine in main memory: as they are, then what makes room and costs time."""
    stored = _stored(model)
    wide = prefers_fp32(model, device) if wishes.float32 is None else wishes.float32
    kinds = (True, False) if wide and wishes.float32 is None else (wide,)
    formats: list[WeightFormat] = ["fp32"] if wide else ["bf16"]
    if wide and wishes.float32 is None:
        formats.append("bf16")
    formats += [*(("fp8",) if keeps_fp8(model) else ()), "int8", *FEW_BITS]
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


def prefers_fp32(model: Inventory, device: Device) -> bool:
    """On a CPU `load` takes float32 where that leaves half of the free memory."""
    return model.parameters * 4 <= device.free_bytes // 2


def _transformers(model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Refusal:
    """What transformers loads; int8 and int4 of a plain checkpoint are made by bitsandbytes."""
    stored = _stored(model)
    if stored in ("int8", "int4"):
        return [Option(model, "transformers", stored, stored, needs=PACKED.format(stored))]
    wide = Option(model, "transformers", "fp32", stored, float32=True)
    plain = Option(model, "transformers", "bf16", stored)
    if device.cpu and wishes.float32 is None and prefers_fp32(model, device):
        return [wide, plain]
    if wishes.float32:
        plain = wide
    if device.cpu or stored != "bf16" or model.mixed:  # bitsandbytes leaves experts as they are
        return [plain]
    low: tuple[WeightFormat, ...] = ("int8", "int4")
    return [
        plain,
        *(Option(model, "transformers", weights, weights, needs=BITS.format(weights)) for weights in low),
    ]


def offloading(option: Option, device: Device) -> Option | Refusal:
    """The same option with layers in main memory."""
    if option.engine == "llamacpp" and not device.cpu:
        return replace(option, offload=True)
    if option.engine != "transformers" or device.cpu:
        return Refusal(option.engine, "only transformers and llama.cpp keep layers in main memory")
    if option.model.facts.quantization is not None or option.weights != "bf16":
        return Refusal(
            "transformers",
            "layers of quantised checkpoints can't stay in main memory; the bf16 edition's can",
        )
    return replace(option, offload=True)


def _vllm(model: Inventory, device: Device) -> list[Option] | Refusal:
    stored = _stored(model)
    if device.cpu:
        return Refusal("vllm", "there is no GPU; start its build for CPUs yourself and use --attach URL")
    if model.facts.source == "folder" and model.facts.name == "pocket":
        return Refusal("vllm", "pocket is not worth a server of its own")
    return [Option(model, "vllm", stored, stored)]


def parts_of(
    model: Inventory, device: Device, tower: TowerName = "auto", embedding: EmbeddingName = "auto"
) -> tuple[Parts, ...] | str:
    """What may be tried on a device, best first, or why what is wished can't be."""
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
        return f"the embedding can't be apart in main memory: {why}"
    return None


def _towers(model: Inventory, wish: TowerName) -> list[tuple[Parts, ...]]:
    """Formats by where the tower is, best first."""
    if model.facts.vision is None:
        return [RESIDENT[:2]]
    if wish == "streamed":
        return [STREAMED]
    return [RESIDENT] if wish == "resident" else [RESIDENT, STREAMED[1:]]


def _embeddings(
    formats: tuple[Parts, ...], model: Inventory, device: Device, wish: EmbeddingName
) -> list[Parts]:
    """The same with the embedding where it may be; what main memory has no room for is left out."""
    on_gpu = [parts for parts in formats if _has_room(parts, model, device)]
    beside = [replace(parts, embedding="cpu") for parts in formats]
    beside = [parts for parts in beside if _has_room(parts, model, device)]
    if wish == "cpu":
        return beside
    scarce = device.cpu or device.pinned_bytes is not None
    if wish == "gpu" or scarce or model.facts.tied or not beside:
        return on_gpu
    return [*(parts for parts in on_gpu if parts.head == "bf16"), *beside]


def main_memory_bytes(parts: Parts, model: Inventory) -> int:
    """What stays in main memory, at most."""
    settings = Settings("native", head=parts.head, vision_weights=parts.vision_weights)
    tower = tower_bytes(model, settings) if parts.vision == "streamed" else 0
    return tower + (embedding_bytes(model, settings) if parts.embedding == "cpu" else 0)


def _has_room(parts: Parts, model: Inventory, device: Device) -> bool:
    room = _room(device)
    return room is None or main_memory_bytes(parts, model) <= room


def _room(device: Device) -> int | None:
    known = [room for room in (device.host_bytes, device.pinned_bytes) if room is not None]
    return min(known, default=None)


def _too_much(model: Inventory, device: Device, tower: TowerName, embedding: EmbeddingName) -> str:
    """Why what is wished can't be in main memory."""
    place: Placement = "streamed" if tower == "streamed" else "gpu"
    other: Placement = "cpu" if embedding == "cpu" else "gpu"
    least = main_memory_bytes(Parts("int8", "int8", place, other), model)
    wished = [
        *(["the vision tower can't be streamed"] if place == "streamed" else []),
        *(["the embedding can't be in main memory"] if other == "cpu" else []),
    ]
    room = format_size(_room(device) or 0)
    return (
        f"{', and '.join(wished)}: it takes {format_size(least)} of main memory, of which {room} may be used"
    )

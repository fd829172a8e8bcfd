"""What the engines can really do: the only place that says so."""

from dataclasses import dataclass, replace
from typing import Final

from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import keeps_fp8, tower_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import (
    Engine,
    HeadFormat,
    KVFormat,
    Placement,
    Settings,
    TowerWish,
    VisionFormat,
    WeightFormat,
)
from snugvl.planner.sizes import gib

# What is said of options that need more than their engine.
PACKED: Final = "the package that made the {} weights (compressed-tensors, gptqmodel, …); loading names it"
BITS: Final = "bitsandbytes, which makes {} weights with transformers (pip install bitsandbytes)"

VLLM_CAPABILITY: Final = (7, 5)  # oldest GPUs that vLLM runs on
VLLM_FP8_CAPABILITY: Final = (8, 0)  # FP8 weights through Marlin; native from 8.9
VLLM_FP8_KV_CAPABILITY: Final = (8, 9)
# (--max-num-batched-tokens, --max-num-seqs), fastest first. It pre-empts: only `concurrency` is sure of room.
VLLM_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
# (EngineConfig.max_batched_tokens, max_num_seqs) that allocation tries, fastest first
NATIVE_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
# Embedding and head, and vision tower of our engine beside any format of the layers, best first
PARTS: Final[tuple[tuple[HeadFormat, VisionFormat], ...]] = (
    ("bf16", "bf16"),
    ("int8", "bf16"),
    ("int8", "int8"),
)
# With a streamed tower: of its formats the leaner crosses sooner. Without a wish the head gives way first.
STREAMED_PARTS: Final[tuple[tuple[HeadFormat, VisionFormat], ...]] = PARTS[1:]


@dataclass(frozen=True, slots=True)
class Option:
    """A model in a format on an engine.

    Attributes:
        stored_quality: the format whose quality it has: an FP8 checkpoint stays FP8 when it runs as bf16.
        head: format of embedding and lm_head; int8 costs next to no quality, so it comes where it gains
            larger images or a longer context.
        vision_weights: format of the vision tower; int8 costs little, so it comes where an int8 head isn't
            enough.
        vision: where the vision tower is; "streamed" costs time for every picture, so without a wish it comes
            where nothing else fits.
        offload: decoder layers may stay in main memory.
        needs: what has to be installed besides, as a sentence, or None.
    """

    model: Inventory
    engine: Engine
    weights: WeightFormat
    stored_quality: WeightFormat
    head: HeadFormat = "bf16"
    offload: bool = False
    needs: str | None = None
    vision_weights: VisionFormat = "bf16"
    vision: Placement = "gpu"

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
        parts = ((self.head, "head"), (self.vision_weights, "tower"))
        low = ", ".join(f"{kind} {part}" for kind, part in parts if kind != "bf16")
        if self.vision == "streamed":
            low = f"{low}, streamed tower" if low else "streamed tower"
        return f"{self.model.name} as {self.weights}{f' ({low})' if low else ''} with {self.engine}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that can't run a model on this machine, and why."""

    engine: Engine
    reason: str


def options(
    model: Inventory,
    device: Device,
    system: OperatingSystem,
    wished: WeightFormat | None = None,
    tower: TowerWish = "auto",
) -> tuple[list[Option], list[Refusal]]:
    """Everything that could be tried with one model on one kind of device.

    `wished`: int8 and int4 on a CPU, where they are slower than bf16, are there for who asks.
    """
    found: list[Option] = []
    refused: list[Refusal] = []
    for made in (
        native_options(model, device, wished, tower),
        _transformers(model, device, wished),
        _vllm(model, device, system),
    ):
        if isinstance(made, Refusal):
            refused.append(made)
        else:
            found += made
    return found, refused


def kv_formats_on(option: Option, device: Device, wished: KVFormat | None = None) -> tuple[KVFormat, ...]:
    """KV formats for an option on a device, best first; of a wished one that alone, or none.

    Our engine takes FP8 unasked on a GPU alone, where memory is what is short, and for models alone that norm
    their keys: without a scale, outliers of keys that aren't normed cost much. Its kernels need no hardware
    for FP8, vLLM's do.
    """
    able, capability = option.kv_formats, device.compute_capability
    if option.engine == "vllm" and capability is not None and capability < VLLM_FP8_KV_CAPABILITY:
        able = able[:1]
    if wished is not None:
        return tuple(kind for kind in able if kind == wished)
    if option.engine == "native" and (device.cpu or not option.model.qk_norm):
        able = able[:1]
    return able


def _stored(model: Inventory) -> WeightFormat:
    return model.facts.quantization or "bf16"


def native_options(
    model: Inventory, device: Device, wished: WeightFormat | None = None, tower: TowerWish = "auto"
) -> list[Option] | Refusal:
    """Formats of our engine, best first; on a GPU each wide, with an int8 head, and an int8 tower besides.

    `tower`: where it is to be; with "auto" the options that stream it come last.
    """
    stored = _stored(model)
    if not model.facts.native:
        what = f"run the {model.facts.family} family yet"
        if stored in ("int8", "int4"):
            what = f"run this {model.facts.family} in the {stored} form that it is stored in"
        return Refusal("native", f"our engine does not {what}")
    if any(group.kind == "packed" and group.part != "decoder" for group in model.groups):
        return Refusal("native", "our engine reads ready-made integers of the decoder's layers alone")
    if tower == "streamed" and (device.cpu or model.facts.vision is None):
        why = "there is no GPU to stream it to" if device.cpu else "the model has none"
        return Refusal("native", f"the vision tower can't be streamed: {why}")
    if device.cpu:
        if stored == "int4":
            return [Option(model, "native", stored, stored)]
        if wished in ("int8", "int4") or (wished == "fp8" and keeps_fp8(model)):
            return [Option(model, "native", wished, wished)]
        return [Option(model, "native", "fp32" if prefers_fp32(model, device) else "bf16", stored)]
    formats: list[WeightFormat] = ["fp8", "bf16", "int8", "int4"]
    if stored == "int4":
        formats = ["int4"]
    elif keeps_fp8(model) and wished != "bf16":
        formats.remove("bf16")  # the same quality in twice the memory
    elif not keeps_fp8(model):
        formats.remove("fp8")
    found = [
        replace(option, vision=place)
        for place, parts in _tower_places(model, tower)
        for option in _formats(model, formats, stored, parts)
    ]
    return [option for option in found if _in_main_memory(option, device)] or _too_much(found, device)


def _streaming_bytes(option: Option) -> int:
    """What an option keeps of the vision tower in main memory, at most."""
    if option.vision != "streamed":
        return 0
    return tower_bytes(option.model, Settings("native", option.weights, vision_weights=option.vision_weights))


def _in_main_memory(option: Option, device: Device) -> bool:
    return device.host_bytes is None or _streaming_bytes(option) <= device.host_bytes


def _too_much(streamed: list[Option], device: Device) -> Refusal:
    """Why a tower that is to be streamed can't be."""
    least = min(map(_streaming_bytes, streamed))
    why = f"it takes {gib(least)} of main memory, of which {gib(device.host_bytes or 0)} may be used"
    return Refusal("native", f"the vision tower can't be streamed: {why}")


def _tower_places(
    model: Inventory, tower: TowerWish
) -> list[tuple[Placement, tuple[tuple[HeadFormat, VisionFormat], ...]]]:
    """Where the tower may be, best first, with the formats to try there."""
    if model.facts.vision is None:
        return [("gpu", PARTS[:2])]
    if tower == "streamed":
        return [("streamed", PARTS)]
    return [("gpu", PARTS)] if tower == "resident" else [("gpu", PARTS), ("streamed", STREAMED_PARTS)]


def _formats(
    model: Inventory,
    formats: list[WeightFormat],
    stored: WeightFormat,
    parts: tuple[tuple[HeadFormat, VisionFormat], ...],
) -> list[Option]:
    return [
        Option(
            model,
            "native",
            weights,
            stored if weights == "bf16" else weights,
            head=head,
            vision_weights=vision,
        )
        for weights in formats
        for head, vision in parts
    ]


def prefers_fp32(model: Inventory, device: Device) -> bool:
    """On a CPU `load` takes float32 where that leaves half of the free memory."""
    return model.parameters * 4 <= device.free_bytes // 2


def _transformers(model: Inventory, device: Device, wished: WeightFormat | None) -> list[Option] | Refusal:
    """What transformers loads; int8 and int4 are made by bitsandbytes, for who asks."""
    stored = _stored(model)
    if stored in ("int8", "int4"):
        return [Option(model, "transformers", stored, stored, needs=PACKED.format(stored))]
    if device.cpu:
        return [Option(model, "transformers", "fp32" if prefers_fp32(model, device) else "bf16", stored)]
    if wished in ("int8", "int4") and stored == "bf16":
        return [Option(model, "transformers", wished, wished, needs=BITS.format(wished))]
    return [Option(model, "transformers", "bf16", stored)]


def offloading(option: Option, device: Device) -> Option | Refusal:
    """The same option with layers in main memory."""
    if option.engine != "transformers" or device.cpu:
        return Refusal(option.engine, "only transformers on a GPU keeps layers in main memory")
    if option.model.facts.quantization is not None or option.weights != "bf16":
        return Refusal(
            "transformers",
            "layers of quantised checkpoints can't stay in main memory; the bf16 edition's can",
        )
    return replace(option, offload=True)


def _vllm(model: Inventory, device: Device, system: OperatingSystem) -> list[Option] | Refusal:
    stored, capability = _stored(model), device.compute_capability
    if device.cpu:
        return Refusal("vllm", "there is no GPU; start its build for CPUs yourself and use --attach URL")
    if system == "windows":
        return Refusal("vllm", "it does not run on Windows; in WSL2 it does")
    if model.facts.source == "folder" and model.facts.name == "pocket":
        return Refusal("vllm", "pocket is not worth a server of its own")
    if capability is not None and capability < VLLM_CAPABILITY:
        return Refusal("vllm", f"compute capability {capability[0]}.{capability[1]} is older than 7.5")
    if stored == "fp8" and capability is not None and capability < VLLM_FP8_CAPABILITY:
        return Refusal(
            "vllm", f"FP8 weights need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
        )
    return [Option(model, "vllm", stored, stored)]

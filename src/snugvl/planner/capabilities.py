"""Options: a model in a format on an engine, and all of them for a model on a device, best first.

Each engine's folder (`engines/`) says which it has, `footprint/` how large they are; this module says what a
generation of GPUs lacks, by compute capability.
"""

from dataclasses import dataclass
from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.quantized import own_precisions
from snugvl.core.formats import FEW_BITS, FORMATS, INTEGERS, Precision
from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import Device, Reason
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import ENGINES, Engine, HeadFormat, KVFormat, Placement, Settings, VisionFormat
from snugvl.planner.wishes import Wishes

Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor number."""

NATIVE: Final = (7, 5)  # oldest GPUs that our kernels are compiled for (`other_cards.py`)
# Oldest GPUs of torch's builds for CUDA 13, and of vLLM, whose FP8 weights go through Marlin from here on.
TORCH: Final = (7, 5)


@dataclass(frozen=True, slots=True)
class Parts:
    """Formats and places of embedding, head and vision tower.

    Attributes:
        head: format of embedding and lm_head; int8 costs next to no quality, so it comes where it gains
            larger images or a longer context.
        vision_weights: format of the vision tower; int8 costs little, so it comes where an int8 head isn't
            enough.
        vision: where the vision tower is; "streamed" costs time for every picture, so without a wish it comes
            where nothing else fits, or has images and contexts as large (`solve._placed`).
        embedding: where the embedding is, "gpu" or "cpu".
        experts: where the experts of a mixture are, "gpu" or "cpu".
    """

    head: HeadFormat = "bf16"
    vision_weights: VisionFormat = "bf16"
    vision: Placement = "gpu"
    embedding: Placement = "gpu"
    experts: Placement = "gpu"


WHOLE: Final = Parts()


@dataclass(frozen=True, slots=True)
class Option:
    """A model in a format on an engine.

    Attributes:
        stored_quality: the format whose quality it has: an FP8 checkpoint that runs as bf16 has FP8's.
        parts: formats and places of embedding, head and vision tower; bf16 on the GPU but for our engine.
        offload: whether decoder layers may stay in host memory.
        needs: what has to be installed besides, as a sentence, or None.
        float32: whether activations, cache and all that isn't quantised are float32.
    """

    model: Inventory
    engine: Engine
    weights: Precision
    stored_quality: Precision
    parts: Parts = WHOLE
    offload: bool = False
    needs: str | None = None
    float32: bool = False

    @property
    def made(self) -> bool:
        """Whether the format is made while loading, not read as it is stored."""
        return self.weights in INTEGERS and self.weights != self.model.facts.quantization

    @property
    def by_bits(self) -> bool:
        """Whether bitsandbytes makes the format while loading."""
        return self.made and rules_of(self.engine).bitsandbytes

    @property
    def streams(self) -> bool:
        """Whether the vision tower is copied from host memory for every picture."""
        return self.parts.vision == "streamed"

    def gives(self, settings: Settings) -> bool:
        """Whether settings are of this option."""
        experts: Placement = "gpu" if settings.expert_slots is None else "cpu"
        parts = Parts(settings.head, settings.vision_weights, settings.vision, settings.embedding, experts)
        theirs = settings.engine, settings.weights, settings.predictor, settings.float32
        mine = self.engine, self.weights, self.model.facts.predicts, self.float32
        return theirs == mine and (parts == self.parts or not rules_of(self.engine).has_parts)

    @property
    def kv_formats(self) -> tuple[KVFormat, ...]:
        """KV formats that this engine can use, best first; `kv_formats_on` says which a plan tries."""
        return rules_of(self.engine).kv_formats

    @property
    def context_limit(self) -> int:
        """Tokens of the longest context that this engine runs with this model."""
        return rules_of(self.engine).context_limit(self.model.facts)

    @property
    def title(self) -> str:
        """The option's short name in a report."""
        parts = self.parts
        said = {
            "vision tower streamed": self.streams,
            "embedding in host memory": parts.embedding == "cpu",
            "experts in host memory": parts.experts == "cpu",
        }
        beside = "".join(f", {what}" for what, so in said.items() if so)
        settings = Settings(self.engine, self.weights, head=parts.head, vision_weights=parts.vision_weights)
        weights = self.model.facts.gguf.file_type if self.model.facts.gguf else settings.weights_name
        return f"{self.model.name} in {weights}{beside}, with {rules_of(self.engine).title}"


def options(
    model: Inventory, device: Device, system: OperatingSystem, wishes: Wishes
) -> tuple[list[Option], list[Reason]]:
    """The options of one model on one kind of device, best first an engine, and why engines have none."""
    found: list[Option] = []
    refused: list[Reason] = []
    nowhere: list[Reason] = []
    for engine in ENGINES:
        rules = rules_of(engine)
        made = rules.options(model, device, wishes)
        if isinstance(made, Reason):
            refused.append(made)
        if why := rules.not_here(device, system):
            nowhere.append(Reason(engine, why))
        elif not isinstance(made, Reason):
            found += made
    return found, [*refused, *nowhere]


def stored_format(model: Inventory) -> Precision:
    """The format that a checkpoint is stored in."""
    return model.facts.quantization or "bf16"


def prefers_fp32(model: Inventory, device: Device) -> bool:
    """Whether `load` takes float32 on a CPU: where the weights take at most half of the free memory."""
    return model.parameters * 4 <= device.free_bytes // 2


def older(capability: Capability | None, needed: Capability) -> str | None:
    """The clause that a GPU is older than needed; None where it isn't, or where there is no GPU."""
    if capability is None or capability >= needed:
        return None
    return f"compute capability {_dotted(capability)} is older than {_dotted(needed)}"


def too_old(facts: ModelFacts, capability: Capability | None, *, cpu: bool) -> str | None:
    """Why our engine doesn't run a model on a device for a GPU's age, or None."""
    for kind in () if cpu else own_precisions(facts):
        if why := no_kernels(kind, capability):
            alike = (form for form in FORMATS.values() if form.zero and form.since == FORMATS[kind].since)
            bits = " or ".join(map(str, sorted(form.bits for form in alike)))
            instead = next(each for each in FEW_BITS if not no_kernels(each, capability))
            return f"some of its matrices have {bits} bits, and {why}; quantise the original to {instead}"
    return older(capability, NATIVE)


def no_kernels(precision: Precision, capability: Capability | None) -> str | None:
    """Why the kernels of our engine don't read weights of a precision on a GPU, as a clause, or None."""
    since = FORMATS[precision].since if precision in FORMATS else NATIVE
    return f"no GPU has kernels for {precision}" if since is None else older(capability, since)


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"

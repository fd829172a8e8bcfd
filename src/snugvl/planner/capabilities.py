"""What the engines can really do today, and what is coming: the only place that says so.

An option that is pending is shown ("with int4 it would fit") and never recommended. When an issue lands, its
row here changes, and with it every plan.
"""

from dataclasses import dataclass
from typing import Final

from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.footprint.total import Device
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Engine, KVFormat, WeightFormat

FAST_ENGINE: Final = "issue 5"

VLLM_CAPABILITY: Final = (7, 5)  # oldest GPUs that vLLM runs on
VLLM_FP8_CAPABILITY: Final = (8, 0)  # FP8 weights through Marlin; native from 8.9
VLLM_FP8_KV_CAPABILITY: Final = (8, 9)
VLLM_CHUNKS: Final = (2048, 1024, 512)  # --max-num-batched-tokens, fastest first
NATIVE_CHUNK: Final = 2048  # EngineConfig.max_batched_tokens; no command changes it yet


@dataclass(frozen=True, slots=True)
class Option:
    """A model in a format on an engine.

    Attributes:
        pending: the issue that will make it possible, or None where it works today.
        stored_quality: the format whose quality it has: an FP8 checkpoint stays FP8 when it runs as bf16.
    """

    model: Inventory
    engine: Engine
    weights: WeightFormat
    stored_quality: WeightFormat
    pending: str | None = None

    @property
    def kv_formats(self) -> tuple[KVFormat, ...]:
        """KV formats that this engine can use, best first. Whether the GPU can is `kv_formats_on`."""
        return ("bf16", "fp8") if self.engine == "vllm" else ("bf16",)

    @property
    def title(self) -> str:
        """Short name in a report."""
        return f"{self.model.name} as {self.weights} with {self.engine}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that can't run a model on this machine, and why."""

    engine: Engine
    reason: str


def options(model: Inventory, device: Device, system: OperatingSystem) -> tuple[list[Option], list[Refusal]]:
    """Everything that could be tried with one model on one kind of device, today and soon."""
    found: list[Option] = []
    refused: list[Refusal] = []
    for make in (_native, _transformers, _vllm):
        made = make(model, device, system)
        if isinstance(made, Refusal):
            refused.append(made)
        else:
            found += made
    return found, refused


def kv_formats_on(option: Option, device: Device) -> tuple[KVFormat, ...]:
    """KV formats for an option on a device, best first."""
    capability = device.compute_capability
    if capability is not None and capability < VLLM_FP8_KV_CAPABILITY:
        return option.kv_formats[:1]
    return option.kv_formats


def chunks(engine: Engine) -> tuple[int, ...]:
    """Tokens of a step that an engine can be told, fastest first."""
    return VLLM_CHUNKS if engine == "vllm" else (NATIVE_CHUNK,)


def _stored(model: Inventory) -> WeightFormat:
    return model.facts.quantization or "bf16"


def _native(model: Inventory, device: Device, system: OperatingSystem) -> list[Option] | Refusal:
    if not model.facts.native:
        return Refusal("native", f"our engine does not run the {model.facts.family} family yet")
    stored = _stored(model)
    if stored in ("int8", "int4"):
        return [Option(model, "native", stored, stored, FAST_ENGINE)]
    wide: WeightFormat = "fp32" if device.cpu and _prefers_fp32(model, device) else "bf16"
    found = [Option(model, "native", wide, stored)]
    if not device.cpu:
        if stored == "fp8":
            found.append(Option(model, "native", "fp8", "fp8", FAST_ENGINE))
        found += [Option(model, "native", low, low, FAST_ENGINE) for low in ("int8", "int4")]
    return found


def _prefers_fp32(model: Inventory, device: Device) -> bool:
    """On a CPU `load` takes float32 where that leaves half of the free memory."""
    return model.parameters * 4 <= device.free_bytes // 2


def _transformers(model: Inventory, device: Device, system: OperatingSystem) -> list[Option] | Refusal:
    stored = _stored(model)
    if stored in ("int8", "int4"):
        return Refusal(
            "transformers", f"ready-made {stored} weights need packages that we have not checked yet"
        )
    if device.cpu:
        return Refusal("transformers", "on a CPU our own engine does the same")
    return [Option(model, "transformers", "bf16", stored)]


def _vllm(model: Inventory, device: Device, system: OperatingSystem) -> list[Option] | Refusal:
    stored, capability = _stored(model), device.compute_capability
    if device.cpu:
        return Refusal("vllm", "there is no GPU")
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

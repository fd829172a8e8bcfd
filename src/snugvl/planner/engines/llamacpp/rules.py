"""llama.cpp, to the planner."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.core.reason import Reason
from snugvl.core.sizes import format_size
from snugvl.hardware.machine import Gpu, OperatingSystem
from snugvl.planner.capabilities import Option, stored_format
from snugvl.planner.engines.llamacpp.flags import llamacpp_arguments
from snugvl.planner.engines.llamacpp.footprint import (
    HOST_PROCESS_BYTES,
    host_bytes,
    llamacpp_components,
    offloads,
)
from snugvl.planner.engines.llamacpp.speed import llamacpp_rate
from snugvl.planner.engines.rules import EngineRules
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.total import Device
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import Wishes

CHUNKS: Final = (512, 256, 128)  # of `-ub`, fastest first


class LlamacppRules(EngineRules):
    """A llama-server of its own, on GPUs of every maker and on processors."""

    engine = "llamacpp"
    title = "llama.cpp"
    kind = "llama.cpp, a server of its own"
    rank = 1
    honours = frozenset(("kv_cache",))
    scales_cache = True
    offloads = True
    reads_only_gguf = True
    predicts_rate = True
    process_bytes = HOST_PROCESS_BYTES

    def not_here(self, device: Device, system: OperatingSystem) -> str | None:
        """It runs everywhere."""
        return None

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """A GGUF as it is."""
        if model.facts.gguf is None:
            return Reason("llamacpp", "llama.cpp reads GGUF files; name one (owner/name:Q4_K_M, or a file)")
        stored = stored_format(model)
        return [Option(model, "llamacpp", stored, stored)]

    def offloading(self, option: Option, device: Device) -> Option | Reason:
        """Layers that the processor computes, beside a GPU."""
        return super().offloading(option, device) if device.cpu else replace(option, offload=True)

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """Large steps first."""
        for chunk in CHUNKS:
            yield replace(base, chunk=chunk)

    def offload_ways(self, model: Inventory, base: Settings) -> list[list[Settings]]:
        """Experts, layers, the tower."""
        return offloads(model, next(self.variants(model, base, cpu=False)))

    def host_bytes(self, model: Inventory, settings: Settings) -> int:
        """Main memory that llama-server takes beside a GPU, in bytes."""
        return host_bytes(model, settings)

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Buffers of ggml; where memory is one, what is beside the GPU as well."""
        parts = []
        if device.unified:
            beside = host_bytes(model, settings)
            parts.append(
                Component(
                    "beside the GPU", Kind.OTHER, beside, why="embedding, inputs, the process: one memory"
                )
            )
        gpu, scratch = not device.cpu, device.cublas_bytes if device.api == "CUDA" else 0
        return parts + llamacpp_components(model, settings, gpu=gpu, cublas_bytes=scratch, api=device.api)

    def kv_name(self, settings: Settings) -> str:
        """ggml's types."""
        return "q8_0" if settings.kv == "fp8" else "f16"

    def decode_rate(self, model: Inventory, settings: Settings, gpu: Gpu | None) -> float | None:
        """By shares of the bandwidth that people publish."""
        return llamacpp_rate(model, settings, gpu)

    def why(self, choice: Choice) -> str | None:
        """It reads GGUFs."""
        return "GGUF files are its own"

    def host_text(self, choice: Choice) -> str | None:
        """Parts that the processor computes beside the GPU, and their size, for people."""
        settings, model = choice.settings, choice.option.model
        if not settings.on_gpu:
            return None
        layers = model.facts.text.num_layers
        parts = (
            [f"the experts of {settings.host_experts} of {layers} layers"] if settings.host_experts else []
        )
        parts += [f"{settings.offloaded} of {layers} layers whole"] if settings.offloaded else []
        parts += ["the vision tower"] if settings.vision == "cpu" else []
        held = format_size(host_bytes(model, settings))
        return (
            f"{', '.join(parts) or 'the embedding'} in main memory ({held} in all), computed by the processor"
        )

    def command(self, choice: Choice) -> str | None:
        """`llama-server` with every flag."""
        return shlex.join(llamacpp_arguments(choice))


RULES = LlamacppRules()

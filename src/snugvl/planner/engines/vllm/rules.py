"""vLLM, to the planner."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.core.reason import Reason
from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.capabilities import Option, stored_format
from snugvl.planner.commands import visible
from snugvl.planner.engines.rules import EngineRules, Spread
from snugvl.planner.engines.vllm.flags import VLLM_STEPS, vllm_arguments
from snugvl.planner.engines.vllm.footprint import vllm_components
from snugvl.planner.engines.vllm.pages import pages, sequence_bytes
from snugvl.planner.engines.vllm.weights import vllm_weight_components
from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import weight_components
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import Wishes

PARALLEL: Final = (2, 4, 8)  # GPUs that share a layer


class VllmRules(EngineRules):
    """A vLLM server of its own."""

    engine = "vllm"
    title = "vLLM"
    kind = "vLLM, a server of its own (installed separately)"
    installed_by = "pip install 'snugvl[vllm]'"
    runs_remote_code = True
    rank = 2
    honours = frozenset(("kv_cache",))
    fp8_cache_since = (8, 9)
    drops_unused_tower = True
    spare_note = "vLLM makes it KV cache"

    def not_here(self, device: Device, system: OperatingSystem) -> str | None:
        """Beside what PyTorch needs, Linux."""
        if system not in ("linux", "wsl2", "windows"):
            return "it runs on Linux and in WSL2 alone"
        return super().not_here(device, system)

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """The checkpoint as it is stored, on GPUs."""
        if refusal := self.unread(model):
            return refusal
        if device.cpu:
            return Reason("vllm", "there is no GPU; start its build for CPUs yourself and use --attach URL")
        if model.facts.source == "folder" and model.facts.name == "pocket":
            return Reason("vllm", "pocket is not worth a server of its own")
        stored = stored_format(model)
        return [Option(model, "vllm", stored, stored)]

    def stored_as(self, option: Option) -> str:
        """It rounds nothing."""
        return f"vLLM serves what is stored, {stored_format(option.model)}"

    def at_once(self, sequences: int, concurrency: int) -> int:
        """More requests than have room for whole contexts share the cache; it pre-empts."""
        return sequences

    def spreads(self, model: Inventory, wishes: Wishes, count: int) -> Sequence[Spread]:
        """Fewest GPUs first; on as many, copies first: they don't wait for one another.

        Heads must divide for tensor parallelism; otherwise groups of layers are spread.
        """
        found = [Spread()]
        heads, vision = model.facts.text.num_heads, model.facts.vision
        for gpus in (*(size for size in PARALLEL if size <= count), *({count} - {1, *PARALLEL})):
            if wishes.concurrency >= gpus:
                found.append(Spread(data=gpus))
            divides = heads % gpus == 0 and (vision is None or vision.num_heads % gpus == 0)
            tensor = divides and gpus in PARALLEL
            found.append(Spread(tensor=gpus) if tensor else Spread(pipeline=gpus))
        return found

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """CUDA graphs, then large chunks."""
        for eager in (False, True):
            for chunk, sequences in VLLM_STEPS:
                most = max(sequences, -(-base.sequences // base.data_parallel))
                yield replace(base, eager=eager, chunk=chunk, sequences=most)

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Weights, the cache, and what vLLM profiles and doesn't."""
        parts = [*weight_components(model, settings), self.kv_component(model, settings)]
        return parts + vllm_components(model, settings, device.compute_capability)

    def weight_components(self, model: Inventory, settings: Settings) -> tuple[Component, ...]:
        """Weights per part as vLLM's classes hold them."""
        return vllm_weight_components(model, settings)

    def kv_bytes(self, model: Inventory, settings: Settings, tokens: int) -> int:
        """Keys and values of one sequence in vLLM's blocks, with its states."""
        return sequence_bytes(model, settings, tokens)

    def kv_component(self, model: Inventory, settings: Settings) -> Component:
        """Room for `concurrency` whole contexts; vLLM keeps one block for itself.

        More sequences may run (`--max-num-seqs`): they share this room, and wait or are pre-empted.
        """
        pool = pages(model, settings)
        nbytes = sequence_bytes(model, settings, settings.context) * settings.concurrency + pool.block_bytes
        blocks = pool.blocks(settings.context, settings.chunk)
        sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
        why = (
            f"{sequences}{settings.context:,} tokens, "
            f"{blocks:,} blocks of {pool.block_bytes / 2**20:,.2f} MiB ({settings.kv_name})"
        )
        return Component(Kind.CACHE.value, Kind.CACHE, up(nbytes, LARGE_ROUND_BYTES), why=why)

    def command(self, choice: Choice) -> str | None:
        """`vllm serve` with every flag, behind the variables that show it the choice's GPUs alone."""
        variables = "".join(f"{name}={value} " for name, value in visible(choice))
        return variables + shlex.join(vllm_arguments(choice))


RULES = VllmRules()

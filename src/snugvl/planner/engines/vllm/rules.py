"""The planner's rules for vLLM, and `vllm serve …` with every flag computed (as in vLLM 0.33).

Utilisation is a share of the card's TOTAL memory as CUDA reports it, which must be free when vLLM starts. It
includes neither the CUDA context nor, with several GPUs, the buffers of vLLM's NCCL communicator, which exist
before vLLM measures, nor memory that vLLM doesn't profile (`unprofiled`):

    --gpu-memory-utilization = ⌊(usable - context - NCCL - unprofiled) / CUDA's total⌋ to four digits

The rest of that share, beside the model, becomes KV cache, so more requests than planned may run at once.
"""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.capabilities import Option, stored_format
from snugvl.planner.commands import visible
from snugvl.planner.engines.rules import EngineRules, Spread
from snugvl.planner.engines.vllm.footprint import (
    NCCL,
    UNPROFILED,
    max_sequences,
    pages,
    vllm_components,
    vllm_weight_components,
)
from snugvl.planner.footprint.total import LARGE_ROUND_BYTES, Component, Device, Reason, up
from snugvl.planner.footprint.vision import scales
from snugvl.planner.footprint.weights import weight_components
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import Settings
from snugvl.planner.speed import Pace
from snugvl.planner.wishes import Wishes

PARALLEL: Final = (2, 4, 8)  # GPUs that share a layer
# (--max-num-batched-tokens, --max-num-seqs), fastest first. It pre-empts: only `concurrency` is sure of room.
VLLM_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
# benchmarks/results/speeds.csv; the last by what is published.
MEASURED: Final = frozenset(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 5090"))
DIGITS: Final = 10_000


class VllmRules(EngineRules):
    """Rules of vLLM, which runs as a server of its own."""

    engine = "vllm"
    title = "vLLM"
    kind = "vLLM, a server of its own (installed separately)"
    installed_by = "pip install 'snugvl[vllm]'"
    runs_remote_code = True
    rank = 2
    honours = frozenset(("concurrency", "kv_cache"))
    fp8_cache_since = (8, 9)
    drops_unused_tower = True
    pace = Pace(80e-6, 130e-6, within=1.5, eager_layer_s=1.1e-3, cards=MEASURED, elsewhere=2.0)
    spare_note = "vLLM makes it KV cache"

    def not_here(self, device: Device, system: OperatingSystem) -> str | None:
        """Why it doesn't run here, as a clause: it needs Linux and what PyTorch needs; None where it runs."""
        if system not in ("linux", "wsl2", "windows"):
            return "it runs on Linux and in WSL2 alone"
        return super().not_here(device, system)

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """The option of the checkpoint as it is stored, on GPUs, or why there is none."""
        if refusal := self.unread(model):
            return refusal
        if device.cpu:
            return Reason("vllm", "there is no GPU; start its build for CPUs yourself and use --attach URL")
        if model.facts.source == "folder" and model.facts.name == "pocket":
            return Reason("vllm", "pocket is not worth a server of its own")
        stored = stored_format(model)
        return [Option(model, "vllm", stored, stored)]

    def stored_as(self, option: Option) -> str:
        """Why it has no other formats, as a clause: it rounds nothing."""
        return f"vLLM serves what is stored, {stored_format(option.model)}"

    def at_once(self, sequences: int, concurrency: int) -> int:
        """Requests that may run at once: more than have room for whole contexts, as vLLM preempts."""
        return sequences

    def spreads(self, model: Inventory, wishes: Wishes, count: int) -> Sequence[Spread]:
        """Ways to spread a model, fewest GPUs first, then copies first: they don't wait for one another.

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
        """Settings that differ in speed alone: with CUDA graphs first, then large chunks first."""
        for eager in (False, True):
            for chunk, sequences in VLLM_STEPS:
                most = max(sequences, -(-base.sequences // base.data_parallel))
                yield base._replace(eager=eager, chunk=chunk, sequences=most)

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Components of weights, cache, and workspace, whether vLLM profiles it or not."""
        parts = [*weight_components(model, settings), self.kv_component(model, settings)]
        return parts + vllm_components(model, settings, device.compute_capability)

    def weight_components(self, model: Inventory, settings: Settings) -> tuple[Component, ...]:
        """Weights per part as vLLM's classes hold them."""
        return vllm_weight_components(model, settings)

    def kv_bytes(self, model: Inventory, settings: Settings, tokens: int) -> int:
        """Bytes of one sequence in vLLM's blocks, its recurrent states included."""
        pool = pages(model, settings)
        return pool.blocks(tokens, settings.chunk) * pool.block_bytes

    def kv_component(self, model: Inventory, settings: Settings) -> Component:
        """The component of the KV cache: room for `concurrency` whole contexts, and vLLM's one spare block.

        More sequences may run (`--max-num-seqs`): they share this room, and wait or are preempted.
        """
        pool = pages(model, settings)
        nbytes = self.kv_bytes(model, settings, settings.context) * settings.concurrency + pool.block_bytes
        blocks = pool.blocks(settings.context, settings.chunk)
        sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
        why = (
            f"{sequences}{settings.context:,} tokens, "
            f"{blocks:,} blocks of {pool.block_bytes / 2**20:,.2f} MiB ({settings.kv_name})"
        )
        return Component(Kind.CACHE.value, Kind.CACHE, up(nbytes, LARGE_ROUND_BYTES), why=why)

    def command(self, choice: Choice) -> str | None:
        """`vllm serve` with every flag, after the variables that make the choice's GPUs alone visible."""
        variables = "".join(f"{name}={value} " for name, value in visible(choice))
        return variables + shlex.join(["vllm", "serve", choice.option.model.name, *vllm_flags(choice)])


def utilisation(choice: Choice) -> float:
    """The value of `--gpu-memory-utilization`, from 0 to 1, from free memory."""
    budget = choice.budget
    beside = choice.footprint.named(NCCL) + choice.footprint.named(UNPROFILED)
    room = budget.usable_bytes - budget.device.context_bytes - beside
    cuda_total = budget.gpu.cuda_total_bytes if budget.gpu is not None else None
    return math.floor(room * DIGITS / (cuda_total or budget.total_bytes)) / DIGITS


def compact(values: dict[str, int]) -> str:
    """JSON without spaces."""
    return json.dumps(values, separators=(",", ":"))


def vllm_flags(choice: Choice) -> list[str]:
    """Words of the command behind the model: every flag that the plan computes."""
    settings, model = choice.settings, choice.option.model
    words = ["--max-model-len", str(settings.context)]
    at_once = max_sequences(settings)
    words += ["--max-num-seqs", str(at_once)]
    words += ["--max-num-batched-tokens", str(max(settings.chunk, at_once))]
    words += ["--gpu-memory-utilization", f"{utilisation(choice):.4f}"]
    if settings.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if model.facts.vision is not None:
        limits = {"image": settings.images, "video": 0} if settings.images else {"image": 0, "video": 0}
        words += ["--limit-mm-per-prompt", compact(limits)]
        if settings.images and settings.max_pixels is not None and scales(model):
            words += ["--mm-processor-kwargs", compact({"max_pixels": settings.max_pixels})]
    if settings.eager:
        words.append("--enforce-eager")
    if settings.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    if settings.pipeline_parallel > 1:
        words += ["--pipeline-parallel-size", str(settings.pipeline_parallel)]
    if settings.data_parallel > 1:
        words += ["--data-parallel-size", str(settings.data_parallel)]
    return words


RULES = VllmRules()

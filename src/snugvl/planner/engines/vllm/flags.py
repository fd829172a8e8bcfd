"""`vllm serve …` with every flag computed (names and meaning as in vLLM 0.33).

Utilisation counts of the card's TOTAL memory as CUDA tells it, must be free when vLLM starts, and does not
include the CUDA context and, with several GPUs, the buffers of vLLM's NCCL communicator, which exist before
vLLM looks, nor what it never looks at (`unprofiled`):

    --gpu-memory-utilization = ⌊(usable - context - NCCL - unprofiled) / CUDA's total⌋ to four digits

What the model doesn't take of it becomes KV cache, so more requests than planned may run at once.
"""

import json
import math
from typing import Final

from snugvl.planner.engines.vllm.footprint import NCCL, UNPROFILED
from snugvl.planner.footprint.images import scales
from snugvl.planner.plan import Choice

# (--max-num-batched-tokens, --max-num-seqs), fastest first. It pre-empts: only `concurrency` is sure of room.
VLLM_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
DIGITS: Final = 10_000


def utilisation(choice: Choice) -> float:
    """`--gpu-memory-utilization` from free memory."""
    budget = choice.budget
    beside = choice.footprint.named(NCCL) + choice.footprint.named(UNPROFILED)
    room = budget.usable_bytes - budget.device.context_bytes - beside
    cuda_total = budget.gpu.cuda_total_bytes if budget.gpu is not None else None
    return math.floor(room * DIGITS / (cuda_total or budget.total_bytes)) / DIGITS


def compact(values: dict[str, int]) -> str:
    """JSON without spaces."""
    return json.dumps(values, separators=(",", ":"))


def vllm_arguments(choice: Choice) -> list[str]:
    """The words of the command."""
    return ["vllm", "serve", choice.option.model.name, *vllm_flags(choice)]


def vllm_flags(choice: Choice) -> list[str]:
    """Those behind the model: every flag that the plan computes."""
    settings, model = choice.settings, choice.option.model
    words = ["--max-model-len", str(settings.context)]
    at_once = max(settings.sequences, settings.concurrency_of_copy)
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

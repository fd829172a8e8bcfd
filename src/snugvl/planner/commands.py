"""The command to type next: the server, unless a task was named."""

import shlex
from typing import Any, Final

from snugvl.core.options import ROWS, LoadOptions, typed
from snugvl.core.sizes import exact_size
from snugvl.planner.engines import rules_of
from snugvl.planner.plan import Choice
from snugvl.planner.settings import PREFERRED
from snugvl.planner.wishes import Wishes

# Options that the server's command has and a task's hasn't.
SERVERS: Final = frozenset(name for name, row in ROWS.items() if "load" not in row.commands)
SERVED = "caption"  # the task of wishes that name none
TARGETS = {
    "scene": ["IMAGE"],
    "ask": ["IMAGE", "What is in this picture?"],
    "detect": ["IMAGE", "--object", "person"],
}


def next_command(choice: Choice, wishes: Wishes) -> str:
    """The command, one line for a POSIX shell: ours, or the engine's own where snugvl doesn't start it."""
    theirs = None if rules_of(choice.option.engine).starts else plain_command(choice)
    return theirs or shlex.join(our_arguments(choice, wishes))


def plain_command(choice: Choice) -> str | None:
    """The engine's own command, without snugvl, for a POSIX shell; None where it has none."""
    return rules_of(choice.option.engine).command(choice)


def beside_gpu_bytes(choice: Choice) -> int:
    """Bytes of host memory that a choice takes for parts of the model beside a GPU; 0 where none are."""
    settings = choice.settings
    if choice.budget.gpu is None or choice.budget.device.unified:
        return 0
    if not (settings.offloaded or settings.host_experts) and settings.expert_slots is None:
        return 0
    return rules_of(choice.option.engine).host_bytes(choice.option.model, settings)


def visible(choice: Choice) -> tuple[tuple[str, str], ...]:
    """Environment variables, by name and value, that make the choice's GPUs alone visible.

    An index is relative to what is visible already, so it isn't enough. UUIDs would do, but vLLM 0.22 takes
    CUDA_VISIBLE_DEVICES for NVML's numbers, which equal CUDA's in the order of the PCI bus.
    """
    if [gpu.index for gpu in choice.gpus] in ([], [0]) or choice.gpus[0].api != "cuda":
        return ()
    positions = [gpu.position for gpu in choice.gpus]
    if None in positions:  # slices, which have names alone, and machines that were described
        return (("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid or str(gpu.index) for gpu in choice.gpus)),)
    numbers = ",".join(map(str, positions))
    return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", numbers))


def our_arguments(choice: Choice, wishes: Wishes) -> list[str]:
    """The words of snugvl's own command: the model and the wishes, from which it plans the same again.

    It is `serve` where vLLM, llama.cpp, layers in host memory, or an option that a task's command doesn't
    have is part of the plan.
    """
    asked = load_options(choice, wishes)
    said = {name: asked.said()[name] for name in ("backend", *asked.said()) if name in asked.said()}
    beyond = said.keys() & SERVERS - ({"purpose"} if wishes.task == "detect" else set())
    alone = rules_of(choice.option.engine).in_process and not choice.option.offload and not beyond
    if wishes.task == SERVED or not alone:
        return ["snugvl", "serve", asked.model, *_words(said)]
    said.pop("purpose", None)
    return ["snugvl", wishes.task, "--model", asked.model, *_words(said), *TARGETS[wishes.task]]


def _words(said: dict[str, Any]) -> list[str]:
    return [word for name, value in said.items() for word in typed(name, value)]


def load_options(choice: Choice, wishes: Wishes) -> LoadOptions:
    """Options that lead to this choice when they are planned again: for a command, and for a saved plan.

    What only `plan` can be asked for (a floor of quality, the least tokens of an image) becomes what the plan
    made of it.
    """
    settings, facts = choice.settings, choice.option.model.facts
    made = wishes.quality != "any" or wishes.min_image_tokens is not None or "weights" in choice.pinned
    weights = wishes.weights or (settings.weights if made else None)
    one = len(choice.gpus) == 1 and choice.gpus[0].index
    named = wishes.backend != "auto" or choice.option.engine != PREFERRED or facts.gguf is not None
    counted = wishes.images != 1 and not wishes.language_only and facts.vision is not None
    return LoadOptions(
        facts.name,
        device=f"cuda:{choice.gpus[0].index}" if one else "auto",
        context=wishes.context or (settings.context if wishes.min_image_tokens else None),
        max_pixels=wishes.max_pixels or (settings.max_pixels if wishes.min_image_tokens else None),
        weights="auto" if weights is None else "bf16" if weights == "fp32" else weights,
        memory=None if wishes.memory_bytes is None else exact_size(wishes.memory_bytes),
        kv_cache=wishes.kv_cache or "auto",
        backend=choice.option.engine if named else "auto",
        purpose=wishes.good_for,
        images=wishes.images if counted else None,
        concurrency=wishes.concurrency if wishes.concurrency > 1 else None,
        language_only=wishes.language_only,
        tower="resident" if "tower" in choice.pinned else wishes.tower,
        embedding=wishes.embedding,
        experts=wishes.experts,
        speculation=wishes.speculation,
        **dict(wishes.also),
    )

"""The command to type next: the server, unless a task was named."""

import shlex

from snugvl.planner.plan import Choice
from snugvl.planner.vllm_flags import vllm_arguments
from snugvl.planner.wishes import Wishes

SERVED = "caption"  # the task of wishes that name none
TARGETS = {
    "scene": ["IMAGE"],
    "ask": ["IMAGE", "What is in this picture?"],
    "detect": ["IMAGE", "--object", "person"],
}


def next_command(choice: Choice, wishes: Wishes) -> str:
    """One line of ours for a POSIX shell."""
    return shlex.join(our_arguments(choice, wishes))


def plain_command(choice: Choice) -> str | None:
    """The engine's own command, without us, where it has one; for a POSIX shell."""
    if choice.option.engine != "vllm":
        return None
    variables = "".join(f"{name}={value} " for name, value in visible(choice))
    return variables + shlex.join(vllm_arguments(choice))


def visible(choice: Choice) -> tuple[tuple[str, str], ...]:
    """The variables that show the choice's GPUs alone.

    An index counts what is visible already, so it won't do. Names would, but vLLM 0.22 takes what is in
    CUDA_VISIBLE_DEVICES for NVML's numbers, which are CUDA's when it goes by the PCI bus.
    """
    if [gpu.index for gpu in choice.gpus] in ([], [0]):
        return ()
    positions = [gpu.position for gpu in choice.gpus]
    if None in positions:  # slices, which have names alone, and machines that were described
        return (("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid or str(gpu.index) for gpu in choice.gpus)),)
    numbers = ",".join(map(str, positions))
    return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", numbers))


def our_arguments(choice: Choice, wishes: Wishes) -> list[str]:
    """The words of our own command. vLLM, and layers in main memory, come with the server alone."""
    model = choice.option.model.name
    options = [*_engine(choice), *_room(choice, wishes), *_device(choice)]
    if wishes.task == SERVED or choice.option.engine == "vllm" or choice.option.offload:
        return ["snugvl", "serve", model, *options, *_served(choice, wishes)]
    if wishes.images <= 1:
        return ["snugvl", wishes.task, "--model", model, *options, *TARGETS[wishes.task]]
    images = [f"IMAGE{number}" for number in range(1, wishes.images + 1)]
    return ["snugvl", "ask", "--together", "--model", model, *options, *images, *TARGETS["ask"][1:]]


def _engine(choice: Choice) -> list[str]:
    engine = choice.option.engine
    return [] if engine == "native" else ["--backend", engine]


def _room(choice: Choice, wishes: Wishes) -> list[str]:
    room = ["--context", str(choice.settings.context)]
    if choice.settings.max_pixels is not None:
        room += ["--max-pixels", str(choice.settings.max_pixels)]
    made = choice.settings.weights != choice.option.model.facts.quantization
    if choice.settings.weights in ("int8", "int4") and made:  # bf16 and FP8 an engine takes by itself
        room += ["--weights", choice.settings.weights]
    if choice.settings.vision == "streamed":
        room += ["--tower", "streamed"]
    if choice.settings.embedding == "cpu" or wishes.embedding == "gpu":
        room += ["--embedding", choice.settings.embedding]
    if choice.option.engine == "native" and choice.settings.kv == "fp8":
        room += ["--kv-cache", "fp8"]
    return room


def _device(choice: Choice) -> list[str]:
    one = len(choice.gpus) == 1 and choice.gpus[0].index
    return ["--device", f"cuda:{choice.gpus[0].index}"] if one else []


def _served(choice: Choice, wishes: Wishes) -> list[str]:
    """What only the server's command has."""
    words = ["--language-only"] if choice.settings.language_only else []
    if choice.option.engine == "vllm" and wishes.images > 1:
        words += ["--images", str(wishes.images)]
    if choice.option.engine == "vllm" and wishes.concurrency > 1:
        words += ["--concurrency", str(wishes.concurrency)]
    return words

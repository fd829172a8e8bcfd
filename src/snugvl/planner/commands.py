"""The command to type next: the server, unless a task was named."""

import shlex

from snugvl.planner.llamacpp_flags import llamacpp_arguments
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
    """One line for a POSIX shell: ours, or llama.cpp's, which we don't start yet."""
    if choice.option.engine == "llamacpp":
        return shlex.join(llamacpp_arguments(choice))
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
    if [gpu.index for gpu in choice.gpus] in ([], [0]) or choice.gpus[0].api != "cuda":
        return ()
    positions = [gpu.position for gpu in choice.gpus]
    if None in positions:  # slices, which have names alone, and machines that were described
        return (("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid or str(gpu.index) for gpu in choice.gpus)),)
    numbers = ",".join(map(str, positions))
    return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", numbers))


def our_arguments(choice: Choice, wishes: Wishes) -> list[str]:
    """The words of our own command: the model and what was wished, since the same solver plans again there.

    What only `plan` can be asked for (a floor of quality, the least tokens of an image) becomes what the plan
    made of it. vLLM, and layers in main memory, come with the server alone.
    """
    model = choice.option.model.name
    options = [*_wished(choice, wishes), *_device(choice)]
    if wishes.task == SERVED or choice.option.engine == "vllm" or choice.option.offload:
        return ["snugvl", "serve", model, *options, *_served(wishes)]
    if wishes.images <= 1:
        return ["snugvl", wishes.task, "--model", model, *options, *TARGETS[wishes.task]]
    images = [f"IMAGE{number}" for number in range(1, wishes.images + 1)]
    return ["snugvl", "ask", "--together", "--model", model, *options, *images, *TARGETS["ask"][1:]]


def _wished(choice: Choice, wishes: Wishes) -> list[str]:
    settings = choice.settings
    weights = wishes.weights or (settings.weights if wishes.quality != "any" else None)
    pixels = wishes.max_pixels or (settings.max_pixels if wishes.min_image_tokens else None)
    backend = choice.option.engine if wishes.backend != "auto" or choice.option.engine != "native" else None
    values = {
        "--backend": backend,
        "--context": wishes.context,
        "--max-pixels": pixels,
        "--weights": None if weights == "fp32" else weights,
        "--kv-cache": wishes.kv_cache,
        "--memory": wishes.memory_bytes,
        "--tower": None if wishes.tower == "auto" else wishes.tower,
        "--embedding": None if wishes.embedding == "auto" else wishes.embedding,
    }
    return [word for name, value in values.items() if value is not None for word in (name, str(value))]


def _device(choice: Choice) -> list[str]:
    one = len(choice.gpus) == 1 and choice.gpus[0].index
    return ["--device", f"cuda:{choice.gpus[0].index}"] if one else []


def _served(wishes: Wishes) -> list[str]:
    """What only the server's command has."""
    words = ["--language-only"] if wishes.language_only else []
    if wishes.good_for != "chat":
        words += ["--for", wishes.good_for]
    if wishes.images != 1 and not wishes.language_only:
        words += ["--images", str(wishes.images)]
    if wishes.speculation == "mtp":
        words += ["--speculation", "mtp"]
    if wishes.concurrency > 1:
        words += ["--concurrency", str(wishes.concurrency)]
    return words

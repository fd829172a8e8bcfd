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
    """One line for a POSIX shell."""
    if choice.option.engine == "vllm":
        return _visible(choice) + shlex.join(vllm_arguments(choice))
    if choice.option.engine == "transformers":
        return _transformers(choice)
    return shlex.join(native_arguments(choice, wishes))


def _visible(choice: Choice) -> str:
    """Which GPUs a child may see: by NVML's name, as an index counts what is visible already."""
    if [gpu.index for gpu in choice.gpus] in ([], [0]):
        return ""
    names = ",".join(gpu.uuid or str(gpu.index) for gpu in choice.gpus)
    return f"CUDA_VISIBLE_DEVICES={names} "


def native_arguments(choice: Choice, wishes: Wishes) -> list[str]:
    """The words of our own command."""
    model, device = choice.option.model.name, []
    room = ["--context", str(choice.settings.context)]
    if choice.settings.max_pixels is not None:
        room += ["--max-pixels", str(choice.settings.max_pixels)]
    if choice.settings.weights in ("int8", "int4"):
        room += ["--weights", choice.settings.weights]
    if choice.gpus and choice.gpus[0].index:
        device = ["--device", f"cuda:{choice.gpus[0].index}"]
    if wishes.task == SERVED:
        return ["snugvl", "serve", model, *room, *device]
    if wishes.images <= 1:
        return ["snugvl", wishes.task, "--model", model, *room, *device, *TARGETS[wishes.task]]
    images = [f"IMAGE{number}" for number in range(1, wishes.images + 1)]
    return ["snugvl", "ask", "--together", "--model", model, *room, *device, *images, *TARGETS["ask"][1:]]


def _transformers(choice: Choice) -> str:
    """Python that loads the model as planned; `generate` is then called with at most the planned context."""
    model = repr(choice.option.model.name)
    gpu = choice.gpus[0].index if choice.gpus else 0
    names = "AutoModelForImageTextToText, AutoProcessor"
    extra = ""
    if choice.option.model.facts.quantization == "fp8":
        names += ", FineGrainedFP8Config"
        extra = ", quantization_config=FineGrainedFP8Config(dequantize=True)"
    processor = f"AutoProcessor.from_pretrained({model}"
    if choice.settings.max_pixels is not None:
        least = choice.option.model.facts.vision.rule.min_pixels if choice.option.model.facts.vision else 0
        size = {"shortest_edge": least, "longest_edge": choice.settings.max_pixels}
        processor += f", size={size!r}"
    code = (
        f"from transformers import {names}; processor = {processor}); "
        f"model = AutoModelForImageTextToText.from_pretrained({model}, dtype='bfloat16', "
        f"device_map='cuda:{gpu}', attn_implementation='sdpa'{extra})"
    )
    return shlex.join(["python", "-i", "-c", code])

"""`llama-server …` with every flag computed (names and meaning as in llama.cpp of October 2026).

Nothing is left to its own fitting (`-fit off`): that knows free memory, but no later picture. The prompts
that it would keep in main memory (`--cache-ram`, 8 GiB) aren't planned; a slot keeps its own all the same.
"""

from typing import Final

from snugvl.planner.engines.llamacpp.footprint import CHECKPOINTS, cells, checkpoint_bytes
from snugvl.planner.footprint.images import scales
from snugvl.planner.plan import Choice

BATCH: Final = 2048  # tokens handed over at once; a step computes `-ub` of them
# Builds of before October 2026 try the tower at their start with a picture of so many tokens, whatever
# `--image-max-tokens` says, and keep the memory.
TRIED_TOKENS: Final = 46 * 46


def llamacpp_flags(choice: Choice) -> list[str]:
    """Those behind the model."""
    settings, model = choice.settings, choice.option.model
    words = ["-c", str(cells(settings) * settings.concurrency), "-np", str(settings.concurrency)]
    words += ["-b", str(max(BATCH, settings.chunk)), "-ub", str(settings.chunk), "-fa", "on"]
    words += ["-fit", "off", "--cache-ram", "0"]
    if settings.on_gpu:
        words += ["-ngl", str(model.facts.text.num_layers + 1 - settings.offloaded)]
        words += ["-dev", choice.gpus[0].listed] if choice.gpus and choice.gpus[0].listed else []
    else:
        words += ["-dev", "none"]
    if settings.host_experts:
        words += ["--n-cpu-moe", str(settings.host_experts)]
    if checkpoint_bytes(model, settings):
        words += ["--ctx-checkpoints", str(CHECKPOINTS)]
    if settings.kv == "fp8":
        words += ["-ctk", "q8_0", "-ctv", "q8_0"]
    vision = model.facts.vision
    if vision is None:
        return words
    if not settings.images or settings.language_only:
        return [*words, "--no-mmproj"]
    if settings.vision == "cpu":
        words.append("--no-mmproj-offload")
    if scales(model) and settings.max_pixels is not None:
        side = vision.patch_size * vision.merge_size
        tokens = settings.max_pixels // side**2
        words += ["--image-max-tokens", str(tokens)]
        words += ["--no-warmup"] if tokens < TRIED_TOKENS else []
    return words


def llamacpp_arguments(choice: Choice) -> list[str]:
    """The words of the command: a file, or a repository and quantisation as `-hf` takes them."""
    facts = choice.option.model.facts
    source = ["-hf", facts.name.removeprefix("hf:")]
    if facts.gguf is not None and facts.gguf.file:
        sees = facts.gguf.projector and choice.settings.images and not choice.settings.language_only
        source = ["-m", facts.gguf.file, *(["--mmproj", facts.gguf.projector] if sees else [])]
    return ["llama-server", *source, *llamacpp_flags(choice)]

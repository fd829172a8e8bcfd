"""The planner's rules for llama.cpp.

**Flags** of `llama-server`, every one computed (names and meaning as in llama.cpp of October 2026). Nothing
is left to its own fitting (`-fit off`): that knows free memory, but no later picture. The prompts that it
would keep in host memory (`--cache-ram`, 8 GiB) aren't planned; a slot keeps its own all the same.

**Speed** is a prediction, held against what people publish (`test_llamacpp_speed.py`):

    seconds a token = bytes on the GPU / (its bandwidth · share) + layers · 65 µs
                      + bytes elsewhere / rate of host memory

Of a mixture only the experts of a token are read, and a layer takes 120 µs beside, as it has more and smaller
products; where its experts are in host memory, the GPU and a processor wait for one another, 40 µs more.
Share and microseconds were fitted to published rows of Q4_K_M and Q8_0 on six cards from an RTX 2080 to an
RTX 5090, and of mixtures on five, all within a factor of 1.3; cards before Turing
reach less than half of their bandwidth. Other makers' have a share of their own, from published rows of an
RX 7900 XTX, an M1 Max and an M4. The rate of host memory is `speed.host_rates`'.

**Prompts** of 32 tokens and more are computed on the GPU, with experts that cross for every step (`-ub`): so
with experts in host memory steps are as large as memory allows.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import format_size
from snugvl.hardware.machine import HOST_RATE, Gpu, OperatingSystem
from snugvl.planner.capabilities import Option, stored_format
from snugvl.planner.engines.llamacpp.footprint import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    HOST_PROCESS_BYTES,
    SNAPSHOTS,
    TOWER,
    cache_bytes,
    cells,
    host_bytes,
    llamacpp_components,
    placed,
    snapshot_bytes,
)
from snugvl.planner.engines.rules import EngineRules, Ways
from snugvl.planner.footprint.total import Component, Device, Reason
from snugvl.planner.footprint.vision import scales
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import Placement, Settings
from snugvl.planner.speed import Pace
from snugvl.planner.wishes import Wishes

CHUNKS: Final = (512, 256, 128)  # of `-ub`, fastest first
BATCH: Final = 2048  # tokens handed over at once; a step computes `-ub` of them
# Builds of before October 2026 try the tower at their start with a picture of so many tokens, whatever
# `--image-max-tokens` says, and keep the memory.
TRIED_TOKENS: Final = 46 * 46
SHARE_BEFORE_TURING: Final = 0.4
SHARE_OF_OTHERS: Final = 0.72  # of AMD, Intel and Apple, between 0.63 (M1 Max) and 0.9 (M4)
TURING: Final = (7, 0)
TURNS_S: Final = 40e-6  # of a layer whose experts a processor computes
# With speeds that people publish (`benchmarks/results/speeds.csv`), and the H200 of ours.
MEASURED: Final = frozenset(
    f"NVIDIA {card}"
    for card in (
        "H200", "GeForce GTX 1050 Ti", "GeForce RTX 2080", "GeForce RTX 3060", "GeForce RTX 3070",
        "GeForce RTX 3090 Ti", "GeForce RTX 4070 Ti", "GeForce RTX 5070", "GeForce RTX 5090",
    )
) | {"AMD Radeon RX 7900 XTX", "Apple M1 Max", "Apple M4"}  # fmt: skip
STEPS_BESIDE: Final = (2048, 1024, 512)  # of `-ub`, with experts in host memory


class LlamacppRules(EngineRules):
    """A llama-server of its own, on GPUs of every maker and on processors."""

    engine = "llamacpp"
    title = "llama.cpp"
    wheel = "pip install 'snugvl[llamacpp]'"
    kind = "llama.cpp, a server of its own"
    rank = 1
    honours = frozenset(("concurrency", "kv_cache"))
    scales_cache = True
    offloads = True
    reads_only_gguf = True
    predicts_rate = True
    pace = Pace(65e-6, 120e-6, within=1.35, share=0.91, cards=MEASURED, elsewhere=1.5)
    process_bytes = HOST_PROCESS_BYTES

    def not_here(self, device: Device, system: OperatingSystem) -> str | None:
        """None: it runs on every machine."""
        return None

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """The GGUF in its own format, or why a model that isn't a GGUF can't be run."""
        if model.facts.gguf is None:
            return Reason("llamacpp", "llama.cpp reads GGUF files; name one (owner/name:Q4_K_M, or a file)")
        stored = stored_format(model)
        return [Option(model, "llamacpp", stored, stored)]

    def offloading(self, option: Option, device: Device) -> Option | Reason:
        """The option with layers that the processor computes beside a GPU."""
        return super().offloading(option, device) if device.cpu else replace(option, offload=True)

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """Settings that differ in the size of a step alone, the largest first."""
        for chunk in CHUNKS:
            yield base._replace(chunk=chunk)

    def offload_ways(self, model: Inventory, base: Settings) -> Iterator[Ways]:
        """Ways with less and less on the GPU: first experts, then layers, at last the tower as well.

        A token reads few experts of a mixture, so a processor is quick at them. A tower without a GPU takes
        minutes for a picture.
        """
        base = next(self.variants(model, base, cpu=False))
        layers = model.facts.text.num_layers
        experts = layers if model.mixed else 0
        towers: tuple[Placement, ...] = ("gpu", "cpu") if base.images else (base.vision,)
        chunks = STEPS_BESIDE if experts else (base.chunk,)
        for chunk in chunks:
            yield Ways(base._replace(chunk=chunk), "host_experts", range(experts + 1))
        for tower in towers:
            of_tower = base._replace(host_experts=experts, vision=tower)
            yield Ways(of_tower, "offloaded", range(1, layers + 1))

    def host_bytes(self, model: Inventory, settings: Settings) -> int:
        """Host memory that llama-server takes beside a GPU, in bytes."""
        return host_bytes(model, settings)

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """ggml's buffers on the GPU; with unified memory those in host memory as well."""
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
        """The cache's type as llama.cpp calls it."""
        return "q8_0" if settings.kv == "fp8" else "f16"

    def decode_rate(
        self, model: Inventory, settings: Settings, gpu: Gpu | None, host_rate: float = HOST_RATE
    ) -> float | None:
        """Tokens per second of one request, half of its context filled; None where the card isn't known."""
        host = _read(model, settings, gpu=False) / host_rate + settings.host_experts * TURNS_S
        if not settings.on_gpu:
            return 1 / host
        if gpu is None or gpu.bandwidth is None:
            return None
        old = gpu.compute_capability is not None and gpu.compute_capability < TURING
        share = SHARE_OF_OTHERS if gpu.api != "cuda" else SHARE_BEFORE_TURING if old else self.pace.share
        layer_s = self.pace.mixed_layer_s if model.mixed else self.pace.layer_s
        layers = model.facts.text.num_layers * layer_s
        return 1 / (_read(model, settings, gpu=True) / (gpu.bandwidth * share) + layers + host)

    def step_crossing_bytes(self, model: Inventory, settings: Settings) -> int:
        """Experts in host memory."""
        return placed(model, settings, gpu=False)[EXPERTS] if settings.on_gpu else 0

    def why(self, choice: Choice) -> str | None:
        """The reason for choosing it: the model is a GGUF, which it reads."""
        return "GGUF files are its own"

    def host_text(self, choice: Choice) -> str | None:
        """Parts that the processor computes beside the GPU, and their size, for people; None without any."""
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
            f"{', '.join(parts) or 'the embedding'} in host memory ({held} in all), computed by the processor"
        )

    def command(self, choice: Choice) -> str | None:
        """`llama-server` with every flag."""
        return shlex.join(llamacpp_arguments(choice))


def _read(model: Inventory, settings: Settings, *, gpu: bool) -> float:
    """Bytes read for a token from the GPU's memory (`gpu`) or from host memory."""
    weights = placed(model, settings, gpu=gpu)
    facts = model.facts
    total: float = sum(nbytes for part, nbytes in weights.items() if part not in (EMBEDDING, TOWER, EXPERTS))
    total += weights[EXPERTS] * model.experts_read
    if not settings.on_gpu and facts.tied and not weights[HEAD]:
        total += weights[EMBEDDING]
    cache, states = cache_bytes(model, settings, gpu=gpu)
    return total + (cache / 2 + states) / settings.concurrency


def llamacpp_flags(choice: Choice) -> list[str]:
    """All flags of llama-server that come behind the model's name."""
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
    if snapshot_bytes(model, settings):
        words += ["--ctx-checkpoints", str(SNAPSHOTS)]
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
    """The words of the command that name the model: a file, or a repository and quantisation for `-hf`."""
    facts = choice.option.model.facts
    source = ["-hf", facts.name.removeprefix("hf:")]
    if facts.gguf is not None and facts.gguf.file:
        sees = facts.gguf.projector and choice.settings.images and not choice.settings.language_only
        source = ["-m", facts.gguf.file, *(["--mmproj", facts.gguf.projector] if sees else [])]
    return ["llama-server", *source, *llamacpp_flags(choice)]


RULES = LlamacppRules()

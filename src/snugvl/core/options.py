"""What a user may say of how a model is loaded: one frozen value, from `snugvl.load` and the command line to
the engine's process.

Its names, types and defaults stand here alone; what they come to is the plan's business (`planner/`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args, get_origin

from snugvl.core.config import SpeculationName as SpeculationName
from snugvl.core.sizes import parse_size
from snugvl.errors import RequestError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightsName = Literal["auto", "bf16", "fp8", "int8", "int6", "int5", "int4"]
KVCacheName = Literal["auto", "bf16", "fp8"]
TowerName = Literal["auto", "resident", "streamed"]
EmbeddingName = Literal["auto", "gpu", "cpu"]
BackendName = Literal["auto", "native", "transformers", "vllm", "llamacpp"]
PurposeName = Literal["chat", "documents", "detect", "batch"]
ThinkingName = Literal["auto", "on", "off"]

DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)

Progress = Callable[[str, float], None]
"""Told what loading is doing, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded. None, and "auto", leave it to the plan.

    Attributes:
        model: `pocket`, a checkpoint folder, or a Hub id.
        device: auto, cpu, cuda or cuda:N.
        dtype: of activations, of the KV cache unless that is FP8, and of weights that stay as wide.
        weights: format of the decoder's weights in memory.
        kv_cache: format of keys and values; fp8 is half as large (our own engine and vLLM).
        context: tokens of one conversation: prompt, images and answer.
        max_pixels: larger images are scaled down to this many pixels.
        memory: most that may be taken, in bytes or as a size such as "7200MiB".
        backend: which engine runs it.
        purpose: what the plan is good at (`planner/goals.py`).
        images: images of one request that are planned for, and that it may have at most; None: one is
            planned for, and a request may have what its context holds.
        concurrency: requests at the same time that are sure of their whole context.
        language_only: leave the vision tower out; pictures are refused.
        prefix_cache: start a prompt from what earlier ones with the same beginning have left.
        tower: where our engine has the vision tower's weights: on the GPU, or streamed from main memory.
        embedding: where our engine has the embedding.
        thinking: whether the model thinks before it answers, where a request doesn't say; auto: as its chat
            template has it, but about pictures as its vendor's scores are (`checkpoint/catalogue.json`).
        step_graphs: CUDA graphs of prompts and small pictures, where GPU memory is plenty; None: yes.
        speculation: guess tokens of an answer and compute several in a step (`engine.speculation`).
        trust_remote_code: run Python files that the checkpoint brings (transformers and vLLM).
        max_waiting: requests that may queue before `QueueFull`; None for the engine's own limit.

    Raises:
        RequestError: a value that is none of those, or a size that is none.
    """

    model: str = "pocket"
    device: str = "auto"
    dtype: DtypeName = "auto"
    context: int | None = None
    max_pixels: int | None = None
    weights: WeightsName = "auto"
    memory: int | str | None = None
    kv_cache: KVCacheName = "auto"
    backend: BackendName = "auto"
    purpose: PurposeName = "chat"
    images: int | None = None
    concurrency: int | None = None
    language_only: bool = False
    prefix_cache: bool = True
    tower: TowerName = "auto"
    embedding: EmbeddingName = "auto"
    thinking: ThinkingName = "auto"
    step_graphs: bool | None = None
    speculation: SpeculationName = "off"
    trust_remote_code: bool = False
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise RequestError(f"{name} {value!r} is unknown; use {', '.join(known)}", field=name)
        if DEVICE.fullmatch(str(self.device)) is None:
            raise RequestError(
                f"device {self.device!r} is unknown; use auto, cpu, cuda or cuda:N", field="device"
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise RequestError(f"memory must be more than 0 bytes, not {self.memory_bytes:,}", field="memory")

    @property
    def memory_bytes(self) -> int | None:
        """The limit in bytes."""
        return parse_size(self.memory, "memory") if isinstance(self.memory, str) else self.memory

    def said(self) -> dict[str, Any]:
        """What differs from the defaults, but for the model."""
        mine = (each for each in fields(LoadOptions) if each.name != "model")
        return {each.name: value for each in mine if (value := getattr(self, each.name)) != each.default}


CHOICES = {each.name: get_args(each.type) for each in fields(LoadOptions) if get_origin(each.type) is Literal}


def flag(name: str, value: Any) -> str:
    """An option as the command line has it: `--kv-cache`, `--no-prefix-cache`."""
    words = {"max_waiting": "max-queue", "purpose": "for"}.get(name, name.replace("_", "-"))
    return f"--no-{words}" if value is False else f"--{words}"

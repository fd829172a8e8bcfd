"""Options of loading a model: one frozen value, from `snugvl.load` and the command line to the engine's
process.

An option is one row: its name, type, default and help, the commands that have it, and whether engines and
plans differ in it. The plan (`planner/`) decides what "auto" becomes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from snugvl.core.config import SpeculationName as SpeculationName
from snugvl.core.formats import WeightsName
from snugvl.core.sizes import parse_size, plain_number
from snugvl.errors import RequestError

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
# As reports, and other programs, write them.
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KVCacheName = Literal["auto", "bf16", "fp8"]
TowerName = Literal["auto", "resident", "streamed"]
EmbeddingName = Literal["auto", "gpu", "cpu"]
ExpertsName = Literal["auto", "gpu", "cpu"]
Engine = Literal["native", "transformers", "vllm", "llamacpp"]
BackendName = Literal["auto", Engine]
PurposeName = Literal["chat", "documents", "detect", "batch"]
ThinkingName = Literal["auto", "on", "off"]

T = TypeVar("T")
DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)

Progress = Callable[[str, float], None]
"""Told what loading is doing, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option: what people read of it, where it stands, and what it means for engines and plans.

    Attributes:
        help: for the command line.
        commands: those that have it; "load": caption, ask, scene, detect and chat. An option of `plan` is
            also in its printed command and in a saved plan.
        name: its name on the command line, where that isn't the field's.
        metavar: placeholder of its value in the help.
        least: smallest number that is taken.
        special: values that not every engine can do (`EngineRules.honours`); "all": any value that is given;
            "several": any number above one.
    """

    help: str
    commands: frozenset[str]
    name: str = ""
    metavar: str | None = None
    least: int | None = None
    special: tuple[Any, ...] | Literal["all", "several"] = ()

    def is_special(self, value: Any) -> bool:
        """Whether not every engine can do the option with this value."""
        if self.special == "several":
            return bool(value > 1)
        return self.special == "all" or value in self.special


NO_ROW: Final = OptionRow("", frozenset())  # of fields that no command sets


def _option(default: T, commands: str, text: str, **more: Any) -> T:
    """A field with its row as metadata; `commands` are words."""
    row = OptionRow(text, frozenset(commands.split()), **more)
    made: T = field(default=default, metadata={"row": row})
    return made


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded. None, and "auto", leave it to the plan.

    Attributes:
        model: `pocket`, a checkpoint folder, or a Hub id.
        device: auto, cpu, cuda or cuda:N.
        dtype: of activations, of the KV cache unless that is FP8, and of weights that stay as wide.
        weights: format of the decoder's weights in memory.
        kv_cache: format of keys and values; bf16 stands for that of the activations, fp8 takes about half
            as much (q8_0 in llama.cpp).
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
        tower: where our engine has the vision tower's weights: on the GPU, or streamed from host memory.
        embedding: where our engine has the embedding.
        experts: where our engine has a mixture's experts; auto: on the GPU.
        thinking: whether the model thinks before it answers, where a request doesn't say; auto: as its chat
            template has it, but about pictures as its vendor's scores are (`checkpoint/catalogue.json`).
        step_graphs: CUDA graphs of prompts and small pictures, where GPU memory is plenty; None: yes.
        speculation: draft tokens of an answer and compute several in a step (`engine.speculation`).
        trust_remote_code: run Python files that the checkpoint brings (transformers and vLLM).
        max_waiting: requests that may queue before `QueueFull`; None for the engine's own limit.

    Raises:
        RequestError: an unknown value, a number that is too small, or a size that can't be read.
    """

    model: str = "pocket"
    device: str = _option(
        "auto", "load serve bench compare quantize", "auto, cpu, cuda or cuda:N.", metavar="DEVICE"
    )
    dtype: DtypeName = _option(
        "auto", "load serve bench compare quantize", "Number format of weights and cache."
    )
    context: int | None = _option(
        None, "load serve plan bench compare", "Tokens of prompt, images and answer together.", least=1
    )
    max_pixels: int | None = _option(
        None, "load serve plan bench quantize", "Scale larger images down to this many pixels.", least=1
    )
    weights: WeightsName = _option(
        "auto", "load serve plan bench", "Format of the weights in memory; auto: the best that fits."
    )
    memory: int | str | None = _option(
        None,
        "load serve plan bench compare quantize",
        "Take at most this much memory, such as 7200MiB.",
        metavar="SIZE",
    )
    kv_cache: KVCacheName = _option(
        "auto",
        "load serve plan bench",
        "Format of the KV cache: bf16 stands for the type of the activations; fp8 takes about half the "
        "memory (q8_0 in llama.cpp); auto: fp8 where that helps.",
        special=("fp8",),
    )
    backend: BackendName = _option(
        "auto", "load serve plan", "Which engine; auto: the plan's choice, which says why."
    )
    purpose: PurposeName = _option(
        "chat",
        "serve plan",
        "What the memory is for: chat (several conversations), documents (large images, long contexts), "
        "detect (boxes), batch (many at once).",
        name="for",
    )
    images: int | None = _option(
        None,
        "serve plan",
        "Images of one request that are planned for, and taken at most (1 is planned for without).",
        least=0,
    )
    concurrency: int | None = _option(
        None,
        "serve plan",
        "Requests that can use their whole context at the same time (1).",
        least=1,
        special="several",
    )
    language_only: bool = _option(
        False, "serve plan", "Load the model without its vision tower: less memory, no pictures."
    )
    prefix_cache: bool = _option(
        True,
        "serve",
        "Reuse beginnings that prompts have in common. Off: times don't reveal what others asked.",
    )
    tower: TowerName = _option(
        "auto",
        "load serve plan",
        "Where the vision tower's weights are: resident on the GPU, or streamed to it from host memory "
        "for every picture; auto: streamed where nothing else fits as well.",
        special=("streamed",),
    )
    embedding: EmbeddingName = _option(
        "auto",
        "load serve plan",
        "Where the embedding's weights are: gpu, or cpu (host memory, of which the GPU reads a row a "
        "token); auto: cpu where that makes room, but not under WSL2.",
        special=("cpu",),
    )
    experts: ExpertsName = _option(
        "auto",
        "load serve plan",
        "Where a mixture's experts are: gpu, or cpu (host memory, with as large a cache of them on the "
        "GPU as fits; measured on an H200 alone); auto: gpu.",
        special=("cpu",),
    )
    thinking: ThinkingName = _option(
        "auto",
        "load serve compare quantize",
        "Whether the model thinks before it answers, where a request doesn't say; auto: as it was "
        "trained to, but not about pictures where its vendor's scores are better without.",
    )
    step_graphs: bool | None = _option(
        None,
        "serve",
        "Also make CUDA graphs for prompts and small pictures, where GPU memory is plenty (on).",
        special="all",
    )
    speculation: SpeculationName = _option(
        "auto",
        "serve plan",
        "Draft several tokens and check them in one step, which changes no answer. ngram: from what was "
        "said before; mtp: by Qwen3.5's own predictor; auto: that one, where it has room and is faster.",
        special=("ngram", "mtp"),
    )
    trust_remote_code: bool = _option(False, "load serve", "Run Python files that the checkpoint brings.")
    max_waiting: int | None = _option(
        None,
        "serve",
        "Requests that may wait for the engine (256 without); then 429.",
        name="max-queue",
        least=1,
    )

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPES.get(dtype, dtype))
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise RequestError(f"{name} {value!r} is unknown; use {', '.join(known)}", field=name)
        for each in fields(self):
            value, row = plain_number(getattr(self, each.name)), each.metadata.get("row", NO_ROW)
            object.__setattr__(self, each.name, value)
            counts = each.type in (int, int | None)
            if value is None or (row.least is None and not counts):
                continue
            least = row.least or 0
            if counts and type(value) is not int:
                said = f"{each.name} is a whole number of at least {least}, not {value!r}"
                raise RequestError(said, field=each.name)
            if value < least:
                raise RequestError(f"{each.name} must be at least {least}, not {value:,}", field=each.name)
        if DEVICE.fullmatch(str(self.device)) is None:
            raise RequestError(
                f"device {self.device!r} is unknown; use auto, cpu, cuda or cuda:N", field="device"
            )
        memory: object = self.memory
        if isinstance(memory, float) and memory.is_integer():  # 8e9
            object.__setattr__(self, "memory", int(memory))
        elif not isinstance(memory, int | str | None) or isinstance(memory, bool):
            said = f"memory is a size such as '7200MiB', or a whole number of bytes, not {memory!r}"
            raise RequestError(said, field="memory")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise RequestError(f"memory must be more than 0 bytes, not {self.memory_bytes:,}", field="memory")

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes; None where no limit was given."""
        return parse_size(self.memory, "memory") if isinstance(self.memory, str) else self.memory

    def said(self) -> dict[str, Any]:
        """The options that differ from their defaults, by field name; without the model."""
        mine = (each for each in fields(self) if "row" in each.metadata)
        return {each.name: value for each in mine if (value := getattr(self, each.name)) != each.default}


CHOICES = {each.name: get_args(each.type) for each in fields(LoadOptions) if get_origin(each.type) is Literal}
ROWS: Final[dict[str, OptionRow]] = {
    each.name: each.metadata["row"] for each in fields(LoadOptions) if "row" in each.metadata
}


SPECIAL: Final = frozenset(name for name, row in ROWS.items() if row.special)
"""Options that have values that not every engine can do."""


def special(said: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose values not every engine can do, of those that were said, by name and value."""
    return {name: value for name, value in said.items() if ROWS.get(name, NO_ROW).is_special(value)}


def word(name: str) -> str:
    """An option's name on the command line, without dashes: `kv-cache`, `for`."""
    row = ROWS.get(name)
    return row.name if row is not None and row.name else name.replace("_", "-")


def flag(name: str, value: Any) -> str:
    """An option as a flag of the command line: `--kv-cache`, `--no-prefix-cache`."""
    return f"--no-{word(name)}" if value is False else f"--{word(name)}"


def typed(name: str, value: Any) -> list[str]:
    """An option with its value as command-line words: `["--kv-cache", "fp8"]`, `["--no-prefix-cache"]`."""
    return [flag(name, value)] if isinstance(value, bool) else [flag(name, value), str(value)]


# A command of the shell, which stays as it is; or an option, and its value where one is said.
_SAID: Final = re.compile(r"\bsnugvl [a-z][^;`\n]*|--(no-)?([a-z][a-z-]*)(?: (\d[\w.]*\w|\d|[a-z]\w+))?")


def in_python(message: str) -> str:
    """A message with options as `snugvl.load` takes them: `memory="366MiB"` for `--memory 366MiB`."""
    return _SAID.sub(_argument, message)


def _argument(said: re.Match[str]) -> str:
    off, dashed, value = said.groups()
    name = {word(each): each for each in ROWS}.get(dashed or "")
    if name is None:
        return said[0]
    rest = f" {value}" if value else ""
    if off:
        return f"{name}=False{rest}"
    if value is not None and (value[0].isdigit() or value in CHOICES.get(name, ())):
        return f"{name}={value}" if value.isdecimal() else f'{name}="{value}"'
    switch = isinstance(getattr(LoadOptions(), name), bool)
    return f"{name}={'True' if switch else '…'}{rest}"

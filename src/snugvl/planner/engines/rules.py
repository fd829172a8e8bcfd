"""An engine's rules: the planner's questions to it, about what it runs where, its settings and their memory.

An engine's folder has a `rules.py` with `RULES`, an instance of a subclass. What most engines have in common
is the default here: PyTorch on a GPU that CUDA reaches, one GPU, no options that only one of them has.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.quantized import OWN_INSTEAD
from snugvl.hardware.machine import HOST_RATE, Gpu, OperatingSystem
from snugvl.planner.capabilities import TORCH, Capability, Option, older, stored_format
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint import kv, weights
from snugvl.planner.footprint.total import (
    PROCESS_BYTES,
    ROUND_BYTES,
    SMALL_BYTES,
    Component,
    Device,
    Reason,
    reserved_bytes,
    together_bytes,
    up,
)
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import ENGINES, Engine, KVFormat, Settings
from snugvl.planner.speed import Pace
from snugvl.planner.wishes import Wishes

NO_GGUF: Final = "it reads no GGUF; llama.cpp does"
OWN: Final = f"it doesn't read snugvl's own format; {OWN_INSTEAD}"


@dataclass(frozen=True, slots=True)
class Spread:
    """How GPUs take part: how many share each layer, how many groups of layers, how many copies there are."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


@dataclass(frozen=True, slots=True)
class Ways:
    """Settings that differ in one number, made as they are read: a bisection reads few of them.

    Attributes:
        base: the settings, whatever that number is there.
        field: its name.
        numbers: its values, in order.
    """

    base: Settings
    field: Literal["host_experts", "offloaded"]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Settings:
        changed: dict[str, Any] = {self.field: self.numbers[place]}
        return self.base._replace(**changed)


class EngineRules(ABC):
    """The rules of one engine; stateless.

    Attributes:
        engine: its name in options.
        title: its name for people, within a sentence.
        kind: its description, for people.
        installed_by: the command that installs it; empty where snugvl has it, or a GGUF's notes name it.
        wheel: the command that installs a build of it for processors.
        rank: of engines that do equally well the one of the highest rank is chosen.
        honours: options of `LoadOptions` that it can do and that not every engine can.
        kv_formats: formats of its KV cache, best first.
        fp8_cache_since: compute capability from which its KV cache can be FP8, or None where any will do.
        scales_cache: its eight-bit cache has scales, so outliers of keys don't saturate.
        own_layout: it makes matrices of its own from the checkpoint's: rounds, repacks and joins them.
        windows: its cache keeps no more than the window for layers with sliding windows.
        bitsandbytes: it rounds by means of bitsandbytes.
        has_parts: embedding, head and vision tower may be in other formats and places than the layers.
        pooled: its KV cache is a pool with a size of its own, with recurrent states beside it.
        offloads: it can keep decoder layers in host memory.
        reads_only_gguf: it reads GGUF files and nothing else, and is the first choice for them.
        runs_remote_code: it can run Python files that a checkpoint brings.
        starts: snugvl starts it; else it is planned only, and its own command is printed.
        in_process: a task's command (caption, ask, …) can run it; others run only behind the server.
        drops_unused_tower: without images the vision tower isn't loaded.
        process_bytes: host memory of its process without a GPU, idle.
        spare_note: its use of memory that the plan leaves free, for people; empty where there is none.
        predicts_rate: `decode_rate` says how fast it decodes; else `pace` does.
        pace: what a decode step costs it on a GPU beside its bytes.
    """

    engine: ClassVar[Engine]
    title: ClassVar[str]
    kind: ClassVar[str]
    installed_by: ClassVar[str] = ""
    wheel: ClassVar[str] = ""
    rank: ClassVar[int]
    honours: ClassVar[frozenset[str]] = frozenset()
    kv_formats: ClassVar[tuple[KVFormat, ...]] = ("bf16", "fp8")
    fp8_cache_since: ClassVar[Capability | None] = None
    scales_cache: ClassVar[bool] = False
    own_layout: ClassVar[bool] = False
    windows: ClassVar[bool] = False
    bitsandbytes: ClassVar[bool] = False
    has_parts: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    offloads: ClassVar[bool] = False
    reads_only_gguf: ClassVar[bool] = False
    runs_remote_code: ClassVar[bool] = False
    starts: ClassVar[bool] = True
    in_process: ClassVar[bool] = False
    drops_unused_tower: ClassVar[bool] = False
    process_bytes: ClassVar[int] = PROCESS_BYTES
    spare_note: ClassVar[str] = ""
    predicts_rate: ClassVar[bool] = False
    pace: ClassVar[Pace]

    def not_here(self, device: Device, system: OperatingSystem) -> str | None:
        """Why it runs on no machine of this maker, system or age, as a clause, or None."""
        if system == "windows":
            return "it does not run on Windows; in WSL2 it does"
        if device.api != "CUDA":
            return f"it has nothing for a GPU that is reached by {device.api}"
        return older(device.compute_capability, TORCH)

    def unread(self, model: Inventory) -> Reason | None:
        """Why it can't read a checkpoint that only llama.cpp or our own engine reads, or None."""
        if model.facts.gguf is not None:
            return Reason(self.engine, NO_GGUF)
        return Reason(self.engine, OWN) if model.facts.own else None

    @abstractmethod
    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """Ways to try a model on a kind of device, best first, or why there is none."""

    def offloading(self, option: Option, device: Device) -> Option | Reason:
        """The option with decoder layers in host memory, or why this engine can't have them there."""
        able = " and ".join(rules.title for rules in map(rules_of, ENGINES) if rules.offloads)
        return Reason(self.engine, f"only {able} keep layers in host memory")

    def stored_as(self, option: Option) -> str:
        """Why it has no other formats for a checkpoint's weights, as a clause."""
        return f"the checkpoint is stored in {stored_format(option.model)}"

    def context_limit(self, facts: ModelFacts) -> int:
        """Tokens of the longest context with a model."""
        return facts.text.max_position_embeddings

    def at_once(self, sequences: int, concurrency: int) -> int:
        """Requests that may run at once where `concurrency` are sure of room, and a goal says `sequences`."""
        return concurrency

    def spreads(self, model: Inventory, wishes: Wishes, count: int) -> Sequence[Spread]:
        """Ways to spread a model over up to `count` GPUs, fewest GPUs first."""
        return (Spread(),)

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """Settings that differ in speed alone, fastest first."""
        yield base

    def offload_ways(self, model: Inventory, base: Settings) -> Iterable[Ways]:
        """Ways with less and less on the GPU, by kind, the least costly first, which mostly does."""
        return []

    def host_bytes(self, model: Inventory, settings: Settings) -> int:
        """Bytes of host memory that its process takes beside a GPU."""
        raise NotImplementedError(f"{self.engine} keeps nothing in host memory")

    @abstractmethod
    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Components of all memory that it allocates, without its process and the GPU's context, in the order
        of a report."""

    def kv_bytes(self, model: Inventory, settings: Settings, tokens: int) -> int:
        """Bytes of keys, values and recurrent states of one sequence of `tokens` tokens on one GPU."""
        return kv.blocks_bytes(model, settings, tokens, windows=self.windows)

    def kv_component(self, model: Inventory, settings: Settings) -> Component:
        """The component of the KV cache: all sequences at their full context."""
        windows = self.windows and any(layer.window for layer, _ in model.kv_layers)
        return kv.sequences_component(model, settings, windows=windows)

    def kv_name(self, settings: Settings) -> str:
        """Format of the cache for people: that of the activations, or FP8."""
        return "fp32" if settings.itemsize == 4 and settings.kv == "bf16" else settings.kv

    def weight_components(self, model: Inventory, settings: Settings) -> tuple[Component, ...]:
        """Weights per part on one GPU, and the allocator's rounding of all of them together."""
        return weights.parts_in_one_segment(model, settings)

    def segment_bytes(self, resident: list[tuple[int, int]]) -> int:
        """Bytes that torch reserves for weights of these (bytes, count): one segment, and small ones."""
        small = [(size, count) for size, count in resident if up(size, ROUND_BYTES) <= SMALL_BYTES]
        return reserved_bytes(small) + together_bytes(resident)

    def decode_rate(
        self, model: Inventory, settings: Settings, gpu: Gpu | None, host_rate: float = HOST_RATE
    ) -> float | None:
        """Tokens per second of one request, where `predicts_rate`; None where the card isn't known.
        `host_rate`: bytes per second that a processor reads of host memory."""
        return None

    def step_crossing_bytes(self, model: Inventory, settings: Settings) -> int:
        """Bytes of weights that cross from host memory to the GPU for every step of a prompt."""
        return 0

    def why(self, choice: Choice) -> str | None:
        """Why it was chosen, as a clause, where the reason is a trait of the engine; else None."""
        return None

    def host_text(self, choice: Choice) -> str | None:
        """Parts of a plan that stay in host memory beside a GPU, for people; None where none do."""
        return None

    def command(self, choice: Choice) -> str | None:
        """The engine's own command, without snugvl, for a POSIX shell; None where it has none."""
        return None

"""The result of the solver, and the order in which ways to run a model are preferred."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from snugvl.core.ledger import PlannedPart, RunningPlan
from snugvl.hardware.machine import Gpu
from snugvl.planner.budget import Budget
from snugvl.planner.capabilities import Option
from snugvl.planner.footprint.total import Device, Footprint, Reason
from snugvl.planner.goals import Step
from snugvl.planner.settings import Settings
from snugvl.planner.speed import Speed, speed_text
from snugvl.planner.wishes import Wishes


class SpeedTier(NamedTuple):
    """The part of a score that only saves time: between two ways equal in all else the faster one wins.

    Attributes:
        graphs: CUDA graphs are used.
        kept_states: recurrent states kept for the next turn, up to those that one conversation needs.
        chunk: tokens of a prefill step.
        sequences: that may run at once.
        states: all recurrent states that are kept.
        pool: tokens of the KV pool: what the fastest steps leave (see `Fitter._refined`).
        rate: whole tokens a second that are likely of one request on each copy of the model, together; 0
            where it isn't known.
    """

    graphs: bool
    kept_states: int
    chunk: int
    sequences: int
    states: int
    pool: int
    rate: int


class Score(NamedTuple):
    """How good a way to run a model is. Scores compare field by field, in this order; more is better.

    Attributes:
        whole: no layers stay in host memory.
        led: the plan recommends the model, and it reaches comfort; False where the user named it.
        quality: the model's place among its candidates.
        tower: the vision tower is where an unasked plan has it: on the GPU, unless that costs images or
            context which streaming gives with less memory.
        comfort: images, context, pool and sequences, as far as they count towards comfort.
        format: minus the tier of what its formats cost, as far as that is noticed (`costs.tier`).
        stored: the weights are as they are stored, which several GPUs have room for.
        spread: image tokens and context where several GPUs take part; empty where one does.
        engine: the engine's rank.
        reach: images, context, pool and sequences, also beyond comfort.
        resident: the vision tower stays on the GPU: worth more than a cost of formats that isn't noticed.
        experts: experts of each layer that have copies on the GPU, where all are in host memory; else 0.
        download: minus its bytes.
        cost: minus what the formats cost exactly (`costs.cost`).
        float32: activations are float32.
        embedding: the embedding is on the GPU.
        gpus: minus their number.
        offloaded: minus the layers in host memory.
        pace: what only saves time.
    """

    whole: bool
    led: bool
    quality: int
    tower: bool
    comfort: Step
    format: int
    stored: bool
    spread: tuple[int, ...]
    engine: int
    reach: Step
    resident: bool
    experts: int
    download: int
    cost: int
    float32: bool
    embedding: bool
    gpus: int
    offloaded: int
    pace: SpeedTier

    @property
    def sight(self) -> tuple[int, int]:
        """(tokens of the largest image, tokens of the context) that it reaches."""
        return self.reach[0], self.reach[1]

    @property
    def gains(self) -> tuple[Step, int]:
        """(comfort, format): what finer formats, larger images or a longer context improve."""
        return self.comfort, self.format


def subject_of(model: str, settings: Settings) -> str:
    """A text that names a model and exactly these settings."""
    return " ".join([model, *map(str, settings)])


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a model.

    Attributes:
        tokens: number of tokens of the largest image.
        gpus: the GPUs it uses.
        pinned: wishes ("weights", "tower") that its command must name: with the model's name alone another
            way would be planned, since a named model may have formats that are never recommended.
    """

    option: Option
    settings: Settings
    tokens: int
    footprint: Footprint
    budget: Budget
    speed: Speed
    score: Score
    gpus: tuple[Gpu, ...] = ()
    pinned: frozenset[str] = frozenset()

    @property
    def subject(self) -> str:
        """A text that names exactly this model and these settings; measurements are kept under it."""
        return subject_of(self.option.model.name, self.settings)

    @property
    def quality(self) -> int:
        """The model's place among its candidates; higher is better."""
        return self.score.quality

    @property
    def spare_bytes(self) -> int:
        """Bytes that stay free beside the margin."""
        return self.budget.usable_bytes - self.footprint.total_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation by an engine: model, device, settings and footprint.

    Attributes:
        model: its name as the user gave it.
        device: the device as the plan saw it: the footprint depends on it.
        usable_bytes: bytes that the plan counted on.
        changed: a sentence about how it differs from an earlier plan, and why; empty where it doesn't.
        speed: the likely one with its range, for people; empty where it isn't known.
    """

    model: str
    settings: Settings
    footprint: Footprint
    device: Device
    usable_bytes: int
    changed: str = ""
    speed: str = ""

    @property
    def subject(self) -> str:
        """A text that names exactly this model and these settings; measurements are kept under it."""
        return subject_of(self.model, self.settings)

    @property
    def running(self) -> RunningPlan:
        """The allocation in plain values, for the report of the engine that runs it."""
        parts = (PlannedPart(x.name, x.nbytes, x.phase, x.why) for x in self.footprint.components)
        total, usable = self.footprint.total_bytes, self.usable_bytes
        return RunningPlan(self.settings._asdict(), tuple(parts), total, usable, self.changed, self.speed)


def allocation_of(choice: Choice) -> Allocation:
    """The allocation of a plan's choice."""
    return Allocation(
        choice.option.model.name,
        choice.settings,
        choice.footprint,
        choice.budget.device,
        choice.budget.usable_bytes,
        speed=speed_text(choice.speed) or "",
    )


@dataclass(frozen=True, slots=True)
class Cure:
    """A choice that runs once one wish is left out. `without`: the option that is left out, as it was typed;
    `wishes`: the wishes without it."""

    without: str
    choice: Choice
    wishes: Wishes


@dataclass(frozen=True, slots=True)
class Plan:
    """The solver's result: the way to run a model, and all that a report says beside it.

    Attributes:
        choice: the best way that fits today, or None.
        runners_up: other ways that fit, best first.
        rejections: why nothing better was chosen, and why what doesn't fit doesn't.
        refusals: why engines can't run a model at all on this machine.
        closest: where nothing fits, the way that comes nearest: its footprint shows what is missing.
        verdicts: the engines that weren't chosen for the chosen model, and why not.
        instead: where layers stay in host memory, a choice that runs whole on this machine.
        changed: why it isn't the plan that was saved.
        slower: better models that fit, but aren't recommended, as they answer too slowly.
        beside: where a GGUF was chosen for a GPU that llama.cpp alone uses, a choice without llama.cpp.
        ours: where llama.cpp has a mixture's experts in host memory, the same mixture on our own engine with
            its experts there, if it answers as soon.
        named: where a GGUF of a model was chosen instead of it, the name that was given.
        quicker: on a processor, the chosen model's GGUF, where llama.cpp answers much sooner with it.
        held: the best of the models that are on the machine already; the choice, where that is no worse.
        roomier: under WSL2, a mixture, or where nothing runs anything, that would be chosen, had WSL2 more of
            the PC's memory.
        cure: where wishes keep everything from running, the one without which it does.
        other_tower: a choice with the vision tower in the other place: streamed, where that gives finer
            weights, larger images or a longer context; on the GPU, where those are what it is streamed for.
    """

    wishes: Wishes
    budget: Budget
    choice: Choice | None
    runners_up: tuple[Choice, ...]
    rejections: tuple[Reason, ...]
    refusals: tuple[Reason, ...]
    closest: Choice | None = None
    verdicts: tuple[Reason, ...] = ()
    instead: Choice | None = None
    other_tower: Choice | None = None
    changed: str = ""
    slower: tuple[Choice, ...] = ()
    beside: Choice | None = None
    ours: Choice | None = None
    named: str = ""
    quicker: Choice | None = None
    cure: Cure | None = None
    roomier: Choice | None = None
    held: Choice | None = None

    @property
    def others(self) -> Wishes:
        """The wishes for a model instead of the one that was named: engine and format were meant for that."""
        return replace(self.wishes, backend="auto", quality="any", weights=None)

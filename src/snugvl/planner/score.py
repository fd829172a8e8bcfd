"""The order in which ways to run a model are preferred."""

from typing import NamedTuple

from snugvl.planner.goals import Step


class Pace(NamedTuple):
    """What only saves time: of two ways that are equal in all else, the faster one.

    Attributes:
        graphs: CUDA graphs are used.
        kept_states: recurrent states kept for the next turn, up to those that one conversation needs.
        chunk: tokens of a prefill step.
        sequences: that may run at once.
        states: all recurrent states that are kept.
        pool: tokens of the KV pool: what the fastest steps leave (see `Fitter._refined`).
        rate: whole tokens a second of one request at most, by the roofline; 0 where it isn't known.
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
        whole: no layers stay in main memory.
        led: the model is recommended, and reaches comfort.
        quality: the model's place among its candidates.
        tower: the vision tower is on the GPU and not streamed.
        comfort: images, context, pool and sequences, as far as they count towards comfort.
        format: minus the tier of what its formats cost, as far as that is noticed (`costs.tier`).
        stored: the weights are as they are stored, which several GPUs have room for.
        spread: image tokens and context where several GPUs take part; empty where one does.
        engine: its rank.
        reach: images, context, pool and sequences, beyond comfort too.
        download: minus its bytes.
        cost: minus what the formats cost exactly (`costs.cost`).
        float32: activations are float32.
        embedding: the embedding is on the GPU.
        gpus: minus their number.
        offloaded: minus the layers in main memory.
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
    download: int
    cost: int
    float32: bool
    embedding: bool
    gpus: int
    offloaded: int
    pace: Pace

    @property
    def named(self) -> "Score":
        """The score of who names the model and isn't led to it."""
        return self._replace(led=False)

    @property
    def gains(self) -> tuple[Step, int]:
        """What a finer format, larger images or a longer context gain, up to comfort."""
        return self.comfort, self.format

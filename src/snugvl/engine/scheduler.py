"""The next step: which tokens are computed, and on which blocks.

A step holds at most `max_batched_tokens` tokens, filled in this order:

    | tokens of those that decode | the rest of a prefill begun earlier | newly admitted prompts |

Beside sequences that decode, prompts get `prefill_beside_decodes` tokens at most: their streams wait for the
whole step, so a long prompt, or many with pictures at once, must not come in one piece. A chunk whose images
are not encoded yet (`encoder.py`) waits, running with its blocks, and all that would come after it.

A sequence whose grammar has no mask yet (`sampling/masks.py`) is also left out, but holds up no other. One
whose grammar forced tokens has several that are known and not computed: all at once, within the budget.

The last prompt takes what is left of the budget and goes on in the next step, so at most one running
sequence is in the middle of its prompt, others than those that paused for a snapshot: where snapshots are to
be its chunks end, but for one on the way of one chunk of a step (`snapshots.py`); what is left of the step is
others', unless a picture comes later.

Which sequences wait and run, and what they own, is in `queues.py`. Not thread-safe.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from snugvl.core.config import EngineConfig
from snugvl.engine.drafts import DeviceDrafts
from snugvl.engine.queues import Queues
from snugvl.engine.sequence import BlockCopy, Sequence, State, publish_full
from snugvl.engine.snapshots import StateCopy

ALONE_PARTS = 4  # a step that must take little memory has a quarter of the tokens
PREFILL_BESIDE_DECODES = 512  # at least: keeps a small GPU busy for a fraction of the time of a chunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end - 1` of a sequence, to be computed in this step; the last of them may be `drafts`.

    `unseen`: where drafts are on the device that the host doesn't know; zeros stand for them.
    `landing`: number of the sequence's tokens after which its recurrent state is saved on the way; 0:
    nowhere. `again`: number of tokens before the drafts that the next step computes again, for a snapshot
    before them.
    """

    sequence: Sequence
    start: int
    end: int
    landing: int = 0
    drafts: tuple[int, ...] = ()
    again: int = 0
    unseen: DeviceDrafts | None = None

    @property
    def unsure(self) -> int:
        """Number of its last tokens that aren't taken into the recurrent state."""
        return self.again + len(self.drafts)

    def settle(self) -> None:
        """Note that the chunk was started: its tokens count as computed."""
        each = self.sequence
        each.computed, each.lag = self.end - self.unsure, self.again
        if each.drafts is not None:  # what follows the last token isn't known where it samples
            each.drafts.read(self.start, each.read - self.samples)

    @property
    def samples(self) -> bool:
        """Whether its last logits choose the next token: all known tokens are computed then.

        It ends beyond them where the host has not read its last one.
        """
        return self.end >= self.sequence.length

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Indices in the prompt of the chunk's tokens that are placeholders."""
        prompt = self.sequence.prompt
        return prompt.placeholders_in(self.start, self.end) if self.start < len(prompt.ids) else ()

    @property
    def logits(self) -> int:
        """Number of its last rows whose logits are wanted: for the newest token, and for each draft."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tokens that one step computes, and the copies before it.

    Attributes:
        chunks: the tokens, a chunk for each sequence.
        copies: KV blocks to copy before anything is computed, in this order.
        restores: slots that become copies of state snapshots before anything is computed.
        later: the chunk that was left out because its images aren't encoded; empty without one.
        alone: whether the step must run with as little memory as can be (see `recovery.py`).
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)
    later: list[Chunk] = field(default_factory=list)
    alone: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def settle(self) -> None:
        """Note that the step was started: its tokens count as computed."""
        for chunk in self.chunks:
            chunk.settle()

    @property
    def decodes(self) -> bool:
        """Whether it computes generated tokens alone, all of each sequence, with the usual memory (`alone`).

        The last token of a prompt is no such token, though it may be all that a prefill has left: it can be a
        placeholder, and the siblings of its sequence wait for its logits.
        """
        return not self.alone and all(
            chunk.samples and chunk.start >= len(chunk.sequence.prompt.ids) for chunk in self.chunks
        )

    @property
    def single_tokens(self) -> bool:
        """Whether it decodes, one token of each sequence."""
        return self.decodes and all(chunk.end - chunk.start == 1 for chunk in self.chunks)

    @property
    def sees_on(self) -> bool:
        """Whether a prompt goes on with a picture after the step: its encoding is held until then."""
        return any(
            chunk.sequence.prompt.placeholders_in(chunk.end, chunk.sequence.length) for chunk in self.chunks
        )


Ready = Callable[[Chunk], bool]


class Scheduler(Queues):
    """Chooses tokens of running sequences for each step, and admits those that wait."""

    def __init__(self, config: EngineConfig, prefill_beside_decodes: int = PREFILL_BESIDE_DECODES) -> None:
        """`prefill_beside_decodes`: most tokens of prompts in a step in which others decode."""
        super().__init__(config)
        self.prefill_beside_decodes = prefill_beside_decodes

    def schedule(self, ready: Ready | None = None) -> Schedule:
        """Choose the tokens of the next step; empty only when nothing is waiting or running.

        Args:
            ready: whether the images of a chunk are encoded. One that isn't ready is left out while others
                decode, and no other sequence is admitted after it.
        """
        step, most = Schedule(), self.config.max_batched_tokens
        if self._next_alone and not any(sequence.prefills for sequence in self.running):
            self._admit(step.restores)
        alone = next((sequence for sequence in self.running if sequence.alone), None)
        if alone is not None:  # others that run pause, until it has a token
            step = Schedule(restores=step.restores, alone=True)
            self._take(step, alone, max(most // ALONE_PARTS, 1))
            return step
        decoding = [s for s in self.running if s.can_sample and not s.prefills]
        spare = most - len(decoding)  # for more than a token of each
        for sequence in decoding:
            count = min(sequence.pending, 1 + spare)
            if sequence.state is State.RUNNING and self._make_room(sequence, count):
                self._take(step, sequence, count)
                spare -= count - 1
        if step.chunks:
            most = min(most, step.tokens + self.prefill_beside_decodes)
        else:
            ready = None
        for sequence in [s for s in self.running if s.prefills]:
            self._take(step, sequence, most - step.tokens, ready)
        while (
            self.waiting
            and step.tokens < most
            and not (step.later or self._next_alone or step.sees_on)
            and (admitted := self._admit(step.restores))
        ):
            self._take(step, admitted, most - step.tokens, ready)
        return step

    def upcoming(self) -> Chunk | None:
        """The part of a prompt that the next step will want, if nothing happens until then."""
        most = min(self.config.max_batched_tokens, self.prefill_beside_decodes)
        for sequence in self.running:
            if sequence.prefills:
                return Chunk(sequence, sequence.computed, min(sequence.length, sequence.computed + most))
        if not self.waiting or not self.could_admit or self._next_alone:
            return None
        head = self.waiting[0]
        start = len(self._cached(head)) * self.config.block_size
        return Chunk(head, start, min(head.length, start + most))

    def publish(self, sequence: Sequence) -> None:
        """Offer a sequence's full blocks to other sequences, by the prefix cache.

        Call it only when all steps that write to these blocks have finished.
        """
        full = (sequence.published + 1) * self.config.block_size
        if self.config.prefix_cache and sequence.computed >= full:
            publish_full(sequence, self.pool)

    @property
    def _next_alone(self) -> bool:
        """Whether the head of the queue must have its next step for itself."""
        return bool(self.waiting) and self.waiting[0].alone

    def _take(self, step: Schedule, sequence: Sequence, most: int, ready: Ready | None = None) -> None:
        """Put the next tokens of a sequence into the step, `most` at most, if they are ready."""
        start, end = sequence.computed, min(sequence.length, sequence.computed + most)
        landing, marks = 0, [mark for mark in sequence.marks if mark > start]
        if marks and not any(chunk.landing for chunk in step.chunks):
            landing = self.snapshots.landing(start, marks[0], end)
        end = min([end, *marks[bool(landing) :]])
        if end <= start:
            return
        again = self.snapshots.again(sequence, end) if self.snapshots.count else 0
        chunk = Chunk(sequence, start, end, landing, again=again)
        if ready is None or ready(chunk):
            step.copies.extend(self.pool.extend(sequence.table, start, end))
            step.chunks.append(chunk)
        else:
            step.later.append(chunk)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt the youngest until a sequence can write its next tokens; False if that was itself.

        Only younger ones can be hit: the caller goes from the oldest to the youngest, so that none
        loses the blocks of tokens already in the step.
        """
        start = sequence.computed
        while self.pool.missing(sequence.table, start, start + count) > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

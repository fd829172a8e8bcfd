"""What runs in the next step, and on which blocks.

    waiting ──admit──→ running ──finish──→
       ↑                  │
       └─────preempt──────┘        both lists are sorted by age, oldest first

A step holds at most `max_batched_tokens` tokens, filled in this order:

    | tokens of those that decode | the rest of a prefill begun earlier | newly admitted prompts |

Beside sequences that decode, prompts get `prefill_beside_decodes` tokens at most: their streams wait for the
whole step, so a long prompt, or many with pictures at once, must not come in one piece. A chunk whose images
are not encoded yet (`encoder.py`) waits, running with its blocks, and all that would come after it.

A sequence whose grammar has no mask yet (`sampling/masks.py`) is also left out, but holds up no other. One
whose grammar forced tokens has several that are known and not computed: all at once, within the budget.

The last prompt takes what is left of the budget and goes on in the next step, so at most one running
sequence is in the middle of its prompt, others than those that paused for a snapshot. An admitted sequence
gets the blocks of all its known tokens at once; only decoding asks for more later. When none is free the
youngest running sequence loses all of its blocks and goes back to waiting; its tokens are computed again
later. Each that runs has a slot, a number below `max_num_seqs`: there its recurrent state is, if the model
has one (`layers/kv_cache.py`).

A sequence is admitted with the blocks of its beginning that the prefix cache has (`prefix.py`), and computes
the rest. Those that others hold already are nothing that it takes; those that are free it takes like any.
With recurrent states it starts behind the last of them that has a snapshot. Its chunks end where snapshots
are to be taken, except that one chunk of a step may take one on the way (`snapshots.py`); the rest of the
step is for other prompts, unless a picture comes later.

Nothing starves: the queue is never overtaken, and the oldest running sequence is never preempted (alone,
it fits: `admission.py` saw to that), so it finishes, and so does everyone after it.

Not thread-safe.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine import prefix
from snugvl.engine.blocks import BlockCopy, BlockPool
from snugvl.engine.drafts import DeviceDrafts
from snugvl.engine.sequence import Sequence, State, slot_of
from snugvl.engine.snapshots import Snapshots, StateCopy

ALONE_PARTS = 4  # a step that must take little memory has a quarter of the tokens
PREFILL_BESIDE_DECODES = 512  # enough to keep a GPU busy, a fraction of the time of a whole chunk


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
    def logits(self) -> int:
        """Number of its last rows whose logits are wanted: for the newest token, and for each draft."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        copies: come first, in their order.
        restores: slots that become copies of snapshots, before anything is computed.
        later: the chunk that was left out, if there is one, because its images aren't encoded.
        alone: whether it must run with as little memory as can be (see `oom.py`).
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
        """It has started: what comes after it may count on it."""
        for chunk in self.chunks:
            chunk.settle()

    @property
    def decodes(self) -> bool:
        """Whether it computes generated tokens alone, all of each sequence, with the usual memory (`alone`).

        The last token of a prompt is no such token, though it may be all that a prefill has left: it can be a
        placeholder, and the siblings of its sequence wait for its logits.
        """
        return not self.alone and all(
            chunk.samples and chunk.start >= len(chunk.sequence.prompt) for chunk in self.chunks
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
_age = attrgetter("order")


def prefill_beside_decodes(device: torch.device) -> int:
    """Tokens that take as long as 512 on a small card: a stream feels the time, not the tokens."""
    if device.type != "cuda":
        return PREFILL_BESIDE_DECODES
    return max(PREFILL_BESIDE_DECODES, 16 * torch.cuda.get_device_properties(device).multi_processor_count)


def _always(_: Chunk) -> bool:
    return True


class Scheduler:
    """The waiting and the running sequences, and the block pool they share."""

    def __init__(self, config: EngineConfig, prefill_beside_decodes: int = PREFILL_BESIDE_DECODES) -> None:
        """`prefill_beside_decodes`: most tokens of prompts in a step in which others decode."""
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.slots = config.max_num_seqs  # fewer while other programs have the memory of states
        self._empty(config.num_blocks)
        self.preemptions = 0
        self.prefill_beside_decodes = prefill_beside_decodes
        self.prefix_query_tokens = 0  # of prompts when first admitted
        self.prefix_hit_tokens = 0

    @property
    def num_new(self) -> int:
        """Waiting sequences that have never run: those that `max_waiting` counts."""
        return sum(not sequence.started for sequence in self.waiting)

    @property
    def needed_blocks(self) -> int:
        """Blocks that the largest of all sequences may come to need; with them each can finish alone."""
        every = (*self.running, *self.waiting)
        return max((self.pool.blocks_for(len(s.prompt) + s.max_tokens) for s in every), default=0)

    @property
    def could_admit(self) -> bool:
        """Whether there are slots and blocks for the head of the queue."""
        if not self.waiting or len(self.running) >= self.slots:
            return False
        sequence = self.waiting[0]
        if not self.running:
            return self.pool.blocks_for(sequence.length) <= self.pool.num_blocks
        # Room for the others to grow, and for those of its siblings that will run, or it would be preempted
        # right away. One slot will do: were it to wait for all, those behind it would wait as well.
        taken = sum(other.num_choices for other in self.running)
        spare = len(self.running) + max(min(len(sequence.siblings), self.slots - taken - 1), 0)
        excess = self.pool.blocks_for(sequence.length) + spare - self.pool.num_free
        return excess <= 0 or excess <= sum(self.pool.owners(b) > 0 for b in self._cached(sequence))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn, which is by age."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_age)

    def schedule(self, ready: Ready = _always) -> Schedule:
        """Choose the tokens of the next step; empty only when nothing is waiting or running.

        Args:
            ready: whether the images of a chunk are encoded. One that isn't ready is left out while others
                decode, and no other sequence is admitted after it.
        """
        step = Schedule(alone=True)
        alone = self._admit_alone(step)
        if alone is not None:
            self._take(step, alone, max(self.config.max_batched_tokens // ALONE_PARTS, 1))
            return step
        step = Schedule()
        most = self.config.max_batched_tokens
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
            ready = _always
        for sequence in [s for s in self.running if s.prefills]:
            self._take(step, sequence, most - step.tokens, ready)
        while (
            step.tokens < most
            and not (step.later or self._next_alone or step.sees_on)
            and (admitted := self._admit(step))
        ):
            self._take(step, admitted, most - step.tokens, ready)
        return step

    def upcoming(self) -> Chunk | None:
        """The part of a prompt that the next step will want, if nothing happens until then."""
        most = min(self.config.max_batched_tokens, self.prefill_beside_decodes)
        for sequence in self.running:
            if sequence.prefills:
                return Chunk(sequence, sequence.computed, min(sequence.length, sequence.computed + most))
        if not self.could_admit or self._next_alone:
            return None
        head = self.waiting[0]
        start = len(self._cached(head)) * self.config.block_size
        return Chunk(head, start, min(head.length, start + most))

    def resize(self, num_blocks: int, slots: int) -> None:
        """Have so many blocks and slots, all empty; running sequences wait, to be computed again."""
        for sequence in self.running[::-1]:
            self.preempt(sequence)
        self.slots = slots
        self._empty(num_blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Let a sequence wait, without its blocks and its slot."""
        self._stop(sequence)
        self.pool.release(sequence.table)
        sequence.rewind()
        self.preemptions += 1
        self.add(sequence)

    def preempt_all(self) -> None:
        """Let all that run wait, and come back one by one: a step ran out of memory."""
        for sequence in self.running[::-1]:
            sequence.alone = True
            self.preempt(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Let the siblings of a sequence whose prompt is computed start from its blocks.

        Those without a slot wait, with no blocks: they can take their first token from the same logits,
        and compute the prompt again when their turn comes.
        """
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            sibling.started = True
            if len(self.running) < self.slots:
                sibling.table = self.pool.fork(sequence.table)
                sibling.computed = sequence.computed
                if sibling.drafts is not None and sequence.drafts is not None:
                    sibling.drafts.entries = sequence.drafts.entries
                sibling.keys = list(sequence.keys)
                sibling.published = sequence.published
                sibling.kept = sequence.kept
                self._run(sibling)
            else:
                self.add(sibling)
        return siblings

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is. Parked siblings are the caller's to end or to `add`."""
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self.pool.release(sequence.table)
        sequence.state = State.FINISHED

    def reset(self) -> None:
        """Forget the contents of the cache; what was running waits, from its first token on."""
        self._empty(self.pool.num_blocks)
        for sequence in self.running:
            sequence.table, sequence.slot = [], None
            sequence.rewind()
            self.add(sequence)
        self.running.clear()

    def publish(self, sequence: Sequence) -> None:
        """Let others start from what a sequence has computed; all steps that wrote it have finished."""
        full = (sequence.published + 1) * self.config.block_size
        if self.config.prefix_cache and sequence.computed >= full:
            prefix.publish(sequence, self.pool)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence's blocks out of the prefix cache, because something is wrong with them."""
        self.pool.withdraw(sequence.table)
        self.snapshots.forget(sequence.keys)

    def check_integrity(self, *, in_flight: bool = False) -> None:
        """Assert what must hold between two steps; `in_flight`: while the tokens of one are not read yet."""
        self.pool.check(sequence.table for sequence in self.running)
        self.snapshots.check()
        for queue, state in ((self.running, State.RUNNING), (self.waiting, State.WAITING)):
            assert queue == sorted(queue, key=_age), f"the {state.name} queue is not sorted by age"
            assert all(sequence.state is state for sequence in queue), f"a stranger is {state.name}"
        slots = [*self._free_slots, *map(slot_of, self.running)]
        assert sorted(slots) == list(range(self.slots)), "a slot is lost, or is two sequences'"
        for sequence in self.running:
            held = len(sequence.table) * self.config.block_size
            assert sequence.computed <= held, "computed tokens without a block"
            assert sequence.pending > 0 or in_flight, "a running sequence has nothing to compute"
            prefix.check(sequence, self.pool)
        assert not any(s.table or s.computed or s.published for s in self.waiting), "waiting with blocks"
        assert all(s.slot is None for s in self.waiting), "waiting on a slot"
        under_way = [s for s in self.running if s.prefills]
        if not self.snapshots.count:
            assert len(under_way) <= 1, "two prefills are under way"
        unseen = [s for s in under_way if s.prompt.placeholders_in(s.computed, s.length)]
        assert len(unseen) <= 1, "two prefills with pictures are under way"

    def _empty(self, num_blocks: int) -> None:
        """Have so many blocks and the present slots, all of them free."""
        block_size = self.config.block_size
        self._free_slots = list(reversed(range(self.slots)))  # a stack
        self.snapshots = Snapshots(self.config.snapshots_beside(self.slots), block_size)
        self.pool = BlockPool(num_blocks, block_size, self.snapshots.forget)

    @property
    def _next_alone(self) -> bool:
        return bool(self.waiting) and self.waiting[0].alone

    def _admit_alone(self, step: Schedule) -> Sequence | None:
        """The sequence that must have the next step for itself, or None: others pause until it has a
        token."""
        if self._next_alone and not any(sequence.prefills for sequence in self.running):
            self._admit(step)
        return next((sequence for sequence in self.running if sequence.alone), None)

    def _admit(self, step: Schedule) -> Sequence | None:
        """Move the head of the queue to the running ones if there are slots and blocks for it."""
        if not self.could_admit:
            return None
        sequence = self.waiting.pop(0)
        sequence.table = self.pool.share(self._cached(sequence))
        sequence.rewind(len(sequence.table), self.config.block_size)
        sequence.goal = sequence.length
        self.pool.extend(sequence.table, sequence.computed, sequence.length)
        if self.config.prefix_cache and not sequence.started:
            self.prefix_query_tokens += len(sequence.prompt)
            self.prefix_hit_tokens += sequence.computed
            sequence.cached_tokens = sequence.computed
        sequence.started = True
        self._run(sequence)
        if (restore := self.snapshots.begin(sequence)) is not None:
            step.restores.append(restore)
        return sequence

    def _cached(self, sequence: Sequence) -> list[int]:
        """Blocks that a waiting sequence can start from: none whose tokens' log-probabilities are wanted."""
        if not self.config.prefix_cache or sequence.prompt.unscored:
            return []
        blocks = prefix.find(sequence, self.pool)
        return self.snapshots.usable(blocks, sequence.keys) if self.snapshots.count else blocks

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        sequence.slot = self._free_slots.pop()
        insort(self.running, sequence, key=_age)

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones, and its slot from it."""
        self.running.remove(sequence)
        self._free_slots.append(slot_of(sequence))
        sequence.slot = None

    def _take(self, step: Schedule, sequence: Sequence, most: int, ready: Ready = _always) -> None:
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
        if ready(chunk):
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

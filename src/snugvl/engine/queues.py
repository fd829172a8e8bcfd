"""Sequences that wait and that run, and what each of them owns: blocks, a slot, a snapshot.

    waiting ──admit──→ running ──finish──→
       ↑                  │
       └─────preempt──────┘        both lists are sorted by age, oldest first

An admitted sequence gets the blocks of all its known tokens at once; only decoding asks for more later. When
none is free the youngest running sequence loses all of its blocks and goes back to waiting; its tokens are
computed again later. Each that runs has a slot, a number below `max_num_seqs`: there its recurrent state is,
if the model has one (`layers/kv_cache.py`).

A sequence is admitted with the blocks of its beginning that the prefix cache has, and computes the rest.
Those that others hold already are nothing that it takes; those that are free it takes like any. The last
known token is never taken from the cache: its logits choose the next one. A hit may end inside a picture;
the vision tower then runs again for the rest of its rows.

Linear attention keeps no keys and values that a block could hold, only a state that has moved on; a model
with such layers starts where a copy of it was kept, from the blocks up to there (`snapshots.py`).

The first token comes sooner where an earlier prompt began alike, so response times reveal that. One team
behind one server can live with that; where users must not learn of each other's prompts, turn it off
(`snugvl serve --no-prefix-cache`, `load(prefix_cache=False)`).

Nothing starves: the queue is never overtaken, and the oldest running sequence is never preempted (alone,
it fits: `admission.py` saw to that), so it finishes, and so does everyone after it.

Not thread-safe.
"""

from bisect import insort
from operator import attrgetter

from snugvl.core.config import EngineConfig
from snugvl.engine.sequence import ROOT, BlockPool, Sequence, State, block_key, extend_keys, slot_of
from snugvl.engine.snapshots import Snapshots, StateCopy

_age = attrgetter("order")


class Queues:
    """The waiting and the running sequences, and the block pool they share."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.slots = config.max_num_seqs  # fewer while other programs have the memory of states
        self._empty(config.num_blocks)
        self.preemptions = 0
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
        taken = sum(1 + len(other.siblings) for other in self.running)
        spare = len(self.running) + max(min(len(sequence.siblings), self.slots - taken - 1), 0)
        excess = self.pool.blocks_for(sequence.length) + spare - self.pool.num_free
        return excess <= 0 or excess <= sum(self.pool.owners(b) > 0 for b in self._cached(sequence))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn, which is by age."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_age)

    def resize(self, num_blocks: int, slots: int) -> None:
        """Resize to these numbers of empty blocks and slots; running sequences wait, to be computed again."""
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
            check_keys(sequence, self.pool)
        assert not any(s.table or s.computed or s.published for s in self.waiting), "waiting with blocks"
        assert all(s.slot is None for s in self.waiting), "waiting on a slot"
        under_way = [s for s in self.running if s.prefills]
        if not self.snapshots.count:
            assert len(under_way) <= 1, "two prefills are under way"
        unseen = [s for s in under_way if s.prompt.placeholders_in(s.computed, s.length)]
        assert len(unseen) <= 1, "two prefills with pictures are under way"

    def _empty(self, num_blocks: int) -> None:
        """Start over with `num_blocks` blocks and the present slots, all free."""
        block_size = self.config.block_size
        self._free_slots = list(reversed(range(self.slots)))  # a stack
        self.snapshots = Snapshots(self.config.snapshots_beside(self.slots), block_size)
        self.pool = BlockPool(num_blocks, block_size, self.snapshots.forget)

    def _admit(self, restores: list[StateCopy]) -> Sequence | None:
        """Move the head of the queue to the running ones if there are slots and blocks for it.

        `restores` gets the snapshot that becomes its recurrent state, if there is one.
        """
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
            restores.append(restore)
        return sequence

    def _cached(self, sequence: Sequence) -> list[int]:
        """Blocks that a waiting sequence can start from: none whose tokens' log-probabilities are wanted."""
        if not self.config.prefix_cache or sequence.prompt.unscored:
            return []
        blocks = find_prefix(sequence, self.pool)
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


def find_prefix(sequence: Sequence, pool: BlockPool) -> list[int]:
    """Blocks that hold the longest cached beginning of a sequence, its last token excepted."""
    extend_keys(sequence, pool.block_size)
    blocks: list[int] = []
    for key in sequence.keys[: (sequence.length - 1) // pool.block_size]:
        block = pool.find(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def check_keys(sequence: Sequence, pool: BlockPool) -> None:
    """Assert that a running sequence's blocks are found by what is in them, and only if they are full."""
    size = pool.block_size
    full = min(sequence.computed, sequence.length) // size
    assert sequence.published <= full <= len(sequence.table), "blocks are published that are not full"
    parent = ROOT
    for index, block in enumerate(sequence.table):
        if index >= full:
            assert pool.key(block) is None, f"block {block} can be found but is not full"
            continue
        start, end = index * size, (index + 1) * size
        parent = block_key(parent, sequence.ids(start, end), sequence.prompt.vision_in(start, end))
        assert pool.key(block) in (None, parent), f"block {block} is found by what is not in it"
        assert sequence.keys[index : index + 1] in ([], [parent]), "a key differs from its tokens"

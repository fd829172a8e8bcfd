"""Snapshots of recurrent states: copies from which a prompt can start, as it does from KV blocks.

Keys and values of every block are kept anyway, a recurrent state only moves on. So a model with linear
attention can start from cached blocks only where the state was copied when it stood just behind them:

    blocks       [ 0 | 1 | … | 64 | 65 | … | 80 ][ 81 | …          a block has a key
    prompt       system │ picture ▒▒▒▒▒│ question │ answer …
    snapshots                      ▲ 65       ▲ 81      ▲ moves along

A snapshot has the key of the last block before it: it is the state after exactly the tokens that the key
stands for, whichever sequence computed them. It is of use with all blocks up to it, goes with the last of
them, and gives way to a new one when it is the one that was unused for longest.

They are wanted at the last block boundary of each turn and of each picture, where other prompts part from
this one. A step leaves the state behind its last token, and in the scratch slot one behind a *landing*: so
many times `LANDING` tokens after the beginning of one of its chunks. There the delta rule's kernels pass with
the state at hand; so most prompts take no more steps than without. Where that doesn't fit a chunk ends at the
snapshot. Each costs a copy, and takes the memory of a thousand tokens and more; what computes in no time
needs none. In an answer there is one that moves along: no chat template has to render the answer again as it
was, but where it does (a tool's result follows, say), the next turn starts there. A step that takes several
tokens of an answer at once and would pass its place also leaves those behind it to the next step.

Only numbers live here; the bytes are in `layers/kv_cache.py`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from snugvl.engine.sequence import Key, Sequence, State, extend_keys, slot_of
from snugvl.layers.delta_rule import CHUNK

if TYPE_CHECKING:
    from snugvl.engine.scheduler import Chunk

SPACING: Final = 16  # blocks from one snapshot of a sequence to the next, and to the first
MOST: Final = 4  # of one prompt
LANDING: Final = CHUNK  # tokens


class StateCopy(NamedTuple):
    """A running sequence's slot and a snapshot, one of which becomes a copy of the other.

    `slot`: None for the state that a step left behind a landing.
    """

    slot: int | None
    snapshot: int


class Snapshots:
    """Which block's end has which snapshot, a number below `count`."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self._block_size = block_size
        self._free = list(reversed(range(count)))
        self._found: OrderedDict[Key, int] = OrderedDict()  # least recently used first

    def usable(self, blocks: list[int], keys: list[Key]) -> list[int]:
        """The beginning of cached blocks, known by `keys`, that ends at a snapshot."""
        whole = next((n for n in range(len(blocks), 0, -1) if keys[n - 1] in self._found), 0)
        return blocks[:whole]

    def begin(self, sequence: Sequence) -> StateCopy | None:
        """The copy that an admitted sequence starts from, or None; marks where it will leave snapshots."""
        sequence.kept = last = sequence.computed
        sequence.marks, sequence.trail = [], None
        for place in _ends(sequence, self._block_size) if self.count else ():
            if place - last >= SPACING * self._block_size:
                sequence.marks.append(last := place)
        del sequence.marks[: -min(MOST, self.count) or None]
        if not self.count or not sequence.computed:
            return None
        key = sequence.keys[sequence.computed // self._block_size - 1]
        self._found.move_to_end(key)
        return StateCopy(slot_of(sequence), self._found[key])

    def take(self, sequences: Iterable[Sequence]) -> list[StateCopy]:
        """Copies to make before the next step: states of running sequences that a prompt may start from.

        Each is that behind the `computed` tokens of its sequence, all of them known.
        """
        copies: list[StateCopy] = []
        for sequence in sequences if self.count else ():
            if sequence.state is State.RUNNING and self._due(sequence):
                copies += self._place(sequence, sequence.computed, slot_of(sequence))
        return copies

    def leave(self, chunks: list["Chunk"]) -> list[StateCopy]:
        """Copies of states to keep after a step with parts of prompts, one of which may have landed."""
        landed = (self._place(chunk.sequence, chunk.landing, None) for chunk in chunks if chunk.landing)
        return [*chain.from_iterable(landed), *self.take(chunk.sequence for chunk in chunks)]

    def landing(self, start: int, mark: int, end: int) -> int:
        """Where a chunk `start … end` can leave the snapshot wanted at `mark` on its way; 0 for nowhere."""
        place = start + (mark - start) // LANDING * LANDING
        return place if start < place and mark < end and place % self._block_size == 0 else 0

    def again(self, sequence: Sequence, end: int) -> int:
        """How many of a decoding sequence's tokens before `end` a state leaves to the next step.

        So that it stops where a snapshot is due. None of more than the delta rule reads at once.
        """
        place = end // self._block_size * self._block_size
        due = place - sequence.kept >= SPACING * self._block_size and place > sequence.computed
        fits = sequence.decodes and end - sequence.computed <= CHUNK
        return end - place if self.count > 1 and due and fits else 0

    def forget(self, keys: Iterable[Key]) -> None:
        """Let go of snapshots whose blocks can't be found any more, or are wrong."""
        for key in keys:
            if key in self._found:
                self._free.append(self._found.pop(key))

    def check(self) -> None:
        """Assert that each snapshot is free, or found by one key."""
        assert sorted([*self._free, *self._found.values()]) == list(range(self.count)), (
            "a snapshot is lost, or is found by two keys"
        )

    def _due(self, sequence: Sequence) -> bool:
        """Whether a snapshot is wanted here. One alone is better kept where a prompt ends."""
        place = sequence.computed
        if place % self._block_size:
            return False
        if place <= len(sequence.prompt):
            return place in sequence.marks
        return self.count > 1 and place - sequence.kept >= SPACING * self._block_size

    def _place(self, sequence: Sequence, place: int, slot: int | None) -> list[StateCopy]:
        """Copies for a snapshot behind `place` tokens; none where there is one already."""
        extend_keys(sequence, self._block_size)
        key, answering = sequence.keys[place // self._block_size - 1], place > len(sequence.prompt)
        if answering and sequence.trail is not None:
            self.forget([sequence.trail])
        sequence.kept, sequence.trail = place, key if answering else None
        if key in self._found:
            self._found.move_to_end(key)
            return []
        self._found[key] = self._free.pop() if self._free else self._found.popitem(last=False)[1]
        return [StateCopy(slot, self._found[key])]


def _ends(sequence: Sequence, block_size: int) -> list[int]:
    """The last block boundaries in turns and pictures of a prompt, and before its last token, ascending."""
    prompt, stops = sequence.prompt, sequence.request.stop_ids
    turns = [index + 1 for index, token in enumerate(prompt.ids) if token in stops]
    pictures = [prompt.placeholders[start - 1] + 1 for start in prompt.item_starts[1:]]
    most = len(prompt) - 1
    return sorted({min(end, most) // block_size * block_size for end in (*turns, *pictures, most)})

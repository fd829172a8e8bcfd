"""Checkpoints of recurrent states: copies from which a prompt can start, as it does from KV blocks.

Keys and values of every block are kept anyway, a recurrent state only moves on. So a model with linear
attention can start from cached blocks only where the state was copied when it stood just behind them:

    blocks       [ 0 | 1 | … | 64 | 65 | … | 80 ][ 81 | …          a block has a key (`prefix.py`)
    prompt       system │ picture ▒▒▒▒▒│ question │ answer …
    checkpoints                      ▲ 65       ▲ 81      ▲ moves along

A checkpoint has the key of the last block before it: it is the state after exactly the tokens that the key
stands for, whoever has computed them. It is of use with all blocks up to it, goes with the last of them, and
gives way to a new one when it is the one that was unused for longest.

A step leaves the state behind its last token, so a prompt's chunks end where a checkpoint is wanted: at the
last block boundary of each turn and of each picture, where other prompts part from this one. Each costs a
copy and, mostly, a step, and takes the memory of a thousand tokens and more; what computes in no time needs
none. In an answer there is one that moves along: no chat template has to render the answer again as it was,
but where it does (a tool's result follows, say), the next turn starts there.

Only numbers live here; the bytes are in `layers/kv_cache.py`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from snugvl.engine.blocks import Key
from snugvl.engine.prefix import extend_keys
from snugvl.engine.sequence import Sequence, State, slot_of

SPACING: Final = 16  # blocks from one checkpoint of a sequence to the next, and to the first
MOST: Final = 4  # of one prompt


class StateCopy(NamedTuple):
    """A running sequence's slot and a checkpoint, one of which becomes a copy of the other."""

    slot: int
    checkpoint: int


class Checkpoints:
    """Which block's end has which checkpoint, a number below `count`."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self._block_size = block_size
        self._free = list(reversed(range(count)))
        self._found: OrderedDict[Key, int] = OrderedDict()  # least recently used first

    def usable(self, blocks: list[int], keys: list[Key]) -> list[int]:
        """The beginning of cached blocks, known by `keys`, that ends at a checkpoint."""
        whole = next((n for n in range(len(blocks), 0, -1) if keys[n - 1] in self._found), 0)
        return blocks[:whole]

    def begin(self, sequence: Sequence) -> StateCopy | None:
        """What an admitted sequence starts from, if it found blocks; and where it will leave checkpoints."""
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
        """What to copy before the next step: states of running sequences that a prompt may start from.

        Each is that behind the `computed` tokens of its sequence, all of them known.
        """
        copies = []
        for sequence in sequences:
            if sequence.state is State.RUNNING and self._due(sequence):
                extend_keys(sequence, self._block_size)
                checkpoint = self._place(sequence, sequence.keys[sequence.computed // self._block_size - 1])
                copies += [] if checkpoint is None else [StateCopy(slot_of(sequence), checkpoint)]
        return copies

    def forget(self, keys: Iterable[Key]) -> None:
        """Let go of checkpoints whose blocks can't be found any more, or are wrong."""
        for key in keys:
            if key in self._found:
                self._free.append(self._found.pop(key))

    def check(self) -> None:
        """Assert that each checkpoint is free, or found by one key."""
        assert sorted([*self._free, *self._found.values()]) == list(range(self.count)), (
            "a checkpoint is lost, or is found by two keys"
        )

    def _due(self, sequence: Sequence) -> bool:
        """Whether a checkpoint is wanted here. One alone is better kept where a prompt ends."""
        place = sequence.computed
        if place % self._block_size:
            return False
        if place <= len(sequence.prompt):
            return place in sequence.marks
        return self.count > 1 and place - sequence.kept >= SPACING * self._block_size

    def _place(self, sequence: Sequence, key: Key) -> int | None:
        """Which checkpoint becomes that of `key`; None where it has one."""
        answering = sequence.computed > len(sequence.prompt)
        if answering and sequence.trail is not None:
            self.forget([sequence.trail])
        sequence.kept, sequence.trail = sequence.computed, key if answering else None
        if key in self._found:
            self._found.move_to_end(key)
            return None
        self._found[key] = self._free.pop() if self._free else self._found.popitem(last=False)[1]
        return self._found[key]


def _ends(sequence: Sequence, block_size: int) -> list[int]:
    """The last block boundaries in turns and pictures of a prompt, and before its last token, ascending."""
    prompt, stops = sequence.prompt, sequence.request.stop_ids
    turns = [index + 1 for index, token in enumerate(prompt.ids) if token in stops]
    pictures = [prompt.placeholders[start - 1] + 1 for start in prompt.item_starts[1:]]
    most = len(prompt) - 1
    return sorted({min(end, most) // block_size * block_size for end in (*turns, *pictures, most)})

"""Who owns which block of the KV cache, and which blocks a prompt finds that earlier sequences have left.

A sequence holds a *block table*: block numbers in the order of its tokens. Tables may share blocks, which
a reference count per block keeps track of. The choices of one request share its prompt:

    tokens          0 … 15   16 … 31   32 … 37
    choice 0        [ 4 ]    [ 7 ]     [ 2 ]        after `fork`: blocks 4, 7 and 2 have two owners each
    choice 1        [ 4 ]    [ 7 ]     [ 2 ]

    choice 1 is about to write token 38: `extend` gives it a block of its own and says "copy 2 to 9"
    choice 1        [ 4 ]    [ 7 ]     [ 9 ]        full blocks are never written again and stay shared

A block whose contents may be wanted again has a *key*, and is found by it even when no table holds it, until
it is taken for something else:

    free    blank: a stack                       what was freed last is warm in the caches, taken first
            cached: least recently used first    taken when nothing is blank; its key is forgotten

Keys and values of a token depend on everything before it, so the key of a full block is a chain of hashes:

    block   [ 5 8 ▒ ▒ ]    [ ▒ ▒ ▒ ▒ ]    [ 9 4 … partly filled
    key     h(root, ids,   h(that key,    none: only full blocks are shared, as they are never written again
              image 0…1)     ids, image 2…5)

    h takes   the key of the block before │ token ids │ digest, grid and first row of each picture in it

Placeholders look alike, so the pictures themselves must be in the key. M-RoPE positions need not: they
follow from the ids and grids up to the token. Generated tokens are tokens like any other, so the next turn
of a conversation finds the answers of the turns before; and so does a sequence that was preempted.

A block can be found once a finished step has written all of it, which is when `publish` is called, and until
it is taken for something else. The last known token is never taken from the cache: its logits choose the
next one. A hit may end inside a picture; the vision tower then runs again for the rest of its rows.

Linear attention keeps no keys and values that a block could hold, only a state that has moved on; a model
with such layers starts where a copy of it was kept, from the blocks up to there (`snapshots.py`).

The first token comes sooner where an earlier prompt began alike, so response times reveal that. One team
behind one server can live with that; where users must not learn of each other's prompts, turn it off
(`snugvl serve --no-prefix-cache`, `load(prefix_cache=False)`).

Only numbers live here; the bytes are in `layers/kv_cache.py`.

Sources: PagedAttention, Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), section 4.3–4.4; automatic
prefix caching of vLLM (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from snugvl.engine.request import VisionSlice
from snugvl.engine.sequence import Key
from snugvl.engine.sequence import Sequence as SequenceState

ROOT = bytes(32)  # where a key of its own length would stand, so that all hashes have one form


class BlockCopy(NamedTuple):
    """Copy block `source` to `target` in all layers, before anything is written to `target`."""

    source: int
    target: int


class BlockPool:
    """All blocks of the KV cache: free, owned by one table, or shared by several."""

    def __init__(
        self, num_blocks: int, block_size: int, forgotten: Callable[[list[Key]], None] = lambda _: None
    ) -> None:
        """`forgotten` is called with keys that find nothing any more, because their blocks were taken."""
        self._forgotten = forgotten
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._found: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner, those with a key included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def owners(self, block: int) -> int:
        """Number of tables that hold a block."""
        return self._owners[block]

    def key(self, block: int) -> Key | None:
        """The key that a block is found by, or None."""
        return self._keys[block]

    def find(self, key: Key) -> int | None:
        """The block of a key, owned or free, or None."""
        return self._found.get(key)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing(self, table: Sequence[int], start: int, end: int) -> int:
        """Free blocks that `extend` with the same arguments takes."""
        size, owners = self.block_size, self._owners  # as `_shared`, without a list: once a token
        more = max(-(-end // size) - len(table), 0)
        return more + sum(owners[block] > 1 for block in table[start // size :])

    def extend(self, table: list[int], start: int, end: int) -> list[BlockCopy]:
        """Make tokens `start … end - 1` of a table writable: new blocks, and copies of shared ones.

        There must be `missing(table, start, end)` free blocks. The copies must be made in their order, as
        the source of one may be the target of a later one.
        """
        assert self.missing(table, start, end) <= self.num_free, "extend without enough free blocks"
        copies = []
        for index in self._shared(table, start):
            copy = BlockCopy(table[index], self._take())
            self._drop(copy.source)
            table[index] = copy.target
            copies.append(copy)
        while len(table) < self.blocks_for(end):
            table.append(self._take())
        return copies

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second table over the same blocks."""
        for block in table:
            assert self._owners[block] > 0, f"block {block} is forked but free"
            self._owners[block] += 1
        return list(table)

    def share(self, found: Sequence[int]) -> list[int]:
        """A new table of blocks that were found by their keys, owned or free."""
        for block in found:
            assert self._keys[block] is not None, f"block {block} is shared but can't be found"
            self._cached.pop(block, None)
            self._owners[block] += 1
        return list(found)

    def publish(self, block: int, key: Key) -> None:
        """Let an owned block be found by `key`: it is full, and is never written again.

        Among two blocks with the same contents the one in use, or used last, is found.
        """
        assert self._owners[block] > 0, f"block {block} is published but free"
        assert self._keys[block] in (None, key), f"block {block} is published under two keys"
        twin = self._found.get(key, block)
        if twin != block and self._owners[twin]:
            return
        if twin != block:
            self._forget(twin)
            del self._cached[twin]
            self._blank.append(twin)
        self._keys[block] = key
        self._found[key] = block

    def withdraw(self, table: Sequence[int]) -> None:
        """Let none of a table's blocks be found any more, as their contents may be wrong."""
        for block in table:
            assert self._owners[block] > 0, f"block {block} is withdrawn but free"
            if self._keys[block] is not None:
                self._forget(block)

    def release(self, table: list[int]) -> None:
        """Give up a table's blocks and empty it; those that others hold stay theirs."""
        # Reversed: the stack hands them out again in the table's order, and of cached ones the end goes
        # first, as nothing is found behind a gap.
        for block in reversed(table):
            self._drop(block)
        table.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block is free once, or owned as often as it stands in `tables`; and the keys."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._owners, "reference counts differ from the block tables"
        unowned = [block for block, count in enumerate(counts) if not count]
        assert sorted([*self._blank, *self._cached]) == unowned, (
            "the free list differs from the blocks without an owner"
        )
        named = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert named == {block: key for key, block in self._found.items()}, "keys and blocks disagree"
        assert not any(block in named for block in self._blank), "a blank block can be found"
        assert all(block in named for block in self._cached), "a cached block can't be found"

    def _shared(self, table: Sequence[int], start: int) -> list[int]:
        """Indices of a table, from the block of token `start` on, whose block has other owners."""
        first = start // self.block_size
        return [i for i in range(first, len(table)) if self._owners[table[i]] > 1]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forgotten([self._forget(block)])
        self._owners[block] = 1
        return block

    def _forget(self, block: int) -> Key:
        key = self._keys[block]
        assert key is not None, f"block {block} has no key to forget"
        del self._found[key]
        self._keys[block] = None
        return key

    def _drop(self, block: int) -> None:
        assert self._owners[block] > 0, f"block {block} is freed twice"
        self._owners[block] -= 1
        if self._owners[block]:
            return
        if self._keys[block] is None:
            self._blank.append(block)
        else:
            self._cached[block] = None


def find_prefix(sequence: SequenceState, pool: BlockPool) -> list[int]:
    """Blocks that hold the longest cached beginning of a sequence, its last token excepted."""
    extend_keys(sequence, pool.block_size)
    blocks: list[int] = []
    for key in sequence.keys[: (sequence.length - 1) // pool.block_size]:
        block = pool.find(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def publish_full(sequence: SequenceState, pool: BlockPool) -> None:
    """Let the blocks be found that are full of known tokens, all of them written by finished steps.

    A step that runs ahead may have written one token more; it isn't known yet, so it doesn't count.
    """
    full = min(sequence.computed, sequence.length) // pool.block_size
    if full <= sequence.published:
        return
    extend_keys(sequence, pool.block_size)
    for index in range(sequence.published, full):
        pool.publish(sequence.table[index], sequence.keys[index])
    sequence.published = full


def check_keys(sequence: SequenceState, pool: BlockPool) -> None:
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


def block_key(parent: Key, ids: Sequence[int], vision: Sequence[VisionSlice]) -> Key:
    """Key of a full block: what comes before it, its tokens, and the rows of pictures among them."""
    state = blake2b(parent, digest_size=len(ROOT))
    state.update(array("q", ids))
    for part in vision:
        state.update(struct.pack("<5q", *part.item.grid_thw, part.start, len(part.item.digest)))
        state.update(part.item.digest)
    return state.digest()


def extend_keys(sequence: SequenceState, block_size: int) -> None:
    """Compute the keys of full blocks of known tokens that have none yet."""
    keys, prompt = sequence.keys, sequence.prompt
    for end in range((len(keys) + 1) * block_size, sequence.length + 1, block_size):
        start = end - block_size
        pictured = prompt.placeholders and start <= prompt.placeholders[-1]
        vision = prompt.vision_in(start, end) if pictured else ()
        keys.append(block_key(keys[-1] if keys else ROOT, sequence.ids(start, end), vision))

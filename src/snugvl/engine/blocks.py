"""The ownership of blocks of the KV cache.

A sequence holds a *block table*: block numbers in the order of its tokens. Tables may share blocks, which
a reference count per block keeps track of. The choices of one request share its prompt:

    tokens          0 … 15   16 … 31   32 … 37
    choice 0        [ 4 ]    [ 7 ]     [ 2 ]        after `fork`: blocks 4, 7 and 2 have two owners each
    choice 1        [ 4 ]    [ 7 ]     [ 2 ]

    choice 1 is about to write token 38: `extend` gives it a block of its own and says "copy 2 to 9"
    choice 1        [ 4 ]    [ 7 ]     [ 9 ]        full blocks are never written again and stay shared

A block whose contents may be wanted again has a *key* (`prefix.py`), and is found by it even when no table
owns it, until it is taken for something else:

    free    blank: a stack                       what was freed last is warm in the caches, taken first
            cached: least recently used first    taken when nothing is blank; its key is forgotten

Only numbers live here; the bytes are in `layers/kv_cache.py`.

Source: PagedAttention, Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), section 4.3–4.4.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Key = bytes
"""A hash of all that a full block's contents depend on."""


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
        """Number of free blocks that `extend` with the same arguments takes."""
        size, owners = self.block_size, self._owners  # as `_shared`, for whom nobody lists them: once a token
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

"""Who owns which block of the KV cache.

A sequence holds a *block table*: block numbers in the order of its tokens. Tables may share blocks, which
a reference count per block keeps track of. The choices of one request share its prompt:

    tokens          0 … 15   16 … 31   32 … 37
    choice 0        [ 4 ]    [ 7 ]     [ 2 ]        after `fork`: blocks 4, 7 and 2 have two owners each
    choice 1        [ 4 ]    [ 7 ]     [ 2 ]

    choice 1 is about to write token 38: `extend` gives it a block of its own and says "copy 2 to 9"
    choice 1        [ 4 ]    [ 7 ]     [ 9 ]        full blocks are never written again and stay shared

Only numbers live here; the bytes are in `layers/kv_cache.py`. A prefix cache fits in without a change for
the callers: `release` would keep a full block that has a key (a hash over its tokens, the digests of the
images in it and the key of the block before it) in a least-recently-used list, from which `extend` takes
when the free list is empty; `num_free` would count both.

Source: PagedAttention, Kwon et al. 2023 (https://arxiv.org/abs/2309.06180), section 4.3–4.4.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy block `source` to `target` in all layers, before anything is written to `target`."""

    source: int
    target: int


class BlockPool:
    """All blocks of the KV cache: free, owned by one table, or shared by several."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(range(num_blocks)))  # a stack: what was freed last is warm in the caches
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with more than one owner."""
        return sum(owners > 1 for owners in self._owners)

    def owners(self, block: int) -> int:
        """How many tables hold a block."""
        return self._owners[block]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing(self, table: Sequence[int], start: int, end: int) -> int:
        """Free blocks that `extend` with the same arguments takes."""
        return len(self._shared(table, start)) + max(0, self.blocks_for(end) - len(table))

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

    def release(self, table: list[int]) -> None:
        """Give up a table's blocks and empty it; those that others hold stay theirs."""
        for block in reversed(table):  # reversed: the stack hands them out again in the table's order
            self._drop(block)
        table.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block is free once, or owned as often as it stands in `tables`."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._owners, "reference counts differ from the block tables"
        unowned = [block for block, count in enumerate(counts) if not count]
        assert sorted(self._free) == unowned, "the free list differs from the blocks nobody owns"

    def _shared(self, table: Sequence[int], start: int) -> list[int]:
        """Indices of a table, from the block of token `start` on, whose block has other owners."""
        first = start // self.block_size
        return [i for i in range(first, len(table)) if self._owners[table[i]] > 1]

    def _take(self) -> int:
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def _drop(self, block: int) -> None:
        assert self._owners[block] > 0, f"block {block} is freed twice"
        self._owners[block] -= 1
        if not self._owners[block]:
            self._free.append(block)

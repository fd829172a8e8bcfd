"""Blocks with keys: what is found by a key holds its contents, whatever happened to the block before."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snugvl.engine.sequence import BlockPool
from tests.draws import draws

SIZE, BLOCKS = 2, 6


def filled(pool: BlockPool, *keys: bytes) -> list[int]:
    """A table with one full block for each key."""
    table: list[int] = []
    pool.extend(table, 0, len(keys) * pool.block_size)
    for block, key in zip(table, keys, strict=True):
        pool.publish(block, key)
    return table


def test_a_freed_block_is_found_and_taken_back() -> None:
    pool = BlockPool(4, SIZE)
    table = filled(pool, b"1", b"2")
    first, second = table
    pool.release(table)
    assert pool.num_free == 4, "cached blocks are free"
    assert (pool.find(b"1"), pool.find(b"2"), pool.find(b"3")) == (first, second, None)
    shared = pool.share([first])
    assert (shared, pool.num_free, pool.owners(first)) == ([first], 3, 1)
    pool.check([shared])


def test_a_block_in_use_is_shared_and_costs_nothing() -> None:
    pool = BlockPool(4, SIZE)
    table = filled(pool, b"1")
    again = pool.share([table[0]])
    assert (pool.num_free, pool.owners(table[0])) == (3, 2)
    pool.release(table)
    assert pool.num_free == 3
    pool.check([again])


def test_blank_blocks_are_taken_first_then_the_longest_unused_from_the_end() -> None:
    pool = BlockPool(5, SIZE)
    old, new = filled(pool, b"1", b"2"), filled(pool, b"3", b"4")
    pool.release(old)
    pool.release(new)
    table: list[int] = []
    lost = []
    for tokens in range(1, 5 * SIZE, SIZE):
        pool.extend(table, tokens - 1, tokens)
        lost.append([key for key in (b"1", b"2", b"3", b"4") if pool.find(key) is None])
        pool.check([table])
    assert lost == [[], [b"2"], [b"1", b"2"], [b"1", b"2", b"4"], [b"1", b"2", b"3", b"4"]]


def test_taking_a_block_back_makes_it_young() -> None:
    pool = BlockPool(2, SIZE)
    old, new = filled(pool, b"1"), filled(pool, b"2")
    pool.release(old)
    pool.release(new)
    block = pool.find(b"1")
    assert block is not None
    pool.release(pool.share([block]))
    pool.extend([], 0, 1)
    assert pool.find(b"1") == block
    assert pool.find(b"2") is None


def test_of_two_blocks_with_the_same_contents_the_one_in_use_is_found() -> None:
    pool = BlockPool(4, SIZE)
    first = filled(pool, b"1")
    second = filled(pool, b"1")
    assert pool.find(b"1") == first[0]
    assert pool.key(second[0]) is None
    pool.check([first, second])
    pool.release(first)
    pool.publish(second[0], b"1")
    assert pool.find(b"1") == second[0]
    pool.check([second])


def test_what_is_withdrawn_is_not_found() -> None:
    pool = BlockPool(4, SIZE)
    table = filled(pool, b"1", b"2")
    pool.withdraw(table)
    assert pool.find(b"1") is pool.find(b"2") is None
    pool.check([table])
    pool.release(table)
    pool.check([])


def test_misuse_is_caught() -> None:
    pool = BlockPool(2, SIZE)
    table = filled(pool, b"1")
    with pytest.raises(AssertionError, match="under two keys"):
        pool.publish(table[0], b"2")
    with pytest.raises(AssertionError, match="published but free"):
        pool.publish(1 - table[0], b"2")
    with pytest.raises(AssertionError, match="shared but can't be found"):
        pool.share([1 - table[0]])
    with pytest.raises(AssertionError, match="withdrawn but free"):
        pool.withdraw([1 - table[0]])


class Pool(RuleBasedStateMachine):
    """Tables over two letters, so that beginnings meet. `memory` plays the KV cache: it holds texts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.memory = [""] * BLOCKS  # all that stands before the end of what the block holds
        self.tables: list[tuple[list[int], str]] = []

    @rule(text=st.text("ab", max_size=3 * SIZE))
    def new(self, text: str) -> None:
        found: list[int] = []
        for end in range(SIZE, len(text) + 1, SIZE):
            block = self.pool.find(text[:end].encode())
            if block is None:
                break
            assert self.memory[block] == text[:end], "a stale block is found"
            found.append(block)
        free = sum(self.pool.owners(block) == 0 for block in found)
        before = self.pool.num_free
        table = self.pool.share(found)
        assert self.pool.num_free == before - free
        self.tables.append((table, text[: len(found) * SIZE]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.text("ab", min_size=1, max_size=2 * SIZE))
    def write(self, data: st.DataObject, more: str) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, text = self.tables[index]
        start, end = len(text), len(text) + len(more)
        if self.pool.missing(table, start, end) > self.pool.num_free:
            return
        for source, target in self.pool.extend(table, start, end):
            self.memory[target] = self.memory[source]
        text += more
        for last in range(start + 1, end + 1):
            self.memory[table[(last - 1) // SIZE]] = text[:last]
        for number in range(start // SIZE, end // SIZE):
            self.pool.publish(table[number], text[: (number + 1) * SIZE].encode())
        self.tables[index] = (table, text)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, text = data.draw(st.sampled_from(self.tables))
        self.tables.append((self.pool.fork(table), text))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), withdraw=st.booleans())
    def free(self, data: st.DataObject, withdraw: bool) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if withdraw:
            self.pool.withdraw(table)
        self.pool.release(table)

    @invariant()
    def nothing_lost(self) -> None:
        self.pool.check(table for table, _ in self.tables)
        assert self.pool.num_free + self.pool.num_used == BLOCKS
        for block in range(BLOCKS):
            key = self.pool.key(block)
            assert key is None or key.decode() == self.memory[block]
        for table, text in self.tables:
            for number, block in enumerate(table):
                assert self.memory[block] == text[: (number + 1) * SIZE]


TestPool = Pool.TestCase
TestPool.settings = draws(50, stateful_step_count=30)

"""The block pool never leaks, never frees twice, and keeps every table's contents through sharing."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snugvl.engine.sequence import BlockCopy, BlockPool
from tests.draws import draws


def test_counts() -> None:
    pool = BlockPool(8, 4)
    table: list[int] = []
    assert pool.missing(table, 0, 9) == 3
    assert pool.extend(table, 0, 9) == []
    assert (pool.num_free, pool.num_used) == (5, 3)
    assert [pool.owners(block) for block in table] == [1] * 3
    assert len(table) == len(set(table)) == 3
    pool.release(table)
    assert table == []
    assert pool.num_free == 8


def test_a_shared_last_block_is_copied_and_full_blocks_are_not() -> None:
    pool = BlockPool(8, 4)
    first: list[int] = []
    pool.extend(first, 0, 6)
    second = pool.fork(first)
    assert [pool.owners(block) for block in first] == [2, 2]
    assert pool.missing(second, 6, 7) == 1
    assert pool.extend(second, 6, 7) == [BlockCopy(first[1], second[1])]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert pool.extend(first, 6, 7) == [], "the last owner writes in place"


def test_a_full_prompt_needs_no_copy() -> None:
    pool = BlockPool(8, 4)
    first: list[int] = []
    pool.extend(first, 0, 8)
    second = pool.fork(first)
    assert pool.extend(second, 8, 9) == []
    assert len(second) == 3


def test_misuse_is_caught() -> None:
    pool = BlockPool(2, 4)
    table: list[int] = []
    with pytest.raises(AssertionError, match="without enough free blocks"):
        pool.extend(table, 0, 9)
    pool.extend(table, 0, 4)
    again = list(table)
    pool.release(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(again)
    with pytest.raises(AssertionError, match="forked but free"):
        pool.fork([0])


class Pool(RuleBasedStateMachine):
    """Tables with a model of what their tokens are; `memory` plays the KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 3)
        self.memory = [[-1] * 3 for _ in range(6)]
        self.tables: list[tuple[list[int], list[int]]] = []  # block table, tokens it must hold
        self.written = 0

    @rule()
    def new(self) -> None:
        self.tables.append(([], []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 7))
    def write(self, data: st.DataObject, count: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        start, end = len(tokens), len(tokens) + count
        missing, free = self.pool.missing(table, start, end), self.pool.num_free
        if missing > free:
            return
        for source, target in self.pool.extend(table, start, end):
            self.memory[target] = list(self.memory[source])
        assert self.pool.num_free == free - missing
        for index in range(start, end):
            self.written += 1
            tokens.append(self.written)
            self.memory[table[index // 3]][index % 3] = self.written

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        self.tables.append((self.pool.fork(table), list(tokens)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index)[0])

    @invariant()
    def nothing_lost(self) -> None:
        self.pool.check(table for table, _ in self.tables)
        assert self.pool.num_free + self.pool.num_used == 6
        assert self.pool.num_used == len({block for table, _ in self.tables for block in table})
        for table, tokens in self.tables:
            assert [self.memory[table[i // 3]][i % 3] for i in range(len(tokens))] == tokens


TestPool = Pool.TestCase
TestPool.settings = draws(60, stateful_step_count=30)

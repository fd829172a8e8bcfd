"""Drafts that are checked give the reference's greedy answer, whoever drafts."""

import random

import pytest

from snugvl.fidelity.results import Verified, furthest, verified

END, LIMIT = 0, 20


def greedy(prefix: tuple[int, ...]) -> int:
    """A reference: what it takes behind a prefix."""
    return random.Random(repr(prefix)).choice((END, *range(1, 9)))


def whole() -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < LIMIT and END not in tokens:
        tokens = (*tokens, greedy(tokens))
    return tokens


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_passes_end_at_the_greedy_answer(wrong: float) -> None:
    chance, known, passes = random.Random(7), Verified(), 0
    while not known.done:
        draft: tuple[int, ...] = ()
        while len(known.tokens + draft) < LIMIT and END not in draft:
            right = greedy(known.tokens + draft)
            draft = (*draft, 9 if chance.random() < wrong else right)
        best = [greedy(known.tokens + draft[:place]) for place in range(len(draft))]
        before = known
        known = verified(known.tokens, draft, best, frozenset({END}), LIMIT)
        assert known.tokens == whole()[: len(known.tokens)]
        assert len(known.tokens) > len(before.tokens)
        passes += 1
    assert known.tokens == whole()
    assert passes == {0.0: 1, 1.0: len(whole())}.get(wrong, passes)


def test_an_answer_ends_where_the_reference_ends_it() -> None:
    ends = frozenset({END})
    assert verified((), (4, 5, 6), (4, END, 6), ends, LIMIT) == Verified((4, END), done=True)
    assert verified((4,), (5, 6), (5, 6), ends, 3) == Verified((4, 5, 6), done=True)
    assert verified((), (4, 5), (4, 7), ends, LIMIT) == Verified((4, 7), done=False)


def test_of_several_drafts_the_one_that_came_furthest_counts() -> None:
    some = [Verified((1, 2)), Verified((1, 2, 3), done=True), Verified((1,))]
    assert furthest(some) == some[1]
    assert furthest([]) == Verified()

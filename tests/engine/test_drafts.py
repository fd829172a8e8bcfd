"""What a choice may say next is found where the same words stood before."""

import random
from itertools import pairwise

import pytest

from snugvl.engine.drafts import GROWTH, LONGEST, PLACES, REST, Drafts, NgramIndex, NgramProposer


def proposed(prompt: list[int], answer: list[int], most: int = 4) -> list[int]:
    return NgramProposer(NgramIndex(prompt), answer).propose(most)


@pytest.mark.parametrize(
    ("prompt", "answer", "guess"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [9, 2, 3], [4, 5, 6, 7]),
        ([1, 2, 3, 4], [9, 2, 3], [4, 9, 2, 3]),  # and on into the answer
        ([1, 2, 3, 4, 8, 8, 5, 3, 7, 7], [5, 3], [7, 7, 5, 3]),
        ([*range(1, 20)], [3, 4], [5, 6, 7, 8]),
        ([*range(1, 20)], [30, 7, 8, 9], [10, 11, 12, 13]),
        ([7, 7, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5], [3, 4], [5, 5, 5, 5]),
        ([5, 2, 3, 4, 4, 6, 2, 3, 7, 7], [6, 2, 3], [7, 7, 6, 2]),  # three tokens say more than two
        ([5, 2, 3, 4, 4, 5, 2, 3, 7, 7], [5, 2, 3], [7, 7, 5, 2]),  # of equals the latest
        ([1], [2, 3, 4, 5, 2, 3], [4, 5, 2, 3]),  # in its own answer
        ([1], [6, 6, 6], [6, 6, 6, 6]),  # what repeats goes on
        ([1], [6, 7, 6, 7, 6], [7, 6, 7, 6]),
        ([1, 2], [3, 9, 1, 2], [3, 9, 1, 2]),  # over the border between them
        ([1, 2, 3], [2, 9], []),
        ([1, 2, 3], [9], []),
        ([2], [], []),
        ([1, 2, 3], [4, 1, 2], [3, 4, 1, 2]),  # the end of a prompt goes on in the answer
    ],
)
def test_the_longest_end_that_stood_before(prompt: list[int], answer: list[int], guess: list[int]) -> None:
    assert proposed(prompt, answer) == guess


def naive(tokens: list[int], most: int) -> set[int]:
    """The first token of all guesses that are as good as can be: by looking everywhere."""
    best, found = 0, set()
    for place in range(1, len(tokens) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best, 2):
            found = {tokens[place + 1]} if length > best else found | {tokens[place + 1]}
            best = length
    return found


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_looking_everywhere_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.engine.drafts.PLACES", 10_000)
    draw = random.Random(seed)
    prompt = [draw.randrange(5) for _ in range(draw.randrange(2, 60))]
    answer: list[int] = []
    proposer = NgramProposer(NgramIndex(prompt), answer)
    for _ in range(60):
        answer.append(draw.randrange(5))
        if draw.random() < 0.6:  # not asked after each token
            guess, right = proposer.propose(3), naive(prompt + answer, 3)
            assert guess[:1] == [] if not right else guess[0] in right


def test_a_long_prompt_is_added_piece_by_piece() -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(50_000) for _ in range(20 * GROWTH)]
    answer = [60_000, *prompt[-90:-87]]
    proposer = NgramProposer(NgramIndex(prompt), answer)
    assert proposer.propose(3) == [], "the end of the prompt is not in the index yet"
    for _ in range(20):
        proposer.propose(3)
    assert proposer.propose(3) == prompt[-87:-84]


def test_a_chain_of_the_same_pair_is_followed_so_far() -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counted.looks += 1
            return super().__getitem__(index)

    prompt = Counted([1, 2, 3] * 5000)
    index = NgramIndex(prompt)
    index.grow(len(prompt), len(prompt))
    Counted.looks = 0
    assert index.find([9, 1, 2])[0] == 2
    assert Counted.looks <= PLACES * LONGEST


def test_choices_share_what_their_prompt_has() -> None:
    index = NgramIndex([1, 2, 3, 4])
    answers: list[list[int]] = [[1, 2], [2, 3]]
    assert [NgramProposer(index, answer).propose(1) for answer in answers] == [[3], [4]]


class Always:
    def propose(self, most: int) -> list[int]:
        return [7] * most


def test_more_after_a_hit_and_less_after_a_miss() -> None:
    drafts = Drafts(Always())
    first = len(drafts.propose(10, 99))
    drafts.learn(10 + first + 1, first, first)
    assert len(drafts.propose(20, 99)) == 2 * first
    assert len(drafts.propose(20, 3)) == 3
    drafts.learn(20, 3, 3)
    assert len(drafts.propose(20, 99)) == 2 * first, "fewer were asked for, and all were right"
    drafts.learn(21, 8, 2)
    assert len(drafts.propose(21, 99)) == 3


def test_whose_guesses_are_wrong_rests() -> None:
    drafts, length, tries = Drafts(Always()), 10, []
    for length in range(10, 400):
        if drafts.propose(length, 4):
            tries.append(length)
            drafts.learn(length + 1, 4, 0)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[:2] == [1, 5]
    assert max(pauses) == REST + 1
    assert pauses == sorted(pauses)
    drafts.learn(length, 4, 1)
    assert len(drafts.propose(length + REST + 1, 4)) == 2, "and begins anew after a hit"
    drafts.learn(500, 2, 0)
    assert drafts.propose(501, 4)

"""Streamed text equals the whole text, however it is split, up to the first stop string."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.errors import RequestError
from snugvl.inputs.detokenizer import Detokenizer
from snugvl.inputs.tokenizer import Tokenizer
from tests.draws import draws
from tests.inputs.conftest import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """What the streamed text must be: up to the stop that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    pieces = [detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.flush()]


@given(st.data())
@draws(100)
def test_any_ids_and_stops(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    whole = tokenizer.decode(ids)
    # Stop strings that really occur, and such that don't.
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda a: st.integers(a + 1, a + 5).map(lambda b: whole[a:b])
    )
    stops = data.draw(st.lists(st.one_of(inside, st.text("ab \n", min_size=1, max_size=3)), max_size=3))
    stops = [stop for stop in stops if stop]
    detokenizer = Detokenizer(tokenizer, stops)
    text = "".join(stream(detokenizer, ids))
    assert (text, detokenizer.stopped) == cut(whole, stops)
    if detokenizer.stop is not None:
        assert detokenizer.stop in stops
        assert whole.startswith(text + detokenizer.stop)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_overlapping_stops(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """Two letters make every kind of overlap; one token a letter, and nothing is held back needlessly."""
    ids = [i for letter in text for i in tokenizer.encode(letter)]
    detokenizer = Detokenizer(tokenizer, stops)
    expected, stopped = cut(text, stops)
    out = ""
    for count, token in enumerate(ids, start=1):
        out += detokenizer.push(token)
        if detokenizer.stopped:
            break
        seen = text[:count]
        held = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: len(seen) - held]
    assert (out + detokenizer.flush(), detokenizer.stopped) == (expected, stopped)


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    assert "".join(stream(detokenizer, tokenizer.encode("go STOP on"))) == "go "
    assert detokenizer.stopped
    assert detokenizer.push(tokenizer.encode("x")[0]) == ""


def test_incomplete_characters_are_held(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    assert stream(Detokenizer(tokenizer), ids) == ["a", "", "", "", "🙂", "b", ""]
    assert stream(Detokenizer(tokenizer), ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("yes"), *sorted(tokenizer.eos_ids)]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "yes"
    assert "<|im_end|>" in "".join(stream(Detokenizer(tokenizer, shown=tokenizer.special_ids), ids))


def test_covered_tokens(tokenizer: Tokenizer) -> None:
    """For logprobs: a token is covered when all its text is out."""
    detokenizer = Detokenizer(tokenizer, ["bc"])
    a, b, c, x = (tokenizer.encode(letter)[0] for letter in "abcx")
    seen = []
    for token in (a, b, b, x, b, c):
        detokenizer.push(token)
        seen.append(detokenizer.covered)
    assert seen == [1, 1, 2, 4, 4, 4]  # the stop string's tokens never are
    detokenizer = Detokenizer(tokenizer)
    seen = []
    for token in tokenizer.encode("a🙂b"):
        detokenizer.push(token)
        seen.append(detokenizer.covered)
    assert seen == [1, 1, 1, 1, 5, 6]
    detokenizer = Detokenizer(tokenizer, ["bc"])
    for token in (a, b):
        detokenizer.push(token)
    assert detokenizer.flush() == "b"
    assert detokenizer.covered == 2


@given(st.data())
def test_all_is_covered_in_the_end(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(tokenizer, ["never this"])
    stream(detokenizer, ids)
    assert detokenizer.covered == len(ids)


def test_an_empty_stop_string(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop string is empty") as raised:
        Detokenizer(tokenizer, ["a", ""])
    assert raised.value.field == "stop"


def test_linear_time(tokenizer: Tokenizer) -> None:
    """A stop string that nearly matches all the way is the worst case."""
    token = tokenizer.encode("a")[0]
    detokenizer = Detokenizer(tokenizer, ["a" * 5000 + "b"])
    start = time.process_time()  # ours alone, whatever else the machine does
    for _ in range(50_000):
        detokenizer.push(token)
    assert time.process_time() - start < 15, "quadratic, it takes minutes"
    assert len(detokenizer.flush()) == 5000


def test_special_tokens_that_are_text_nevertheless() -> None:
    backend = small_tokenizer()
    marker = backend.token_to_id("<|im_start|>")
    tokenizer = Tokenizer(backend, eos_ids=frozenset({0}))
    letters = [backend.token_to_id(letter) for letter in "ab"]
    for shown, text in ((frozenset(), "ab"), (frozenset({marker}), "a<|im_start|>b")):
        detokenizer = Detokenizer(tokenizer, shown=shown)
        ids = [letters[0], marker, letters[1]]
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text

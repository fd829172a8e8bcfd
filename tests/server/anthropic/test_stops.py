"""Stop sequences found in a stream agree with those found in the whole text, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from snugvl.server.anthropic.stops import StopMatcher

letters = st.text("ab", max_size=12)


def expected(text: str, sequences: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [sequence for sequence in sequences if text[:end].endswith(sequence)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_cut_gives_the_same(pieces: list[str], sequences: list[str]) -> None:
    matcher = StopMatcher(sequences)
    shown = [matcher.push(piece) for piece in pieces]
    shown.append(matcher.flush())
    assert ("".join(shown), matcher.matched) == expected("".join(pieces), sequences)


def test_what_can_still_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("an E", "N", "O", "END", "more")] == ["an ", "", "ENO", "", ""]
    assert matcher.matched == "END"

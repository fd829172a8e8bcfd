"""A plan as llama.cpp is started with it: threads."""

import pytest

from snugvl.backends.llamacpp.settings import threads


@pytest.mark.parametrize(
    ("cores", "there", "platform", "words"),
    [
        (2, 2, "linux", ("-t", "1")),
        (1, 1, "linux", ("-t", "1")),
        (4, 4, "win32", ("-t", "3")),
        (16, 16, "linux", ()),
        (2, 64, "linux", ("-t", "1")),  # a container's share
        (16, 64, "linux", ("-t", "15")),
        (8, 8, "darwin", ()),
    ],
)
def test_one_core_is_left_where_there_are_few(
    cores: int, there: int, platform: str, words: tuple[str, ...]
) -> None:
    assert threads(cores, there, platform) == words

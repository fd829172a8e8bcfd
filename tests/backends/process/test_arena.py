"""What lies where in the memory that pictures go through."""

import sys

import pytest

from snugvl.backends.process.arena import Arena
from snugvl.core.region import Region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")


@pytest.fixture
def region() -> Region:
    made = Region.made(100)
    assert made is not None
    made.keep_to_ourselves()
    return made


def test_pieces_lie_side_by_side_and_gaps_are_filled_from_below(region: Region) -> None:
    arena = Arena(region)
    assert [arena.put(owner, bytes([owner]) * 30) for owner in (1, 2, 3)] == [0, 30, 60]
    assert bytes(region.view) == b"\1" * 30 + b"\2" * 30 + b"\3" * 30 + bytes(10)
    assert arena.put(4, bytes(11)) is None
    assert arena.put(4, bytes(10)) == 90
    arena.free(2)
    assert arena.put(5, bytes(31)) is None
    assert arena.put(5, bytes(20)) == 30
    assert arena.put(5, bytes(10)) == 50
    arena.free(5)
    arena.free(1)
    assert arena.put(6, bytes(60)) == 0


def test_all_of_an_owner_is_freed_and_nothing_else(region: Region) -> None:
    arena = Arena(region)
    for owner in (1, 2, 1):
        arena.put(owner, bytes(33))
    arena.free(1)
    arena.free(1)
    arena.free(9)
    assert arena.put(3, bytes(34)) == 66
    assert arena.put(3, bytes(33)) == 0

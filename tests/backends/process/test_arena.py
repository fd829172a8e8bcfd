"""What lies where in the memory that pictures go through."""

import sys

import pytest

from snugvl.backends.process.wire import Arena
from snugvl.core.resources import Region

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


def test_one_large_piece_has_room_and_many_of_one_owner_leave_half_to_others(region: Region) -> None:
    arena = Arena(region)
    assert arena.put(1, bytes(80)) == 0
    assert arena.put(1, bytes(1)) is None
    arena.free(1)
    assert [arena.put(2, bytes(25)) for _ in range(3)] == [0, 25, None]
    assert arena.put(3, bytes(50)) == 50


def test_all_of_an_owner_is_freed_and_nothing_else(region: Region) -> None:
    arena = Arena(region)
    for owner, count in ((1, 25), (2, 41), (1, 25)):
        arena.put(owner, bytes(count))
    arena.free(1)
    arena.free(1)
    arena.free(9)
    assert arena.put(3, bytes(26)) == 66
    assert arena.put(3, bytes(24)) == 0

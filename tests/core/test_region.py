import os
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.core.resources import Region

CHILD = """
import sys
from snugvl.core.resources import Region
region = Region.inherited(*sys.argv[1:])
print(bytes(region.view[:4]).decode(), end="")
region.put([memoryview(b"back"), memoryview(b"!")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux")
def test_what_one_writes_the_other_reads() -> None:
    region = Region.made(8192)
    assert region is not None
    assert region.put([memoryview(b"here")])
    command = [sys.executable, "-c", CHILD, *region.arguments]
    run = subprocess.run(command, pass_fds=(region.descriptor,), capture_output=True, check=True)
    assert run.stdout == b"here"
    assert bytes(region.view[:6]) == b"back!\0"
    region.keep_to_ourselves()
    with pytest.raises(OSError):
        os.fstat(region.descriptor)
    region.close()
    region.close()


CUTTER = """
import os, sys
for size in 0, 4096, 1 << 20:
    try:
        os.ftruncate(int(sys.argv[1]), size)
    except PermissionError:
        print("refused", end=" ")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux")
def test_neither_side_changes_its_size() -> None:
    """A child that cuts it would end the parent by its next look."""
    region = Region.made(8192)
    assert region is not None
    command = [sys.executable, "-c", CUTTER, *region.arguments]
    run = subprocess.run(command, pass_fds=(region.descriptor,), capture_output=True, text=True, check=True)
    assert run.stdout == "refused refused refused "
    assert bytes(region.view[-4:]) == bytes(4)
    region.keep_to_ourselves()
    region.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux")
def test_what_does_not_fit_is_not_written() -> None:
    region = Region.made(4096)
    assert region is not None
    assert not region.put([memoryview(bytes([1]) * 4096), memoryview(b"1")])
    assert not any(region.view)
    seen = region.view[:1]
    region.keep_to_ourselves()
    region.close()
    assert seen[0] == 0, "whoever still looks at it may"


def test_a_system_without_such_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    assert Region.made(4096) is None
    monkeypatch.delattr(os, "memfd_create")
    assert Region.made(4096) is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux")
def test_memory_that_can_not_be_mapped_leaves_no_descriptor() -> None:
    here = Path("/proc/self/fd")
    before = len(list(here.iterdir()))
    assert [Region.made(1 << 62) for _ in range(3)] == [None] * 3
    assert len(list(here.iterdir())) == before

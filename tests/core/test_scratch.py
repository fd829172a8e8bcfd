"""Folders that are gone with the process that made them."""

import errno
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from snugvl.core import resources
from snugvl.core.resources import OWNER, Scratch, sweep

MAKES = """
import sys
from snugvl.core.resources import Scratch
made = Scratch("test")
(made.path / "weights").write_text("many")
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_there_until_nobody_holds_it(folder: Path) -> None:
    one, other = Scratch("test"), Scratch("test")
    sweep()
    assert sorted(folder.iterdir()) == sorted([one.path, other.path])
    one.remove()
    one.remove()
    assert list(folder.iterdir()) == [other.path]
    del other
    assert not list(folder.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="files that are locked are left there")
@pytest.mark.parametrize("killed", [False, True])
def test_of_a_process_that_ends_nothing_is_left(folder: Path, killed: bool) -> None:
    command = [sys.executable, "-c", MAKES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().decode().strip())
        sweep()
        assert (theirs / "weights").exists(), "it lives"
        if killed:
            process.send_signal(signal.SIGKILL)
    assert theirs.exists() == killed
    sweep()
    assert not list(folder.iterdir())


def test_what_is_nobodys_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of other programs, and those on a disk that can't lock files: nobody knows who lives."""
    (folder / "snugvl-other").mkdir()
    monkeypatch.setattr(resources, "_lock", lambda _: False)
    made = Scratch("test")
    assert not (made.path / OWNER).exists()
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    sweep()
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_swept_where_no_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a read-only container, where a server needs none."""

    def unusable() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", unusable)
    sweep()

"""Files that a user named: whole or not at all, and errors that name them."""

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from snugvl.cli.app import run
from snugvl.core.folders import write_named


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    write_named(link, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "plan.json"]


def test_a_full_disk_leaves_the_older_file_and_is_told_with_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str, *_: Any, **__: Any) -> NoReturn:
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "plan.json"
    assert run(["plan", "pocket", "--gpu", "rtx-5060", "--save", str(path)]) == 0
    before = path.read_text()
    monkeypatch.setattr(Path, "write_text", full)
    capsys.readouterr()
    assert run(["plan", "pocket", "--gpu", "rtx-3090", "--save", str(path)]) == 1
    assert capsys.readouterr().err == f"snugvl: {path}: No space left on device\n"
    assert path.read_text() == before
    assert json.loads(before)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_what_is_no_plain_file_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="/dev/full") as caught:
        write_named(Path("/dev/full"), "text" * 10_000)
    assert caught.value.filename == "/dev/full"
    assert Path("/dev/full").is_char_device()
    write_named(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()

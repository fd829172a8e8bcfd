"""Files that a user named: whole or not at all, and errors that name them."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from snugvl.cli.app import run
from snugvl.core.folders import write_named
from tests.docs.test_readme import ROOT
from tests.patience import PATIENCE_S

SHAPES = ROOT / "examples" / "images" / "shapes.png"
CRAMPED = """
import resource, sys
sys.dont_write_bytecode = True  # Python keeps a torn file of it, and ends at it ever after
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
from snugvl.cli.entry import main
main()
"""


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


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("config", "set", "model", "Qwen/Qwen3-VL-2B-Instruct"), "home/snugvl/config.toml"),
        (("detect", str(SHAPES), "--draw", "drawn/boxes.png"), "drawn/boxes.png"),
        (("detect", str(SHAPES), "--format", "yolo", "--output", "boxes"), "boxes/classes.txt"),
        (("detect", str(SHAPES), "--format", "coco", "--output", "boxes.json"), "boxes.json"),
        (("caption", str(SHAPES), "--output", "all.jsonl"), "all.jsonl"),
        (("doctor", "--report", "report.md"), "report.md"),
        (("doctor", "--record", "machine.json"), "machine.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:1]),
)
def test_a_file_that_cant_be_written_is_named_and_the_exit_code_is_1(
    words: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of this process may have more than 16 bytes, as on a full disk."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    ran = subprocess.run(
        [sys.executable, "-c", CRAMPED, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 1, ran.stderr
    said = ran.stderr.splitlines()[-1]
    assert said.endswith(f"{name}: File too large"), said
    assert not any(each.is_file() and each.suffix == ".png" for each in tmp_path.rglob("*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("words", [("--version",), (), ("list",), ("plan", "pocket", "--gpu", "rtx-5060")])
def test_a_full_standard_output_is_named(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "snugvl", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (ran.returncode, ran.stderr) == (1, "snugvl: standard output: No space left on device\n")

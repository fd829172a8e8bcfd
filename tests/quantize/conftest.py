"""The tiny checkpoint of random weights that `compare` is tested with, and the command itself."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from snugvl.cli.app import run
from tests.fidelity.conftest import scene
from tests.fidelity.conftest import tiny_whole as tiny_whole


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def quantize(tiny_whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("SNUGVL_DEBUG", raising=False)

    def ran(out: object, *args: object, model: object = tiny_whole) -> Ran:
        capsys.readouterr()
        code = run(["quantize", str(model), str(out), *map(str, args), "--device", "cpu"])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return ran


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A picture, and a text that is like nothing."""
    folder = tmp_path / "files"
    folder.mkdir()
    scene(0).save(folder / "0.png")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return folder

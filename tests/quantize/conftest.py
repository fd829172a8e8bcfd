"""The tiny checkpoint of random weights that `compare` is tested with, and the command itself."""

from pathlib import Path

import pytest

from tests.command import Ran, Run, ran
from tests.fidelity.conftest import scene
from tests.fidelity.conftest import tiny_whole as tiny_whole


@pytest.fixture
def quantize(tiny_whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("SNUGVL_DEBUG", raising=False)

    def quantize(out: object, *args: object, model: object = tiny_whole) -> Ran:
        return ran(capsys, "quantize", model, out, *args, "--device", "cpu")

    return quantize


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A picture, and a text that is like nothing."""
    folder = tmp_path / "files"
    folder.mkdir()
    scene(0).save(folder / "0.png")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return folder

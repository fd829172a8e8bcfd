"""The command line in this process, on a scripted model, and pictures to give it."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import session
from snugvl.cli.app import run
from tests.tasks.fake import FakeBackend


@dataclass
class Ran:
    """What a command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """What `snugvl` loads instead of a model; its script can be replaced."""
    from snugvl.model import Model

    fake = FakeBackend()

    def load(choice: object) -> Model:
        fake.reopen()
        return Model(fake)

    monkeypatch.setattr(session, "load_model", load)
    monkeypatch.delenv("SNUGVL_MODEL", raising=False)
    monkeypatch.delenv("SNUGVL_DEBUG", raising=False)
    return fake


@pytest.fixture
def snugvl(
    backend: FakeBackend,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., Ran]:
    """Runs a command line; on a terminal where the test is marked so by the fixture `terminal`."""

    def ran(*args: object) -> Ran:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if "terminal" in request.fixturenames:
                patch.setattr(sys, "stdout", _Terminal(sys.stdout))
                patch.setattr(sys, "stderr", _Terminal(sys.stderr))
            code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return ran


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with five pictures, each of its own size, a hidden one, notes and a folder below."""
    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.jpg", "c.PNG", "d.webp", "e.gif"), 1):
        Image.new("RGB", (number * 10, 50), "red").save(folder / name)
    Image.new("RGB", (99, 50)).save(folder / "below" / "f.png")
    Image.new("RGB", (98, 50)).save(folder / ".hidden.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""

    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return pipe


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output and error are a terminal, as `snugvl` sees them."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


class _Terminal:
    def __init__(self, stream: object) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

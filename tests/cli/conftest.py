"""The command line in this process, on a scripted model, and pictures to give it."""

import io
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.backends.process.launch import Launched
from snugvl.cli import session
from snugvl.server.settings import ServerSettings
from tests.command import Ran, ran
from tests.tasks.fake import FakeBackend

NOTE = f"snugvl: {session.NOTE}\n"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBackend:
    """What `snugvl` loads instead of a model; its script can be replaced."""
    from snugvl.model import Model

    fake = FakeBackend()

    def load(choice: object) -> Model:
        fake.reopen()
        return Model(fake)

    monkeypatch.setattr(session, "load_model", load)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
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

    def snugvl(*args: object) -> Ran:
        with monkeypatch.context() as patch:
            if "terminal" in request.fixturenames:
                patch.setattr(sys, "stdout", _Terminal(sys.stdout))
                patch.setattr(sys, "stderr", _Terminal(sys.stderr))
            return ran(capsys, *args)

    return snugvl


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
    monkeypatch.setenv("COLUMNS", "400")  # no line is wrapped
    monkeypatch.delenv("NO_COLOR", raising=False)


class _Terminal:
    def __init__(self, stream: object) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class SleepingProcess(Launched):
    """In the place of the engine's process: it imports no torch."""

    def __init__(self) -> None:
        super().__init__((sys.executable, "-S", "-c", "import time; time.sleep(10000)"))

    @property
    def ended(self) -> bool:
        return self._popen.returncode is not None


@dataclass
class Served:
    """What the command would have served."""

    settings: list[ServerSettings] = field(default_factory=list)
    services: list[Any] = field(default_factory=list)
    processes: list[SleepingProcess] = field(default_factory=list)
    code: int = 0
    error: Exception | None = None

    def __call__(self, service: Any, settings: ServerSettings, listener: socket.socket, watch: Any) -> int:
        assert listener.getsockname()[1] == settings.port
        self.services.append(service)
        self.settings.append(settings)
        if self.error is not None:
            raise self.error
        return self.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    """Nothing is loaded; no key and no model of this machine's user is in the way."""
    for name in ("SNUGVL_API_KEY", "SNUGVL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    served = Served()
    monkeypatch.setattr("snugvl.server.run.run", served)

    def launch() -> SleepingProcess:
        served.processes.append(SleepingProcess())
        return served.processes[-1]

    monkeypatch.setattr("snugvl.backends.process.launch.Launched", launch)
    ours = logging.getLogger("snugvl")
    before = ours.handlers, ours.propagate, ours.level
    yield served
    (ours.handlers, ours.propagate), level = before[:2], before[2]
    ours.setLevel(level)

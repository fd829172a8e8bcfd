"""The engine's process is begun before the command line is imported: when, and what becomes of it."""

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from snugvl.backends.process.supervised import SupervisedEngine
from snugvl.cli import app, entry
from tests.cli.conftest import Served, SleepingProcess


@pytest.mark.parametrize(
    "line",
    [
        "serve",
        "serve pocket --port 0",
        "serve vllm --backend native",
        "serve --backend auto --served-model-name vllm",
    ],
)
def test_where_it_is_begun(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "Launched", SleepingProcess)
    begun = entry.begin(line.split())
    assert begun is not None
    begun.abandon()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "caption serve",
        "serve -h",
        "serve pocket --help",
        "serve --backend vllm",
        "serve --backend=vllm pocket",
        "serve --attach http://127.0.0.1:8001",
        "serve --attach=http://127.0.0.1:8001",
    ],
)
def test_where_it_is_not(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "Launched", lambda: pytest.fail("launched"))
    assert entry.begin(line.split()) is None


@pytest.mark.slow
def test_a_zip_file_on_the_path_is_refused_by_name(tmp_path: Path) -> None:
    """Code would be found there; the catalogue and pocket are files that other libraries open."""
    source = Path(entry.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "snugvl.whl", "w") as packed:
        for path in source.rglob("*.py"):
            packed.write(path, path.relative_to(source))
    command = [sys.executable, "-m", "snugvl", "plan", "--gpu", "rtx-3060", "--offline"]
    environment = os.environ | {"PYTHONPATH": str(packed.filename)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    why = "isn't a folder, and its models can't be read there; pip install it"
    assert ran.stderr == f"snugvl: {packed.filename}/snugvl {why}\n"


def test_a_process_that_cannot_be_started_is_nobodys_error_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(entry, "Launched", refuse)
    assert entry.begin(["serve"]) is None


def test_the_command_takes_it(served: Served) -> None:
    with SleepingProcess() as begun:
        assert app.run(["serve", "--port", "0", "--quiet"], begun) == 0
        service = served.services[0]
        assert isinstance(service, SupervisedEngine)
        assert service._launched is begun
        assert served.processes == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("serve --port 0 --attach http://127.0.0.1:9 --quiet", 0),
        ("serve --port x", 2),
        ("serve nobody/nothing --port 0", 4),
        ("--version", 0),
    ],
)
def test_nobody_took_it(served: Served, line: str, code: int) -> None:
    begun = SleepingProcess()
    assert app.run(line.split(), begun) == code
    assert begun.ended
    assert served.processes == []


def test_nothing_slow_comes_before_it() -> None:
    code = (
        "import sys, snugvl.cli.entry\n"
        "print([name for name in ('typer', 'snugvl.cli.app', 'asyncio', 'torch') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


LOST = "snugvl: standard output is closed (>&-), so nothing was printed"


@pytest.mark.parametrize(
    ("line", "printed", "code"),
    [
        ("--version >&-", LOST, 1),
        ("--help >&-", LOST, 1),
        ("--version 2>&-", "snugvl ", 0),
        ("--version <&-", "snugvl ", 0),
        ("config path >&- 2>&-", "", 1),
        ("config path <&- >&- 2>&-", "", 1),
        ("config show >&-", "snugvl: ", 0),  # prints nothing but on stderr
        ("plan --gpu rtx-5060 pocket >&-", LOST, 1),
        ("plan --gpu nonsense >&-", "snugvl: no GPU 'nonsense'", 2),
        ("doctor --log - <&-", "Not recognised", 0),
    ],
)
def test_closed_standard_streams_are_the_null_device(
    tmp_path: Path, line: str, printed: str, code: int
) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m snugvl {line}"
    ended = subprocess.run(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert "unexpected" not in ended.stderr
    assert ended.returncode == code, ended.stderr
    assert (ended.stdout + ended.stderr).startswith(printed)
    if not printed:
        assert not ended.stdout

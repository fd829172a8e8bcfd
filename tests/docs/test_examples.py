# ruff: noqa: F811 (fixtures)
"""Every example that the documentation marks as live runs, and prints what it says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snugvl.backends.native.backend import NativeBackend
from snugvl.server.settings import ServerSettings
from tests.docs.examples import Example, all_examples
from tests.docs.generated import pages
from tests.patience import PATIENCE_S
from tests.server.conftest import Shared, pocket, url  # noqa: F401
from tests.server.live import live

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-the-documentation"
ADDRESS = "http://127.0.0.1:8000"
# As a user's shell has it, but an answer that is an error fails.
CURL = 'curl() { command curl -sS --fail-with-body "$@"; }\n'


@pytest.fixture(scope="module")
def keyed_url(pocket: NativeBackend) -> Iterator[str]:
    """A server that asks for `KEY`."""
    with live(Shared(pocket), ServerSettings(api_keys=(KEY,))) as base:
        yield base


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Looks like the repository's, but what an example writes is nobody's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name in ("SNUGVL_MODEL", "SNUGVL_SERVER", "SNUGVL_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_in_shell(code: str, environment: dict[str, str]) -> str:
    """What the commands print."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", CURL + code],
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def case_of(example: Example) -> Any:
    """Three commands of client.md import everything once each: server.md has one of them, and
    `tests/cli/test_server_option.py` and `test_top.py` have all of them in one process."""
    again = example.name.startswith("client.md") and example.language == "sh"
    return pytest.param(example, id=example.name, marks=pytest.mark.extended if again else ())


@pytest.mark.parametrize("example", [case_of(example) for example in all_examples()])
def test_the_example_works(
    example: Example,
    url: str,
    keyed_url: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = example.code.replace(ADDRESS, keyed_url if example.keyed else url)
    key = {"SNUGVL_API_KEY": KEY} if example.keyed else {}
    if example.language == "sh":
        printed = run_in_shell(code, key)
    else:
        assert example.language == "python"
        for name, value in key.items():
            monkeypatch.setenv(name, value)
        exec(compile(code, example.name, "exec"), {"__name__": "__main__"})
        printed = capsys.readouterr().out
    if example.printed is not None:
        assert printed.rstrip("\n") == example.printed.rstrip("\n")


def test_no_marker_is_lost() -> None:
    """A marker whose block is written differently would silently run nothing."""
    marked = sum(path.read_text("utf-8").count("<!-- live") for path in pages())
    assert marked == len(all_examples()) > 15

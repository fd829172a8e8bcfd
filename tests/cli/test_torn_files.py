"""Files that a full disk, or a crash of the machine, left damaged: what Python keeps of code, and records."""

import importlib
import json
import os
import py_compile
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from snugvl.cli import app, running
from snugvl.errors import torn
from tests.command import Ran


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]) -> ModuleType:
    """A module of which the compiled code is damaged."""
    source = folder / "damaged_module.py"
    source.write_text("VALUE = [1, 2, 3]\n", encoding="utf-8")
    compiled = Path(py_compile.compile(str(source), doraise=True))
    compiled.write_bytes(damage(compiled.read_bytes()))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "damaged_module", raising=False)
    return importlib.import_module("damaged_module")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:16] + bytes(len(data) - 16),
        lambda data: data[:16] + b"N" + data[17:],  # which is None, and no code
    ],
)
def test_a_damaged_pyc_is_named(
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was an unexpected error to report, or "interrupted": Typer takes an EOFError for Ctrl+D."""
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises((EOFError, ValueError, ImportError)) as caught:
        imported(tmp_path, monkeypatch, damage)
    why = torn(caught.value)
    assert why is not None
    assert why.startswith(f"{tmp_path}{os.sep}__pycache__{os.sep}damaged_module.")
    assert why.endswith("is damaged; delete it")

    def fail(*args: object) -> NoReturn:
        imported(tmp_path, monkeypatch, damage)
        raise AssertionError

    monkeypatch.setattr(app.config, "defaults", fail)
    assert app.run(["ps"]) == 1
    assert capsys.readouterr().err.lstrip() == f"snugvl: {why}\n"  # Typer ends the line for Ctrl+D


def test_other_errors_are_not_of_a_pyc() -> None:
    assert torn(None) is None
    assert torn(EOFError()) is None
    with pytest.raises(ImportError) as caught:
        importlib.import_module("no_such_module_anywhere")
    assert torn(caught.value) is None


@pytest.mark.parametrize("name", ["pid", "created", "since", "names"])
def test_records_of_servers_that_are_none_hide_no_others(
    name: str, snugvl: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with running.announced("http://127.0.0.1:1", "m", ("m",)):
        (path,) = running.folder().glob("*.json")
        wrong = json.loads(path.read_text(encoding="utf-8")) | {name: {"a": 1}, "host": socket.gethostname()}
        (running.folder() / "1.json").mkdir()
        (running.folder() / "2.json").write_text(json.dumps(wrong | {name: None}), encoding="utf-8")
        assert [server.pid for server in running.running()] == [os.getpid()]
        ran = snugvl("ps")
    assert (ran.code, ran.out.count("http://")) == (0, 1)

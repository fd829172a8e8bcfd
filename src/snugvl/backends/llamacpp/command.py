"""Which llama-server is launched: a user's, the one on the PATH, or that of the wheel xllamacpp.

The wheel has no program; what it has is llama.cpp's server as a library, which `wheel.py` runs in a process
of its own. Nothing is installed.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from snugvl.errors import EngineError

PROGRAM: Final = "llama-server"
WHEEL: Final = "xllamacpp"
MODULE: Final = "snugvl.backends.llamacpp.wheel"
# Of llama.cpp's builds; `-fit` came in December 2025. A release of its own number names its build, too.
OLDEST: Final = 7500
INSTALL: Final = (
    "for a GPU a llama-server in a build for it, on the PATH or named with --llamacpp-command "
    "(docs/gguf.md); for a processor, or a Mac, pip install 'snugvl[llamacpp]'"
)
LOOK_S: Final = 20.0
_BUILD: Final = (re.compile(r"\(build (\d+)"), re.compile(r"version: (\d+) \("))


@dataclass(frozen=True, slots=True)
class LlamacppCommand:
    """The words of the command for `llama-server`, and its version where it could be read.

    Attributes:
        guided: whether it has llguidance for grammars: the wheel has, other builds rarely.
    """

    words: tuple[str, ...]
    version: str = ""
    guided: bool = False


def find(words: Sequence[str] | None) -> LlamacppCommand:
    """The command to launch. Takes up to a second: call it in a thread.

    Raises:
        EngineError: there is none, or it is too old; says what to do.
    """
    if words:
        if shutil.which(words[0]) is None:
            raise EngineError(
                f"--llamacpp-command: there is no program {words[0]!r}; give the path of a llama-server"
            )
        return _program(tuple(words))
    if (path := shutil.which(PROGRAM)) is not None:
        return _program((path,))
    if find_spec(WHEEL) is None:
        raise EngineError(f"llama.cpp is not installed: {INSTALL}")
    version = importlib.metadata.version(WHEEL)
    return LlamacppCommand((sys.executable, "-m", MODULE), f"{WHEEL} {version}", guided=True)


def _program(words: tuple[str, ...]) -> LlamacppCommand:
    """A program that says its version, checked."""
    if words[-2:] == ("-m", MODULE):
        return LlamacppCommand(words, guided=True)
    build = _build(words)
    if build is not None and 1 < build < OLDEST:  # a build without git says 0 or 1
        raise EngineError(
            f"{words[0]} is llama.cpp b{build}; snugvl needs b{OLDEST} or later: update it, or "
            "pip install 'snugvl[llamacpp]'"
        )
    return LlamacppCommand(words, "" if build is None else f"b{build}")


def _build(words: tuple[str, ...]) -> int | None:
    """The number of a build, from its `--version`; None where it doesn't tell."""
    try:
        run = subprocess.run(  # noqa: S603 (what the user asked for)
            [*words, "--version"], capture_output=True, text=True, timeout=LOOK_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = run.stdout + run.stderr
    match = next((found for pattern in _BUILD if (found := pattern.search(said))), None)
    return int(match[1]) if match else None

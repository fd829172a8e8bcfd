"""The choice of a llama.cpp server, to be started or running already, and the one that a plan makes.

Its threads wait for each other by looking again and again, after every operation. By its own choice it has
one for each core of the machine: where our server, or anybody else, has one of the cores now and then, or a
container has a few of many, all others wait as long. On two shared cores two threads were more than ten times
slower than one (`benchmarks/llamacpp_smollm2.py`).

Which llama-server is launched is found here, too: a user's, the one on the PATH, or that of the wheel
xllamacpp, which has llama.cpp's server as a library: `wheel.py` runs it in a process of its own. Nothing is
installed.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from snugvl.backends.child.settings import ChildChoice, Facts, Replan
from snugvl.core.ledger import LedgerRow
from snugvl.core.options import LoadOptions
from snugvl.diagnose.facts import Card
from snugvl.errors import EngineError
from snugvl.hardware import host
from snugvl.inputs.reasoning import PLAIN
from snugvl.planner.commands import visible
from snugvl.planner.engines.llamacpp.rules import llamacpp_arguments
from snugvl.planner.plan import Choice, allocation_of

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
class LlamacppChoice(ChildChoice):
    """A llama-server to launch, or with `attach` one that runs already: see `ChildChoice`.

    `arguments` are those of `llamacpp_flags` (`planner/engines/llamacpp/rules.py`), with the files (`-m`,
    `--mmproj`) first.

    Raises:
        RequestError: settings that contradict each other.
    """

    prefix_cache: bool = True

    def __post_init__(self) -> None:
        self.check("llama.cpp", chosen=False)


FEW: Final = 4  # cores, of which a server's own work is a good part


def llamacpp_choice(
    choice: Choice,
    load: LoadOptions,
    *,
    command: tuple[str, ...] = (),
    retry: bool = True,
    replan: Replan | None = None,
) -> LlamacppChoice:
    """The server of a plan. `command`, `retry`, `replan`: see `ChildChoice`."""
    facts = Facts(
        thinking=replace(PLAIN, said=load.thinking),
        device=choice.budget.name,
        parameters=choice.option.model.parameters,
        gpu_uuids=tuple(gpu.uuid for gpu in choice.gpus if gpu.uuid is not None),
        card=Card(choice.budget.total_bytes, choice.budget.free_bytes),
        plan=allocation_of(choice).running,
    )
    return LlamacppChoice(
        choice.option.model.name,
        arguments_of(choice),
        command=command or None,
        environment=visible(choice),
        facts=facts,
        planned=planned_rows(choice),
        retry=retry,
        replan=replan,
        prefix_cache=load.prefix_cache,
    )


def arguments_of(choice: Choice) -> tuple[str, ...]:
    """The words behind `llama-server`: files and flags, and threads where it would take too many."""
    return (*llamacpp_arguments(choice)[1:], *threads(host.look().cores, os.cpu_count() or 1, sys.platform))


def threads(cores: int, there: int, platform: str) -> tuple[str, ...]:
    """`-t`, one core left to others, where few cores may be used: a small machine, or a part of a larger one.

    Of many it takes what computes best: no second thread of a core, none on slow cores.

    Args:
        cores: that may be used.
        there: of the machine.
    """
    if platform == "darwin" or (cores > FEW and cores == there):
        return ()
    return ("-t", str(max(cores - 1, 1)))


def planned_rows(choice: Choice) -> tuple[LedgerRow, ...]:
    """The plan as rows of the ledger."""
    return tuple(
        LedgerRow(part.name, part.nbytes, kind=part.kind) for part in choice.footprint.counted if part.nbytes
    )


@dataclass(frozen=True, slots=True)
class LlamacppCommand:
    """The words of the command for `llama-server`, and its version where it could be read. `guided`: whether
    it has llguidance for grammars: the wheel has, other builds rarely."""

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

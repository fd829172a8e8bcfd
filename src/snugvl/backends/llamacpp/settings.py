"""The choice of a llama.cpp server, to be started or running already, and the one that a plan makes.

Its threads wait for each other by looking again and again, after every operation. By its own choice it has
one for each core of the machine: where our server, or anybody else, has one of the cores now and then, or a
container has a few of many, all others wait as long. On two shared cores two threads were more than ten times
slower than one (`benchmarks/llamacpp_smollm2.py`).
"""

import os
import sys
from dataclasses import dataclass, replace
from typing import Final

from snugvl.backends.child.settings import ChildChoice, Facts, Replan
from snugvl.core.ledger import LedgerRow
from snugvl.core.options import LoadOptions
from snugvl.diagnose.facts import Card
from snugvl.hardware import host
from snugvl.inputs.reasoning import PLAIN
from snugvl.planner.commands import visible
from snugvl.planner.engines.llamacpp.rules import llamacpp_arguments
from snugvl.planner.plan import Choice, allocation_of


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

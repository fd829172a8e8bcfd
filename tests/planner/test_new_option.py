"""A new option is a row: one that changes no byte, and that our own engine alone can do, needs no line of the
planner."""

from dataclasses import dataclass, field

import pytest

from snugvl.core.options import ROWS, SPECIAL, LoadOptions, OptionRow
from snugvl.errors import RequestError
from snugvl.planner import commands
from snugvl.planner.commands import load_options, next_command
from snugvl.planner.engines import rules_of
from snugvl.planner.plan import Plan
from snugvl.planner.report import document as saved
from snugvl.planner.report.document import document
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes, wishes_of
from tests.planner.machines import GIB, machine
from tests.planner.models import qwen3_vl

NAP = OptionRow(
    "Sleep so long between two steps.", frozenset(("load", "serve", "plan")), least=0, special="all"
)
MACHINE = machine(24 * GIB)


@dataclass(frozen=True, slots=True)
class Napping(LoadOptions):
    """Options with one more."""

    nap: int = field(default=0, metadata={"row": NAP})


@pytest.fixture(autouse=True)
def _nap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "nap", NAP)
    for module in (commands, saved):
        monkeypatch.setattr(module, "LoadOptions", Napping)
    monkeypatch.setattr(type(rules_of("native")), "honours", SPECIAL | {"nap"})


def planned(**said: object) -> Plan:
    wishes = wishes_of(Napping("x", **said), sees=True)  # type: ignore[arg-type]
    return solve([Candidate(qwen3_vl("2B"))], MACHINE, wishes)


def test_it_excludes_engines_that_can_not_do_it_by_name() -> None:
    plan = planned(nap=3)
    assert plan.choice is not None
    assert plan.choice.option.engine == "native"
    why = {refusal.engine: refusal.text for refusal in plan.refusals}
    assert why["vllm"] == why["transformers"] == "--nap 3 is for snugvl's own engine alone"
    assert not {"vllm", "transformers"} & {each.engine for each in planned().refusals}
    with pytest.raises(
        RequestError, match=r"--nap 3 is not for vLLM \(--backend vllm\); say --backend native"
    ) as error:
        planned(nap=3, backend="vllm")
    assert error.value.field == "nap"


def test_it_changes_no_byte() -> None:
    plan, plain = planned(nap=3), planned()
    assert plan.choice is not None
    assert plain.choice is not None
    assert plan.choice.settings == plain.choice.settings
    assert plan.choice.footprint == plain.choice.footprint


def test_it_is_in_the_printed_command_and_in_a_saved_plan() -> None:
    plan, plain = planned(nap=3, context=4096), planned()
    assert plan.choice is not None
    assert next_command(plan.choice, plan.wishes).endswith("--context 4096 --nap 3")
    task = wishes_of(Napping("x", nap=3), sees=True, task="ask")
    assert " --nap 3 " in next_command(plan.choice, task), "a task has it, too"
    assert task.said() == {"nap": 3, "task": "ask"}
    written = document(plan, MACHINE)
    assert written["load"] == {"context": 4096, "nap": 3}
    assert written["wishes"]["nap"] == 3
    assert not {"nap", "also"} & document(plain, MACHINE)["wishes"].keys()


def test_who_plans_again_still_asks_for_it() -> None:
    plan = planned(nap=3)
    assert plan.choice is not None
    again = wishes_of(load_options(plan.choice, plan.wishes), sees=True)
    assert again == plan.wishes
    assert again.without("nap") == Wishes() == planned().wishes


def test_a_number_that_is_too_small_is_refused_wherever_it_was_said() -> None:
    with pytest.raises(RequestError, match="nap must be at least 0, not -1") as error:
        Napping(nap=-1)
    assert error.value.field == "nap"
    with pytest.raises(RequestError, match="max_waiting must be at least 1, not 0"):
        LoadOptions(max_waiting=0)

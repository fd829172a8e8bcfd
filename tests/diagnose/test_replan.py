"""The values that a diagnosis changes are the planner's, for the machine and the model of the log."""

import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.cli.app import run
from snugvl.core.sizes import GIB, MIB
from snugvl.diagnose import replan
from snugvl.diagnose.explain import explain, explain_file
from snugvl.diagnose.facts import KnownModel
from snugvl.hardware.calibration import estimate_of
from snugvl.hardware.describe import describe
from snugvl.planner.engines.vllm.rules import utilisation, vllm_flags
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes

LOGS = Path(__file__).parent / "logs"
CONTEXT = estimate_of((12, 0))


def planned(repo: str, total: int, free: int, os: str, wishes: Wishes, gpu: str | None = None) -> Choice:
    """The planner's choice for one GPU."""
    facts = catalogue_facts(repo)
    assert facts is not None
    machine = describe(gpu, vram=total, held=total - free, ram="16GiB", os=os)
    choice = solve([Candidate(facts)], machine, wishes).choice
    assert choice is not None
    return choice


def test_the_changed_command_is_the_plan() -> None:
    """vLLM says what is free once its context is there; the plan starts before it."""
    total, free = round(7.96 * GIB), round(6.83 * GIB) + CONTEXT
    wishes = Wishes(context=8192, backend="vllm")
    choice = planned("Qwen/Qwen3-VL-4B-Instruct-FP8", total, free, "wsl2", wishes)
    found = explain_file(LOGS / "vllm033_q4bfp8_overfree_5060_wsl2.log")
    assert found.command is not None
    words = shlex.split(found.command)
    flags = vllm_flags(choice)
    assert {word for word in words if word.startswith("--")} == {word for word in flags if word[:2] == "--"}
    for flag, value in itertools.pairwise(flags):
        if not flag.startswith("--") or value.startswith("--"):
            continue
        if flag == "--gpu-memory-utilization":
            assert float(words[words.index(flag) + 1]) == float(value)
        else:
            assert words[words.index(flag) + 1] == value


def test_wishes_of_the_command_are_kept() -> None:
    wishes = Wishes(max_pixels=1048576, backend="vllm")
    choice = planned("Qwen/Qwen3-VL-2B-Instruct", 8188 * MIB, 7778 * MIB, "linux", wishes, "rtx-4060")
    found = explain_file(LOGS / "vllm033_q2b_context_4060.log")
    changed = {change.flag: change.new for change in found.changes}
    assert changed["--max-model-len"] == str(choice.settings.context)
    assert changed["--gpu-memory-utilization"] == f"{utilisation(choice):g}"
    assert "--mm-processor-kwargs" not in changed


def test_what_was_loaded_twice_is_not_planned_with() -> None:
    """A head that is loaded although it is tied takes memory from images and context."""
    path = LOGS / "vllm033_q4bfp8_5060_wsl2.log"
    text = path.read_text(encoding="utf-8")
    pixels = []
    for loaded in ("5.21", "5.40"):
        changes = {change.flag: change.new for change in explain(text.replace("5.21", loaded)).changes}
        pixels.append(json.loads(changes["--mm-processor-kwargs"] or "")["max_pixels"])
        assert changes["--gpu-memory-utilization"] == "0.7397"
    assert pixels[0] >= pixels[1]


def test_without_the_models_figures_vllms_own_estimate_counts() -> None:
    found = explain_file(LOGS / "vllm010_llama31_context_3090.log")
    changed = {change.flag: change.new for change in found.changes}
    assert changed == {"--max-model-len": "42496"}


@pytest.mark.parametrize(
    ("repo", "cache"), [("Qwen/Qwen2.5-VL-3B-Instruct", None), ("Qwen/Qwen3-VL-2B-Instruct", "fp8")]
)
def test_a_cache_in_fp8_is_planned_where_keys_are_normed(repo: str, cache: str | None) -> None:
    """For others no plan has it, and the diagnosis would end without one."""
    facts = catalogue_facts(repo)
    assert facts is not None
    asked = {"--kv-cache-dtype": "fp8", "--max-model-len": "8192"}
    command = SimpleNamespace(get=asked.get, has=asked.__contains__)
    run_facts: Any = SimpleNamespace(command=command, known=KnownModel(repo, True, inventory(facts), 0))
    assert {each.kv_cache for each in replan._wishes(run_facts, None)} == {cache}


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_every_command_of_ours_works_as_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`snugvl …` in a diagnosis ends with exit code 0."""
    found = explain_file(path)
    for text in (*found.notes, found.advice):
        for command in text.split("`")[1::2]:
            if command.startswith("snugvl ") and command != "snugvl plan":  # that plans for this machine
                assert run(shlex.split(command)[1:]) == 0, f"{command}: {capsys.readouterr().err}"

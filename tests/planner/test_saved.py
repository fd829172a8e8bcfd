"""A plan in a file: what is saved is what runs, and what is no plan is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.cli.app import run
from snugvl.core.options import LoadOptions
from snugvl.errors import InputError
from snugvl.planner.report.document import read
from snugvl.planner.solve import Candidate, held_to, require, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, machine
from tests.planner.models import qwen3_vl

MODEL = "Qwen/Qwen3-VL-4B-Instruct-FP8"
CARD = ("--gpu", "rtx-5060", "--os", "wsl2", "--held", "951MiB", "--offline")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What `snugvl plan --save` writes."""
    path = tmp_path_factory.mktemp("plan") / "plans" / "plan.json"
    assert run(["plan", MODEL, *CARD, "--for", "documents", "--save", str(path)]) == 0
    return path.read_bytes()


@pytest.fixture
def saved(written: bytes, tmp_path: Path) -> Path:
    """A saved plan as a file that the test may change."""
    path = tmp_path / "plan.json"
    path.write_bytes(written)
    return path


def test_every_setting_comes_back(saved: Path) -> None:
    found = read(saved)
    assert found.model == MODEL
    assert found.settings._asdict() == json.loads(saved.read_text())["choice"]["settings"]
    load = found.over(LoadOptions("", trust_remote_code=True))
    assert (load.model, load.purpose, load.trust_remote_code) == (MODEL, "documents", True)
    with pytest.raises(InputError, match=f"the saved plan is for {MODEL}, not for pocket"):
        found.over(LoadOptions("pocket"))


def test_it_runs_where_it_fits_and_says_where_it_does_not(saved: Path) -> None:
    """Whatever the solver would choose on a card with more memory."""
    candidate, settings = Candidate(qwen3_vl("4B", fp8=True)), read(saved).settings
    roomy = machine(24 * GIB)
    kept = held_to(solve([candidate], roomy, Wishes()), candidate, roomy, settings)
    assert require(kept).settings == settings.with_host_memory(page_locked=True) != settings
    assert not kept.changed
    tight = machine(6 * GIB)
    other = held_to(solve([candidate], tight, Wishes()), candidate, tight, settings)
    assert require(other).settings != settings
    assert "doesn't fit what is free now" in other.changed


def test_a_plan_of_linux_has_no_graphs_around_experts_that_wsl2_does_not_lock() -> None:
    facts = catalogue_facts("Qwen/Qwen3-VL-30B-A3B-Instruct")
    assert facts is not None
    candidate, card = Candidate(facts), replace(machine(12 * GIB), ram_free_bytes=32 * GIB)
    wishes = Wishes(backend="native", experts="cpu", weights="int4")
    settings = require(solve([candidate], card, wishes)).settings
    assert settings.page_locked
    assert not settings.eager
    there = replace(card, os="wsl2")
    kept = require(held_to(solve([candidate], there, wishes), candidate, there, settings)).settings
    assert (kept.page_locked, kept.eager) == (False, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "can't be read: No such file"),
        ("{", "holds no plan with a choice; make one: snugvl plan MODEL --save"),
        ([1], "holds no plan with a choice"),
        ("[" * 100_000, "holds no plan with a choice"),
        ('{"choice": ' * 50_000 + "1" + "}" * 50_000, "holds no plan with a choice"),
        ({"choice": None}, "holds no plan with a choice"),
        ({"context": -5}, "setting context can't be -5"),
        ({"context": "long"}, "setting context can't be 'long'"),
        ({"context": True}, "setting context can't be True"),
        ({"weights": "int3"}, "setting weights can't be 'int3'"),
        ({"eager": 1}, "setting eager can't be 1"),
        ({"colour": "red"}, "settings colour, which this version doesn't know"),
    ],
    ids=range(12),
)
def test_what_is_no_plan_is_refused_by_name(saved: Path, change: Any, words: str) -> None:
    if change is None:
        saved.unlink()
    elif not isinstance(change, dict) or "choice" in change:
        saved.write_text(change if isinstance(change, str) else json.dumps(change))
    else:
        values = json.loads(saved.read_text())
        values["choice"]["settings"] |= change
        saved.write_text(json.dumps(values))
    with pytest.raises(InputError) as refused:
        read(saved)
    assert words in str(refused.value)
    assert str(saved) in str(refused.value)

"""Reports: the bar adds up, nothing is lost between the forms, the picture is well-formed."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.core.formats import FORMATS
from snugvl.core.memory_kinds import shares
from snugvl.hardware.describe import describe
from snugvl.planner.plan import Plan
from snugvl.planner.report.document import SCHEMA_VERSION, document
from snugvl.planner.report.plain import bar, plain, show
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, MIB, rtx_5060
from tests.planner.models import qwen3_vl


def plan_of(size: str, held_bytes: int = 951 * MIB) -> Plan:
    return solve([Candidate(qwen3_vl(size, fp8=True))], rtx_5060(held_bytes), Wishes())


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_the_rows_are_the_card(size: str) -> None:
    plan = plan_of(size)
    found = report(plan, rtx_5060())
    missing = found.used_bytes - found.usable_bytes
    assert sum(row.nbytes for row in found.rows) == found.total_bytes + max(0, missing)
    assert len(bar(found.rows, 50)) == 50
    assert sum(shares([row.nbytes for row in found.rows], 33)) == 33


def test_plain_text_says_everything() -> None:
    text = plain(report(plan_of("4B"), rtx_5060()))
    assert text.startswith(
        "Qwen/Qwen3-VL-4B-Instruct-FP8 fits Test GPU (7.96 GiB, WSL2), with snugvl's own engine\n"
    )
    for words in (
        "held by others",
        "951 MiB",
        "weights: decoder",
        "snugvl serve",
        "fp8",
        "Why not",
        "computed: nobody has measured this card",
    ):
        assert words in text
    assert "\x1b" not in text


def test_what_does_not_fit_says_so_first() -> None:
    found = report(plan_of("8B", 2600 * MIB), rtx_5060(2600 * MIB))
    assert not found.fits
    assert not found.commands
    assert "does not fit" in found.headline
    assert found.headline.endswith("too much")
    assert found.steps[0].remark.startswith("Way out: ")


def test_what_few_bits_cost_is_said_where_they_are_chosen() -> None:
    """With the figures that were measured; an int4 checkpoint was made by somebody else."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    written = {
        "pocket": json.loads((results / "pocket/format_error.json").read_text())["formats"],
        "Qwen2.5-Coder-1.5B": json.loads((results / "coder/format_cost.json").read_text())["formats"],
        "SmolLM2-135M": json.loads((results / "smollm2/format_cost.json").read_text())["formats"],
    }
    groups = {name: f"int4, groups of {64 if name == 'SmolLM2-135M' else 128}" for name in written}
    for kind, form in FORMATS.items():
        for model, kl in form.measured.items():
            row = written[model][groups[model] if kind == "int4" else kind]
            assert kl == pytest.approx(row["kl_nats"], rel=0.05, abs=5e-6), (kind, model)
    for size, weights in (("8B", "int4"), ("4B", "fp8")):
        plan = plan_of(size)
        assert plan.choice is not None
        assert plan.choice.settings.weights == weights
        notes = [note for note in report(plan, rtx_5060()).notes if "answers differ" in note]
        assert len(notes) == (weights == "int4")
        figures = report(plan, rtx_5060()).figures
        assert bool(figures) == (weights == "int4")
        assert all(
            f"{kl:.2g} on {model}" in figures[0] for model, kl in FORMATS["int4"].measured.items() if figures
        )
        assert "nats" not in plain(report(plan, rtx_5060()), verbose=False)
        assert ("nats" in plain(report(plan, rtx_5060()))) == (weights == "int4")
        copies = [note for note in report(plan, rtx_5060()).notes if ": snugvl quantize " in note]
        assert len(copies) == len(notes)
        assert all("Qwen/Qwen3-VL-8B" in note and "--bits 4.75" in note for note in copies)
    ways = json.loads((results / "smollm2/quantized.json").read_text())["ways"]
    loaded = {
        "int4": "`--weights int4` in groups of 64, while loading",
        "int5": "`--weights int5`, while loading",
    }
    for kind, (bits, before, after) in (
        (kind, form.written) for kind, form in FORMATS.items() if form.written
    ):
        assert before == pytest.approx(ways[loaded[kind]]["kl_nats"], rel=0.005)
        written = ways[f"`--bits {bits:g} --with texts/`"]
        assert after == pytest.approx(written["kl_nats"], rel=0.005)
    finer = solve([Candidate(qwen3_vl("8B", fp8=True))], rtx_5060(951 * MIB), Wishes(quality="int5"))
    assert finer.choice is None or finer.choice.settings.weights != "int4"


def test_a_terminal_gets_the_same_lines() -> None:
    out = io.StringIO()
    found = report(plan_of("4B"), rtx_5060())
    show(found, out)
    text = out.getvalue()
    assert found.headline in text
    assert all(command in text for command in found.commands)
    for row in found.rows:
        assert row.label in text


def test_measured_figures_stand_beside_the_planned_ones() -> None:
    found = report(plan_of("4B"), rtx_5060(), lambda choice, name: 7 * MIB if name == "KV cache" else None)
    text = plain(found)
    assert "planned   measured" in text
    assert "7 MiB" in next(line for line in text.splitlines() if "KV cache" in line)
    assert "  measured" not in plain(report(plan_of("4B"), rtx_5060()))


@pytest.mark.parametrize("size", ["4B", "8B"])
def test_json_is_complete_and_versioned(size: str) -> None:
    plan = plan_of(size)
    values = json.loads(json.dumps(document(plan, rtx_5060())))
    assert values["schema"] == SCHEMA_VERSION
    shown = values["choice"] or values["closest"]
    always = sum(part["bytes"] for part in shown["components"] if part["phase"] == "always")
    peak = sum(part["bytes"] for part in shown["components"] if part["phase"] == shown["peak_phase"])
    assert always + peak == shown["total_bytes"]
    budget = values["budget"]
    assert budget["usable_bytes"] + budget["margin_bytes"] + budget["held_bytes"] == budget["total_bytes"]
    assert values["fits"] == (values["command"] is not None)


def test_a_full_disk_and_short_host_memory_are_said() -> None:
    """A recording of a machine without room on its disk was told how much the download needs alone."""
    card = describe("rtx-3060", ram="32GiB")
    full = replace(card, source="recorded", disk_free_bytes=3 * GIB, ram_free_bytes=500 * MIB)
    for on, said in ((card, False), (full, True)):
        plan = solve([Candidate(qwen3_vl("4B", fp8=True))], on, Wishes())
        text = plain(report(plan, on, pull=True), verbose=False)
        assert ("only 3.00 GiB free on its disk: make room" in text) is said
        assert ("500 MiB are free, and the engine's process takes about 1.00 GiB beside" in text) is said

"""An embedding in host memory: what it frees, when a plan takes it, and where it can't be."""

from dataclasses import replace
from typing import Any

import pytest

import snugvl
from snugvl.backends.native.planned import planned_rows
from snugvl.errors import DoesNotFit, RequestError
from snugvl.planner.capabilities import Parts
from snugvl.planner.engines.native.rules import host_memory_bytes, parts_of
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import part_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.backends.native.test_allocation import gpu, made
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.models import qwen3_vl, text_only

FACTS = qwen3_vl("8B")
MODEL = inventory(FACTS)
LARGE = Candidate(FACTS)
CARD = Device(450 * MIB, compute_capability=(12, 0), host_bytes=16 * GIB)


def test_it_frees_its_bytes_and_nothing_else() -> None:
    on_gpu = Settings("native", "int4", "int8", max_pixels=1 << 20)
    beside = on_gpu._replace(embedding="cpu")
    parts = [
        {part.name: part.nbytes for part in footprint(MODEL, way, CARD).components}
        for way in (on_gpu, beside)
    ]
    assert parts[0]["weights: embedding"] == part_bytes(MODEL, beside, "embedding") == 151_936 * (4096 + 64)
    assert "weights: embedding" not in parts[1]
    differ = {name for name in parts[0] if parts[0][name] != parts[1].get(name)}
    assert differ <= {"weights: embedding", "allocator rounding"}


def test_it_comes_before_any_coarser_format_and_after_everything_on_the_gpu() -> None:
    found = parts_of(MODEL, CARD)
    assert isinstance(found, tuple)
    assert found[:4] == (
        Parts(),
        Parts(embedding="cpu"),
        Parts("int8", embedding="cpu"),
        Parts("int8", "int8", embedding="cpu"),
    )
    assert {(each.vision, each.embedding) for each in found[4:]} == {("streamed", "cpu")}


def test_a_head_that_is_the_embedding_stays_whole() -> None:
    found = parts_of(inventory(qwen3_vl("4B")), CARD)
    assert {each.embedding for each in found if isinstance(each, Parts)} == {"gpu"}
    plan = solve([Candidate(qwen3_vl("4B"))], machine(24 * GIB), Wishes(backend="native", embedding="cpu"))
    assert [refusal.text for refusal in plan.refusals] == [
        "the embedding can't be apart in host memory: it is lm_head as well, read whole for every token"
    ]


def test_a_text_model_has_it_too() -> None:
    found = parts_of(inventory(text_only(FACTS)), CARD)
    assert found == (Parts(), Parts(embedding="cpu"), Parts("int8", embedding="cpu"))


def test_more_memory_than_a_machine_has_is_not_planned() -> None:
    """1.16 GiB in bf16, 603 MiB in int8."""
    some = parts_of(MODEL, replace(CARD, host_bytes=700 * MIB))
    assert [each for each in some if isinstance(each, Parts)][:3] == [
        Parts(),
        Parts("int8", embedding="cpu"),
        Parts("int8", "int8", embedding="cpu"),
    ]
    none = parts_of(MODEL, replace(CARD, host_bytes=500 * MIB))
    assert isinstance(none, tuple)
    assert {each.embedding for each in none} == {"gpu"}
    assert Parts("int8") in none
    for room in ({"host_bytes": 500 * MIB}, {"pinned_bytes": 500 * MIB}):
        why = parts_of(MODEL, replace(CARD, **room), embedding="cpu")
        assert why == (
            "the embedding can't be in host memory: it takes 603 MiB of host memory, of which 500 MiB may be "
            "used"
        )
    both = parts_of(MODEL, replace(CARD, host_bytes=GIB), "streamed", "cpu")
    assert both == (
        "the vision tower can't be streamed, and the embedding can't be in host memory: it takes 1.14 GiB "
        "of host memory, of which 1.00 GiB may be used"
    )
    assert host_memory_bytes(Parts("int8", "int8", "streamed", "cpu"), MODEL) == pytest.approx(
        1.14 * GIB, rel=0.01
    )


def test_a_plan_takes_it_where_it_makes_room_and_says_so() -> None:
    on = machine(7200 * MIB)
    plan, whole = (solve([LARGE], on, Wishes(embedding=place)) for place in ("auto", "gpu"))  # type: ignore[arg-type]
    choice, before = require(plan), require(whole)
    assert (choice.settings.embedding, before.settings.embedding) == ("cpu", "gpu")
    assert choice.score > before.score
    written = report(plan, on)
    assert "the embedding stays in host memory (" in plain(written)
    assert "--embedding" not in written.commands[-1], "the same plan comes of the same words"
    assert "--embedding gpu" in report(whole, on).commands[-1]
    assert require(solve([LARGE], machine(48 * GIB), Wishes())).settings.embedding == "gpu"


ASKED = Wishes(context=8192, max_pixels=1 << 20, weights="bf16", kv_cache="bf16")


def test_a_format_that_is_asked_for_stays_where_host_memory_makes_room() -> None:
    choice = require(solve([LARGE], machine(96 * GIB), ASKED))
    assert (choice.settings.weights_name, choice.settings.embedding) == ("bf16", "gpu")
    needed = choice.footprint.total_bytes
    pool = choice.footprint.named("KV cache")
    tight = machine((needed - pool + (1200 << 20)) * 100 // 97 - 700 * MIB)
    choice = require(solve([LARGE], tight, ASKED))
    assert (choice.settings.weights, choice.settings.embedding) == ("bf16", "cpu")


def test_under_wsl2_it_comes_for_who_asks_alone() -> None:
    plan = solve([LARGE], rtx_5060(), Wishes())
    assert require(plan).settings.embedding == "gpu"
    assert "--embedding cpu would free 603 MiB more" in plain(report(plan, rtx_5060()))
    wished = require(solve([LARGE], rtx_5060(), Wishes(embedding="cpu")))
    assert wished.settings.embedding == "cpu"
    assert wished.settings.context > require(plan).settings.context
    assert "would free" not in plain(report(solve([LARGE], rtx_5060(), Wishes(embedding="gpu")), rtx_5060()))


def test_other_engines_and_a_cpu_say_why_not() -> None:
    plan = solve([LARGE], machine(48 * GIB), Wishes(embedding="cpu"))
    assert require(plan).settings.embedding == "cpu"
    assert {each.text for each in plan.verdicts if each.engine != "llamacpp"} == {
        "--embedding cpu is for snugvl's own engine alone"
    }
    without = replace(machine(48 * GIB), gpus=())
    refused = solve([LARGE], without, Wishes(embedding="cpu", backend="native"))
    assert "there is no GPU to read it" in refused.refusals[0].text


def test_an_engine_allocates_it() -> None:
    tight = gpu(6140 * MIB)
    found = made(FACTS, tight)
    assert (found.settings.embedding, found.settings.vision) == ("cpu", "gpu")
    rows = planned_rows(found, inventory(FACTS))
    assert rows["text weights"] < planned_rows(made(FACTS, tight, embedding="gpu"), inventory(FACTS))[
        "text weights"
    ] - (500 * MIB)
    scarce = replace(tight, pinned_bytes=8 * GIB)
    assert made(FACTS, scarce).settings.embedding == "gpu"
    assert made(FACTS, scarce, embedding="cpu").settings.embedding == "cpu"
    with pytest.raises(DoesNotFit, match="does not fit a GPU"):
        made(FACTS, gpu(4 * GIB), embedding="cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"embedding": "cloud"}, "embedding 'cloud' is unknown; use auto, gpu, cpu"),
        ({"embedding": "cpu", "device": "cpu"}, "there is no GPU to read it"),
        (
            {"embedding": "cpu", "backend": "transformers"},
            '^embedding="cpu" is not for transformers; say backend="native",',
        ),
    ],
)
def test_load_refuses_what_can_not_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        snugvl.load("pocket", **arguments)

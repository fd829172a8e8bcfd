"""A tower that streams: its bytes as the network has them, its price, and when a plan takes it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import snugvl
from snugvl.backends.native import loading
from snugvl.backends.native.planned import planned_rows
from snugvl.checkpoint.architecture import VisionConfig
from snugvl.checkpoint.read import facts_of
from snugvl.errors import DoesNotFit, RequestError
from snugvl.layers.linear import Linear
from snugvl.models import loader
from snugvl.models.host_memory import WeightStream, room_bytes, unit_bytes
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.models.vision import VisionTower
from snugvl.planner.commands import next_command
from snugvl.planner.footprint.total import footprint
from snugvl.planner.footprint.weights import crossing_bytes, part_bytes, streaming_sizes
from snugvl.planner.inventory import inventory
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.speed import ASSUMED_LINK, tower_crossing_s
from snugvl.planner.wishes import Wishes
from tests.backends.native.test_allocation import gpu, made
from tests.models.test_weight_stream import LateCopies
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.models import qwen3_vl, text_only

POCKET = Path(snugvl.__file__).parent / "pocket"
BF16 = torch.bfloat16
SMALL = VisionConfig(24, 1024, 4096, 16, 3, 16, 2, 2, 2048, 2304, (5, 11, 17), "gelu_pytorch_tanh", 1e4)
LARGE = VisionConfig(27, 1152, 4304, 16, 3, 16, 2, 2, 4096, 2304, (8, 16, 24), "gelu_pytorch_tanh", 1e4)
TOWERS = {"2B": SMALL, "4B": replace(SMALL, out_hidden_size=2560), "8B": LARGE}
FACTS = Candidate(qwen3_vl("8B"))
STREAMED = Settings("native", "int4", "int8", vision="streamed")


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("size", TOWERS)
def test_the_plan_has_the_networks_bytes(size: str, form: Literal["bf16", "int8"]) -> None:
    with torch.device("meta"):
        tower = VisionTower(TOWERS[size]).to(BF16)
    for module in tower.modules():
        if isinstance(module, Linear):
            module.store_as(form, module.columns if module.columns % 128 else 128)
    model, wanted = inventory(qwen3_vl(size)), STREAMED._replace(vision_weights=form)
    sizes = [unit_bytes(unit) for unit in tower.units]
    assert crossing_bytes(model, wanted) == sum(sizes)
    on_gpu = streaming_sizes(model, wanted)
    assert on_gpu[-1] == (room_bytes(tower.units, sizes), 1)
    beside = (*tower.patch_embed.parameters(), *tower.pos_embed.parameters())
    assert sorted(size for size, _ in on_gpu[:-1]) == sorted(part.nbytes for part in beside)
    assert sum(size for size, _ in on_gpu) < part_bytes(model, wanted, "vision") / 6


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_what_is_loaded_is_what_was_planned(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CopyStream", LateCopies)
    wanted = Settings("native", "bf16", vision_weights=form, vision="streamed")
    storage = loading.storage_of(wanted)
    assert storage == Storage("bf16", "bf16", tower=form, streamed="pinned")
    assert loading.storage_of(wanted.with_host_memory(page_locked=False)).streamed == "plain"
    tower = load_model(POCKET, dtype=BF16, device=torch.device("cpu"), storage=storage).tower
    assert tower is not None
    model = inventory(facts_of(str(POCKET), offline=True))
    assert sum(size for size, _ in streaming_sizes(model, wanted)) == tensor_bytes(tower)
    assert isinstance(tower.weights, WeightStream)
    assert sum(len(each) for each in tower.weights.host) == crossing_bytes(model, wanted)


def test_only_the_weights_shrink() -> None:
    on = machine(8 * GIB)
    resident = STREAMED._replace(vision="gpu")
    choice = require(solve([Candidate(qwen3_vl("2B"))], on, Wishes()))
    parts = [
        {
            part.name: part.nbytes
            for part in footprint(choice.option.model, way, choice.budget.device).components
        }
        for way in (resident, STREAMED)
    ]
    differ = {name for name in parts[0] if parts[0][name] != parts[1].get(name)}
    assert differ <= {"weights: vision tower", "allocator rounding"}


def test_it_is_on_the_gpu_where_that_costs_no_images_and_no_context() -> None:
    on = rtx_5060(800 * MIB)
    plan = solve([FACTS], on, Wishes())
    assert require(plan).settings.vision == "gpu"
    assert plan.other_tower is not None
    assert plan.other_tower.settings.context > require(plan).settings.context
    assert plan.other_tower == solve([FACTS], on, Wishes(tower="streamed")).choice, "it was tried"
    words = plain(report(plan, on))
    assert "--tower streamed" in words
    assert "every picture waits at least 73 ms for it to cross PCI Express at 15.8 GB/s (assumed)" in words


def test_it_streams_where_nothing_else_fits_and_says_the_price() -> None:
    on = machine(6200 * MIB)
    plan = solve([FACTS], on, Wishes(embedding="gpu"))
    choice = require(plan)
    assert choice.settings.vision == "streamed"
    assert plan.other_tower is None
    words = plain(report(plan, on))
    assert "stay in host memory; every picture waits at least" in words
    assert "--tower" not in report(plan, on).commands[-1], "the same plan comes of the same words"
    assert require(solve([FACTS], on, Wishes(tower="resident", embedding="gpu"))).option.offload


@pytest.mark.parametrize(
    ("facts", "wishes"),
    [
        (FACTS, Wishes()),
        (FACTS, Wishes(purpose="documents")),
        (FACTS, Wishes(concurrency=2)),
        (Candidate(facts_of("Qwen/Qwen2.5-VL-7B-Instruct", offline=True)), Wishes(context=32768)),
        (Candidate(facts_of("Qwen/Qwen3.5-9B", offline=True)), Wishes(concurrency=2)),
    ],
    ids=["8B", "documents", "two at once", "7B in a long context", "hybrid"],
)
@pytest.mark.sample("hybrid", "two at once")
def test_it_comes_back_with_no_smaller_images_and_no_shorter_context(
    facts: Candidate, wishes: Wishes
) -> None:
    """Once 8 GiB gave Qwen2.5-VL-7B images of 4,096 tokens, streamed, and 8.3 GiB 256 tokens."""
    plans = [solve([facts], machine(size * MIB), wishes) for size in range(5400, 9000, 200)]
    whole = [plan for plan in plans if plan.choice is not None and not plan.choice.option.offload]
    choices = [require(plan) for plan in whole]
    assert {choice.settings.vision for choice in choices} == {"streamed", "gpu"}
    assert any(plan.other_tower and not plan.other_tower.option.streams for plan in whole), "where both fit"
    for small, large in pairwise(choices):
        if small.settings.weights == large.settings.weights:
            assert (large.tokens, large.settings.context) >= (small.tokens, small.settings.context)
            assert large.settings.context >= small.settings.context


def test_who_wants_it_on_the_gpu_is_told_what_fits_there() -> None:
    on = rtx_5060()
    plan = solve([FACTS], on, Wishes())
    kept = solve([FACTS], on, Wishes(tower="resident")).choice
    assert require(plan).settings.vision == "streamed"
    assert kept is not None
    assert plan.other_tower == kept
    said = " ".join(plain(report(plan, on)).split())
    assert (
        "With its vision tower on the GPU (--tower resident) Qwen/Qwen3-VL-8B-Instruct fits in "
        f"{kept.settings.weights_name} with a context of {kept.settings.context:,} tokens and images of "
        f"{kept.tokens:,} tokens; no picture waits for it then." in said
    )
    told = document(plan, on)
    assert told["streamed"] is None
    assert told["resident"]["settings"]["vision"] == "gpu"


def test_host_memory_must_hold_it() -> None:
    """The 8B's tower in int8 beside a process of 1 GiB and the margin of 0.5."""
    small = replace(machine(6200 * MIB), ram_total_bytes=4 * GIB, ram_free_bytes=int(1.9 * GIB))
    plan = solve([FACTS], small, Wishes(backend="native", embedding="gpu"))
    assert plan.choice is None
    wished = solve([FACTS], small, Wishes(backend="native", tower="streamed"))
    assert [refusal.text for refusal in wished.refusals] == [
        "the vision tower can't be streamed: it takes 561 MiB of host memory, of which 410 MiB may be used"
    ]
    enough = replace(small, ram_free_bytes=3 * GIB)
    fits = require(solve([FACTS], enough, Wishes(backend="native", embedding="gpu")))
    assert fits.settings.vision == "streamed"


def test_nobody_is_led_to_it() -> None:
    candidates = [Candidate(qwen3_vl("2B"), 0), Candidate(qwen3_vl("8B"), 1)]
    on = machine(6200 * MIB)
    assert require(solve(candidates, on, Wishes())).option.model.name == candidates[0].facts.name
    tight = [Candidate(qwen3_vl("8B", fp8=True), 0), candidates[1]]
    led = require(solve(tight, rtx_5060(1300 * MIB), Wishes()))
    assert (led.option.model.name, led.settings.vision) == (tight[1].facts.name, "gpu")
    command = next_command(led, Wishes())
    assert "--tower resident" in command, "by its name it streams"
    wished = require(solve(candidates, on, Wishes(tower="streamed")))
    assert (wished.option.model.name, wished.settings.vision) == (candidates[1].facts.name, "streamed")


def test_a_wish_is_obeyed_and_other_engines_say_why_not() -> None:
    plan = solve([Candidate(qwen3_vl("2B"))], machine(24 * GIB), Wishes(tower="streamed"))
    choice = require(plan)
    assert (choice.settings.vision, choice.settings.weights_name) == ("streamed", "bf16")
    others = {each.text for each in plan.verdicts if each.engine != "llamacpp"}
    assert others == {"--tower streamed is for snugvl's own engine alone"}


@pytest.mark.parametrize(
    ("facts", "on", "words"),
    [
        (text_only(qwen3_vl("2B")), machine(24 * GIB), "can't be streamed: the model has none"),
        (qwen3_vl("2B"), replace(machine(24 * GIB), gpus=()), "there is no GPU to stream it to"),
    ],
)
def test_what_can_not_stream_says_so(facts: Any, on: Any, words: str) -> None:
    plan = solve([Candidate(facts)], on, Wishes(images=0, tower="streamed"))
    assert plan.choice is None
    assert any(words in refusal.text for refusal in plan.refusals)


def test_a_tower_left_out_can_not_stream() -> None:
    with pytest.raises(RequestError, match="none to stream"):
        Wishes(images=0, language_only=True, tower="streamed")


def test_the_price_follows_the_slot() -> None:
    model = inventory(qwen3_vl("8B"))
    card = machine(8 * GIB).gpus[0]
    crossing = crossing_bytes(model, STREAMED)
    assert tower_crossing_s(model, STREAMED, card) == crossing / ASSUMED_LINK
    assert tower_crossing_s(model, STREAMED, replace(card, link_bandwidth=63e9)) == crossing / 63e9
    assert tower_crossing_s(model, STREAMED._replace(vision="gpu"), card) == 0
    assert tower_crossing_s(model, STREAMED._replace(language_only=True), card) == 0


def test_more_memory_never_gives_less() -> None:
    sizes = (5200, 5800, 6200, 6800, 7200, 9000)
    choices = [solve([FACTS], machine(size * MIB), Wishes()).choice for size in sizes]
    scores = [choice.score for choice in choices if choice is not None]
    assert scores == sorted(scores)
    places = [
        choice.settings.vision for choice in choices if choice is not None and not choice.option.offload
    ]
    assert places == sorted(places, reverse=True)
    assert {*places} == {"streamed", "gpu"}
    assert all(choice is None or choice.spare_bytes >= 0 for choice in choices)


def test_an_engine_allocates_it_last_or_as_wished() -> None:
    facts = qwen3_vl("8B")
    roomy, tight = gpu(8 * GIB), gpu(6140 * MIB)
    assert made(facts, roomy).settings.vision == "gpu"
    found = made(facts, tight, embedding="gpu")
    assert found.settings.vision == "streamed"
    assert planned_rows(found, inventory(facts))["vision weights"] < 128 * MIB
    with pytest.raises(DoesNotFit):
        made(facts, tight, tower="resident", embedding="gpu")
    wished = made(facts, roomy, tower="streamed")
    assert (wished.settings.vision, wished.settings.vision_weights) == ("streamed", "bf16")
    assert wished.subject != made(facts, roomy).subject
    with pytest.raises(
        RequestError, match=r"can't be streamed: it takes 561 MiB of host memory, of which 256 MiB"
    ):
        made(facts, replace(roomy, host_bytes=GIB // 4), tower="streamed")
    with pytest.raises(DoesNotFit):
        made(facts, replace(tight, host_bytes=GIB // 4), embedding="gpu")
    blind = made(facts, gpu(12 * GIB), language_only=True)
    assert blind.settings.vision == "gpu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tower": "cloud"}, "tower 'cloud' is unknown; use auto, resident, streamed"),
        ({"tower": "streamed", "device": "cpu"}, "there is no GPU to stream it to"),
        (
            {"tower": "streamed", "backend": "transformers"},
            '^tower="streamed" is not for transformers; say backend="native",',
        ),
    ],
)
def test_load_refuses_what_can_not_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        snugvl.load("pocket", **arguments)

"""Experts in host memory on our own engine: both memories to the byte, when a plan takes it, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import snugvl
from snugvl.backends.native.allocation import engine_config
from snugvl.backends.native.loading import storage_of
from snugvl.backends.native.planned import planned_rows
from snugvl.checkpoint.architecture import Fp8Blocks
from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import LoadOptions
from snugvl.errors import RequestError
from snugvl.hardware.machine import Machine
from snugvl.models import expert_cache, loader
from snugvl.models.host_memory import unit_bytes
from snugvl.models.networks import segment_bytes
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native.step_graphs import POOL
from snugvl.planner.engines.rules import rules_of
from snugvl.planner.footprint import weights as planned
from snugvl.planner.footprint.total import Device, footprint, reserved_bytes
from snugvl.planner.footprint.weights import (
    EXPERT_CACHE,
    expert_cache_bytes,
    expert_host_bytes,
    weight_components,
)
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.speed import ASSUMED_LINK, EAGER_S, FETCH_S, hit_rate, roofline
from snugvl.planner.wishes import Wishes
from tests import mixtures, prequantized
from tests.backends.native.test_allocation import gpu, made
from tests.mixtures import COUNT, Options
from tests.planner.machines import GIB, MIB, machine
from tests.planner.models import qwen3_vl
from tests.planner.test_native_mixtures import NAME, network, published

CARD = Device(450 * MIB, compute_capability=(12, 0), host_bytes=64 * GIB)
FACTS = catalogue_facts(NAME) or pytest.fail(f"{NAME} is in the catalogue")
SMALL = replace(machine(8 * GIB), ram_total_bytes=64 * GIB, ram_free_bytes=60 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Options], Path]:
    return lambda options: mixtures.write(tmp_path_factory.mktemp("mixture"), options)


def check(model: Any, ours: Any, settings: Settings) -> None:
    """Both memories, of a network in its final formats without memory."""
    layers = expert_cache.experts_of(ours.decoder)
    slots = settings.expert_slots or 0
    assert expert_cache_bytes(model, settings) == expert_cache.cache_bytes(layers, slots)
    assert expert_host_bytes(model, settings) == sum(unit_bytes(each) for each in layers)
    inside = {id(tensor) for each in layers for tensor in (*each.parameters(), *each.buffers())}
    rest = [tensor.nbytes for tensor in (*ours.parameters(), *ours.buffers()) if id(tensor) not in inside]
    parts = {part.name: part.nbytes for part in weight_components(model, settings)}
    cache = expert_cache_bytes(model, settings)
    assert parts[EXPERT_CACHE] == cache
    assert sum(parts.values()) - parts["allocator rounding"] == sum(rest) + cache
    small = sum(-(-size // 512) * 512 for size in rest if size <= 1 << 20)
    segment = -(-segment_bytes(rest) // (2 << 20)) * (2 << 20)
    held = segment + -(-small // (2 << 20)) * (2 << 20)
    apart = reserved_bytes([(cache, 1)]) if cache else 0  # it may be given to other programs
    assert parts["allocator rounding"] == max(0, held - sum(rest)) + apart - cache


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("slots", [0, 17, 128])
@pytest.mark.sample("0-bf16", "17-bf16", "17-fp8", "17-int8", "17-int4", "128-int4")
def test_published_weights_are_planned_to_the_byte(weights: Any, slots: int) -> None:
    ours = network(published())
    loader.choose_formats(ours, loader.Storage(weights), Fp8Blocks(128, 128))
    facts = catalogue_facts(NAME + "-FP8" if weights == "fp8" else NAME)
    assert facts is not None
    check(inventory(facts), ours, Settings("native", weights, expert_slots=slots))


@pytest.mark.parametrize("family", mixtures.FAMILIES)
@pytest.mark.parametrize("form", ["whole", "apart"])
def test_files_of_any_form_are_planned_to_the_byte(
    family: str, form: Any, folder: Callable[[Options], Path]
) -> None:
    """Widths of which no tensor ends at a multiple of 256 bytes."""
    place = folder(Options(family, form=form, width=24))
    opened = loader.open_checkpoint(place, torch.bfloat16)
    loader.join_projections(opened.model.decoder.layers)
    check(inventory(facts_of(str(place))), opened.model, Settings("native", "bf16", expert_slots=3))


def test_experts_of_four_bits_are_planned_to_the_byte(
    folder: Callable[[Options], Path], tmp_path: Path
) -> None:
    source = folder(Options(form="apart", width=64, hidden=64))
    form = prequantized.gptq(32, version=1)
    prequantized.write(source, tmp_path / "packed", tmp_path / "wide", form, ("attn", "shared_expert"))
    opened = loader.open_checkpoint(tmp_path / "packed", torch.bfloat16)
    loader.join_projections(opened.model.decoder.layers)
    model = inventory(facts_of(str(tmp_path / "packed")))
    check(model, opened.model, Settings("native", "int4", expert_slots=3))


def test_the_numbers_are_those_of_the_code() -> None:
    assert planned.HALF_EXPERTS == expert_cache.HALF
    assert expert_cache.ALIGNMENT == planned.STREAM_ALIGNMENT


def plan(on: Machine = SMALL, **said: Any) -> Plan:
    return solve([Candidate(FACTS)], on, Wishes(**{"backend": "native", "experts": "cpu", **said}))


def choice(on: Machine = SMALL, **said: Any) -> Choice:
    return require(plan(on, **said))


@pytest.mark.parametrize("system", ["linux", "wsl2"])
def test_a_plan_fills_the_gpu_with_experts_and_has_graphs_where_it_may_read_them(system: Any) -> None:
    """Under WSL2 their memory isn't page-locked, so the host reads what a step needs."""
    found = choice(replace(SMALL, os=system), weights="int4")
    settings, each = found.settings, expert_cache_bytes
    assert 8 <= (settings.expert_slots or 0) < 128
    assert settings.eager == (system == "wsl2") != settings.page_locked
    assert storage_of(settings).experts_pinned == settings.page_locked
    assert not settings.step_graphs
    assert (found.footprint.named("CUDA graphs") > 0) == (system == "linux")
    assert found.footprint.named(POOL) == 0
    model, more = found.option.model, settings._replace(expert_slots=(settings.expert_slots or 0) + 1)
    assert found.spare_bytes < each(model, more) - each(model, settings) + 4 * MIB
    total = footprint(model, more, found.budget.device).total_bytes
    assert total > found.budget.usable_bytes
    allocation = made(FACTS, gpu(8 * GIB), experts="cpu", weights="int4")
    assert sum(planned_rows(allocation, model).values()) == allocation.footprint.total_bytes
    assert engine_config(allocation, LoadOptions(NAME)).step_graph_bytes == 0


def test_more_memory_gives_more_of_them_until_all_are_there() -> None:
    slots = []
    for size in (8, 12, 16, 24, 32):
        on = replace(machine(size * GIB), ram_total_bytes=64 * GIB, ram_free_bytes=60 * GIB)
        slots.append(choice(on, weights="int4").settings.expert_slots or 0)
    assert slots == sorted(slots)
    assert slots[0] < slots[-1] == 128


def test_nobody_gets_it_unasked() -> None:
    assert plan(experts="auto").choice is None
    larger = replace(machine(48 * GIB), ram_total_bytes=64 * GIB, ram_free_bytes=60 * GIB)
    for wish in ("auto", "gpu"):
        assert choice(larger, experts=wish, weights="int4").settings.expert_slots is None
    assert choice(larger, weights="int4").settings.expert_slots == 128


def test_a_plan_says_both_memories_and_that_it_was_not_measured() -> None:
    written = plain(report(plan(weights="int4"), SMALL))
    held = choice(weights="int4").settings.expert_slots
    assert f"{held} of 128 of each layer have copies on the GPU" in written
    assert "the experts stay in host memory (14.34 GiB)" in written
    assert "measured on an H200 alone" in written
    assert "cross PCI Express for every token" in written
    assert "--experts cpu" in report(plan(weights="int4"), SMALL).commands[-1]
    assert "experts in host memory" in choice(weights="int4").option.title


def test_hits_are_those_published() -> None:
    assert [hit_rate(share) for share in (0.0, 1 / 8, 1 / 4, 1.0)] == [0.0, 0.67, 0.81, 1.0]
    assert 0.67 < hit_rate(3 / 16) < 0.81
    slow, quick = (
        choice(
            replace(machine(size * GIB), ram_total_bytes=64 * GIB, ram_free_bytes=60 * GIB), weights="int4"
        )
        for size in (8, 24)
    )
    assert quick.speed.crossing_bytes < slow.speed.crossing_bytes
    rates = [each.speed.decode_tokens_per_s or 0 for each in (slow, quick)]
    assert rates[0] < rates[1]


@pytest.mark.parametrize(
    ("slots", "sequences", "sizes"),
    [(None, 4, (1, 2, 4)), (1, 4, ()), (2, 4, (1,)), (11, 4, (1, 2, 4)), (11, 8, (1, 2, 4)), (5, 3, (1, 2))],
)
def test_graphs_are_those_of_steps_whose_experts_all_get_slots(
    slots: int | None, sequences: int, sizes: tuple[int, ...]
) -> None:
    """Eight of a token, in four rounds: the network says the same (`capturable_tokens`)."""
    found = choice(weights="int4")
    made_ = found.settings._replace(expert_slots=slots, sequences=sequences)
    assert native.recorded_sizes(found.option.model, made_) == sizes
    assert native.recorded_sizes(found.option.model, made_._replace(eager=True)) == (
        sizes if slots is None else ()
    )


@pytest.mark.parametrize("slots", [8, 128])
def test_the_host_starts_each_layer_once_a_token(slots: int) -> None:
    """Beside what the GPU reads, which takes as long with all experts there, and what crosses."""
    found = choice(weights="int4")
    settings, budget = found.settings._replace(expert_slots=slots), found.budget
    model = found.option.model
    graphs = roofline(model, settings._replace(expert_slots=None, eager=False), budget)
    eager = roofline(model, settings._replace(eager=True), budget)
    assert graphs.decode_tokens_per_s
    assert eager.decode_tokens_per_s
    assert budget.gpu is not None
    recorded = roofline(model, settings._replace(eager=False), budget).decode_tokens_per_s
    assert recorded
    more = 1 / recorded - 1 / graphs.decode_tokens_per_s
    crossing_s = eager.crossing_bytes / (budget.gpu.link_bandwidth or ASSUMED_LINK)
    assert more == pytest.approx(model.facts.text.num_layers * FETCH_S + crossing_s, rel=1e-6)
    crossing = eager.crossing_bytes / (budget.gpu.link_bandwidth or ASSUMED_LINK)
    layers = model.facts.text.num_layers
    more = 1 / eager.decode_tokens_per_s - 1 / graphs.decode_tokens_per_s - crossing
    paced = rules_of("native").pace.mixed_layer_s
    assert more == pytest.approx(layers * (EAGER_S - paced), rel=1e-6)
    assert paced < EAGER_S


@pytest.mark.parametrize(
    ("facts", "on", "words"),
    [
        (qwen3_vl("8B"), SMALL, "the model is not a mixture of experts"),
        (FACTS, replace(SMALL, gpus=()), "there is no GPU to have copies of them"),
        (
            FACTS, replace(SMALL, ram_free_bytes=8 * GIB),
            "the experts can't be in host memory: in int4 they take 14.34 GiB of it, of which 6.20 GiB may",
        ),
    ],
)  # fmt: skip
def test_it_is_refused_with_the_reason(facts: Any, on: Machine, words: str) -> None:
    found = solve([Candidate(facts)], on, Wishes(backend="native", experts="cpu"))
    assert found.choice is None
    assert any(words in each.text for each in found.refusals), [each.text for each in found.refusals]


def test_formats_that_host_memory_has_no_room_for_are_passed_over() -> None:
    """30B in bf16 are 54 GiB of experts, in int8 half of that."""
    some = replace(SMALL, ram_free_bytes=40 * GIB)
    assert choice(some).settings.weights == "int8"
    assert choice(replace(some, ram_free_bytes=24 * GIB)).settings.weights == "int4"
    refused = plan(some, weights="bf16").refusals
    assert any("in bf16 they take 54.00 GiB of it" in each.text for each in refused)


def test_other_engines_say_whose_option_it_is() -> None:
    for_all = solve([Candidate(FACTS)], SMALL, Wishes(experts="cpu"))
    assert {each.text for each in for_all.verdicts if each.engine != "llamacpp"} == {
        "--experts cpu is for snugvl's own engine alone"
    }
    with pytest.raises(RequestError, match=r"--experts cpu is not for vLLM"):
        Wishes(backend="vllm", experts="cpu")
    with pytest.raises(RequestError, match="not a mixture of experts"):
        snugvl.load("pocket", experts="cpu")


def test_a_loader_gets_slots_and_the_kind_of_memory() -> None:
    settings = Settings("native", "int4", expert_slots=12)
    for pinned in (True, False):
        storage = storage_of(settings.with_host_memory(page_locked=pinned))
        assert (storage.expert_slots, storage.experts_pinned) == (12, pinned)
    assert storage_of(settings._replace(expert_slots=None)).expert_slots is None
    assert COUNT < expert_cache.HALF, "a room is never larger than a layer"


def of_35b(on: Machine = SMALL, **said: Any) -> Choice:
    facts = catalogue_facts("Qwen/Qwen3.6-35B-A3B-FP8")
    assert facts is not None
    return require(solve([Candidate(facts)], on, Wishes(backend="native", experts="cpu", **said)))


def test_more_memory_never_has_fewer_experts_on_the_gpu() -> None:
    """What is left beside a slot fills the pool, and decides nothing: a larger pool reached so by chance had
    been worth half of the slots."""
    large = replace(SMALL, gpus=machine(24 * GIB).gpus)
    found = [
        of_35b(large, weights="int4", context=4096, memory_bytes=memory * MIB).settings.expert_slots or 0
        for memory in range(6900, 8000, 200)
    ]
    assert found == sorted(found)
    assert found[0] >= 24


@pytest.mark.parametrize("system", ["linux", "wsl2"])
def test_steps_with_drafts_have_graphs_where_the_gpu_fetches_experts(system: Any) -> None:
    on = replace(SMALL, os=system)
    found = of_35b(on, weights="int4", speculation="mtp")
    assert found.settings.predictor
    assert found.settings.draft_graphs == (system == "linux")
    assert (found.footprint.named(POOL) > 0) == (system == "linux")
    assert not found.settings.step_graphs
    plain_ = of_35b(on, weights="int4").settings
    assert not plain_.predictor, "its memory is worth more as slots, unless it is asked for"
    assert (plain_.expert_slots or 0) > (found.settings.expert_slots or 0)

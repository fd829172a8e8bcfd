"""Snapshots of recurrent states in plans: to the byte, as many as are of use, and never for comfort."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from snugvl.backends.native.allocation import engine_config
from snugvl.backends.native.planned import planned_rows
from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.options import LoadOptions
from snugvl.engine.memory import allocate
from snugvl.hardware.machine import Machine
from snugvl.planner.engines.native.hybrid import EACH, SNAPSHOTS, TOKENS
from snugvl.planner.footprint.kv import checkpoint_component, state_bytes, state_component
from snugvl.planner.plan import Choice, allocation_of
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes, wishes_of
from tests.draws import draws
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.models import qwen3_vl
from tests.planner.test_hybrid import SIZES, model_of, network


def facts_of(size: str) -> ModelFacts:
    facts = catalogue_facts(f"Qwen/Qwen3.5-{size}")
    assert facts is not None
    return facts


FACTS = {size: facts_of(size) for size in ("0.8B", "2B", "4B", "9B")}


def plan(size: str, total: int, **wishes: Any) -> Choice | None:
    return solve([Candidate(FACTS[size])], machine(total * MIB), Wishes(backend="native", **wishes)).choice


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_planned_to_the_byte(size: str, dtype: torch.dtype) -> None:
    model, planned = network(size).to(dtype), model_of(size)
    chosen = Settings("native", sequences=3, state_snapshots=5, float32=dtype == torch.float32)
    found = solve([Candidate(FACTS[size])], machine(24 * GIB), Wishes(backend="native")).choice
    assert found is not None
    config = engine_config(replace(allocation_of(found), settings=chosen), LoadOptions("x"))
    cache = allocate(model, replace(config, num_blocks=1))
    layers = sum(count for layer, count in planned.kv_layers if layer.state_bytes)
    parts = state_component(planned, chosen).nbytes, checkpoint_component(planned, chosen).nbytes
    assert cache.states is not None
    assert cache.states.nbytes * layers == sum(parts)
    assert parts[1] == 5 * state_bytes(planned, chosen)


def test_the_ledger_and_the_engine_have_what_is_printed() -> None:
    found = solve([Candidate(FACTS["4B"])], rtx_5060(), Wishes(backend="native"))
    choice, options = require(found), LoadOptions("x")
    allocation, count = allocation_of(choice), choice.settings.state_snapshots
    each = state_bytes(choice.option.model, choice.settings)
    rows = planned_rows(allocation, choice.option.model)
    assert count >= SNAPSHOTS
    assert rows["recurrent state"] == (choice.settings.sequences + 1 + count) * each
    assert sum(rows.values()) == choice.footprint.total_bytes
    assert engine_config(allocation, options).state_snapshots == count
    kept = next(part for part in choice.footprint.components if part.name == "recurrent state, kept")
    assert kept.why == f"{count} × {each / 2**20:,.1f} MiB, where the next turn can start"


def test_without_a_prefix_cache_or_states_there_are_none() -> None:
    for total in (6 << 10, 8 << 10, 48 << 10):
        for wishes in (
            Wishes(prefix_cache=False),
            wishes_of(LoadOptions("x", prefix_cache=False), sees=True),
        ):
            choice = solve([Candidate(FACTS["4B"])], machine(total * MIB), wishes).choice
            assert choice is not None
            assert choice.settings.state_snapshots == choice.footprint.named("recurrent state, kept") == 0
        plain = solve([Candidate(qwen3_vl("2B", fp8=True))], machine(total * MIB), Wishes()).choice
        assert plain is not None
        assert plain.settings.state_snapshots == 0


@pytest.mark.parametrize("size", ["0.8B", "2B", "4B"])
@pytest.mark.sample("4B")
def test_on_a_cpu_what_is_tried_is_what_is_chosen_from(size: str) -> None:
    """Whatever is free: there sequences don't become fewer, so nothing may be thought to fit with fewer."""
    found = []
    for free in range(1 << 10, 24 << 10, 311):
        host = Machine("linux", (), 2, 24 * GIB, free * MIB, 70 * GIB, "described")
        found.append(solve([Candidate(FACTS[size])], host, Wishes(backend="native")).choice)
    scores = [choice.score for choice in found if choice is not None]
    assert 30 < len(scores) < len(found)
    assert scores == sorted(scores)


@given(
    size=st.sampled_from(sorted(FACTS)),
    total=st.integers(2 << 10, 32 << 10),
    more=st.integers(0, 4 << 10),
    purpose=st.sampled_from(["chat", "documents", "detect", "batch"]),
    concurrency=st.sampled_from([1, 1, 3, 6]),
)
@example("9B", 5904, 374, "documents", 1)  # the vision tower came back, with an FP8 cache
@draws(25)
def test_they_cost_no_comfort_and_more_memory_never_gives_less(
    size: str, total: int, more: int, purpose: Any, concurrency: int
) -> None:
    wished: dict[str, Any] = {"purpose": purpose, "concurrency": concurrency}
    small, large = plan(size, total, **wished), plan(size, total + more, **wished)
    without = plan(size, total, prefix_cache=False, **wished)
    if small is None or without is None:
        assert small is without
        return
    assert large is not None
    assert large.score >= small.score
    up_to_comfort = [(each.quality, each.tower, each.comfort) for each in (small.score, without.score)]
    assert up_to_comfort[0] == up_to_comfort[1]
    chosen = small.settings
    assert small.footprint.total_bytes <= small.budget.usable_bytes
    assert chosen.state_snapshots <= max(SNAPSHOTS, EACH * chosen.sequences)
    assert chosen.state_snapshots * TOKENS <= chosen.kv_tokens


@pytest.mark.parametrize(("size", "total"), [("4B", 6400), ("4B", 8 << 10), ("9B", 8160), ("2B", 6 << 10)])
def test_small_cards_have_some(size: str, total: int) -> None:
    choice = plan(size, total)
    assert choice is not None
    assert choice.settings.state_snapshots >= SNAPSHOTS

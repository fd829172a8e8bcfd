"""Slots for experts that the GPU gives itself: what is in them is what the table says, and answers are those
of experts that are all at hand."""

from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from snugvl.core.config import EXPERT_ROUNDS
from snugvl.engine.precompile import InPlace
from snugvl.layers import replaced
from snugvl.layers.experts import Experts
from snugvl.layers.weights import FormatName
from snugvl.models import expert_cache
from snugvl.models.expert_cache import DECAY, ExpertCache, LayerSlots, SlotState, cache_bytes, copies_to
from snugvl.models.host_memory import page_locked, unit_bytes
from tests.draws import draws

pytest.importorskip("triton")
from snugvl.layers.kernels.products import expert_slots
from snugvl.layers.kernels.products.expert_slots import take_slots

COUNT, HIDDEN, WIDTH = 8, 32, 32
USED = 2


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(replaced, "on_gpu", lambda _: True)


def experts_of(device: torch.device, weights: FormatName, memory: torch.Tensor | None = None) -> Experts:
    """The same each time."""
    experts = Experts(HIDDEN, COUNT, WIDTH)
    for linear in (experts.gate_up_proj, experts.down_proj):
        linear.store_as(weights, 32 if weights != "bf16" else 128)
    if memory is None:
        experts.to(device)
    else:
        expert_cache.lay_out(experts, memory)
    values = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for linear in (experts.gate_up_proj, experts.down_proj):
            made = torch.randn(linear.rows, linear.columns, generator=values)
            linear.put(0, made.to(device))
    return experts


def cached(device: torch.device, slots: int, weights: FormatName = "bf16") -> tuple[Experts, LayerSlots]:
    """Experts in host memory that the device can read, and their places."""
    empty = Experts(HIDDEN, COUNT, WIDTH)
    for linear in (empty.gate_up_proj, empty.down_proj):
        linear.store_as(weights, 32 if weights != "bf16" else 128)
    nbytes = unit_bytes(empty)
    is_gpu = device.type == "cuda"
    memory = page_locked(nbytes, device) if is_gpu else torch.empty(nbytes, dtype=torch.uint8)
    ours = experts_of(device, weights, memory)
    place = torch.full((cache_bytes([ours], slots),), 255, dtype=torch.uint8, device=device)
    halves = [expert_cache._Place(ours, COUNT, place[: expert_cache._half_bytes([ours])]) for _ in range(2)]
    own = expert_cache._Place(ours, slots, place[2 * expert_cache._half_bytes([ours]) :])
    layer = LayerSlots(ours, own, halves, copies_to(device), pinned=True, device=device)
    ours.places = layer
    return ours, layer


def through(experts: Experts, ids: torch.Tensor) -> torch.Tensor:
    values = torch.Generator().manual_seed(1)
    x = torch.randn(len(ids), HIDDEN, generator=values).to(ids.device)
    return experts(x, ids, torch.rand(*ids.shape, generator=values).to(ids.device))


def check(layer: LayerSlots) -> None:
    """Every slot has the bytes of the expert that the table and the slot say."""
    on_device = layer._on_device
    assert on_device is not None
    state: SlotState = on_device.state
    where, held = state.where.tolist(), state.held.tolist()
    for expert, slot in enumerate(where):
        assert slot < 0 or held[slot] == expert
    for slot, expert in enumerate(held):
        assert expert < 0 or where[expert] == slot
        for source, target in zip(layer._host, layer._slots.planes, strict=True):
            assert expert < 0 or torch.equal(source[expert], target[slot].cpu())


STEPS = st.lists(
    st.lists(
        st.lists(st.integers(0, COUNT - 1), min_size=USED, max_size=USED, unique=True), min_size=1, max_size=7
    ),
    min_size=1,
    max_size=5,
)


@draws(30)
@given(STEPS, st.integers(1, COUNT), st.sampled_from(["bf16", "int8", "int4"]))
def test_steps_that_the_gpu_and_the_host_choose_for_are_exact_and_count(
    steps: list[list[list[int]]], slots: int, weights: FormatName
) -> None:
    """A step of more pairs than slots has several rounds, in which an expert crosses once; one of many more
    is the host's. Both leave the other what is true."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    right = experts_of(device, weights)
    ours, layer = cached(device, slots, weights)
    hits = misses = 0
    for step in steps:
        ids = torch.tensor(step, dtype=torch.int32, device=device)
        needed, before = set(ids.flatten().tolist()), set(layer.held)
        brought = list[int]()

        def seen(ids: torch.Tensor, *rest: Any, later: bool) -> None:
            take_slots(ids, *rest, later=later)
            rows = rest[1][: min(ids.numel(), slots)].tolist()
            brought.extend(expert for expert, _ in rows if expert >= 0)  # noqa: B023

        with patch.object(expert_slots, "take_slots", seen):
            assert torch.equal(through(ours, ids), through(right, ids))
        hits, misses = hits + len(needed & before), misses + len(needed - before)
        assert layer.counts == (hits, misses)
        if ids.numel() <= EXPERT_ROUNDS * slots:
            assert sorted(brought) == sorted(needed - before)
        if ids.numel() <= slots:
            assert needed <= set(layer.held)
        check(layer)


@pytest.mark.parametrize("count", [1, 3])
def test_the_least_used_go_and_none_that_the_step_needs(count: int, device: torch.device) -> None:
    ours, layer = cached(device, 3)

    def step(*experts: int) -> None:
        through(ours, torch.tensor([experts], dtype=torch.int32, device=device))

    for _ in range(4):
        step(7)
    step(1)
    assert layer.held == (1, 7), "an empty slot is taken first"
    step(2)
    assert layer.held == (1, 2, 7)
    step(*range(3, 3 + count))
    assert layer.held == {1: (2, 3, 7), 3: (3, 4, 5)}[count]
    scores = layer._on_device.state.scores.tolist()  # type: ignore[union-attr]
    assert scores[7] == pytest.approx(sum(DECAY**n for n in range(3, 7)), rel=1e-5)


def test_the_host_chooses_where_a_kernel_is_withdrawn(device: torch.device) -> None:
    right, (ours, layer) = experts_of(device, "bf16"), cached(device, 3)
    ids = torch.tensor([[3, 5]], dtype=torch.int32, device=device)
    with replaced.without(["bring_experts"]):
        assert torch.equal(through(ours, ids), through(right, ids))
        assert layer.held == (3, 5)
    assert torch.equal(through(ours, ids), through(right, ids))
    assert layer.counts == (2, 2)


def test_a_router_that_is_broken_asks_for_nothing_that_isnt_there(device: torch.device) -> None:
    """`choose` gives rows of NaN a number that no expert has."""
    ours, layer = cached(device, 4)
    through(ours, torch.tensor([[COUNT, 1]], dtype=torch.int32, device=device))
    assert layer.held == (1,)
    assert layer.counts == (0, 1)


def test_a_rehearsal_launches_both_and_copies_experts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, ours = experts_of(device, "int8"), experts_of(device, "int8")
    ours.places = InPlace(ours, 5)
    monkeypatch.setattr(expert_cache, "EXPERT_ROUNDS", 1)
    for ids in ([[0, 3]], [[7, 3], [1, 2]], [[0, 1], [2, 3], [4, 5]]):
        chosen = torch.tensor(ids, dtype=torch.int32, device=device)
        assert torch.equal(through(ours, chosen), through(right, chosen))
    made: Any = ours.places
    assert made._slots.state.counts.tolist() == [1, 5], "the last step is one of a table"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph is a GPU's")
def test_a_cuda_graph_holds_the_choice() -> None:
    device = torch.device("cuda")
    right, (ours, layer) = experts_of(device, "bf16"), cached(device, 4)
    ids = torch.tensor([[3, 5]], dtype=torch.int32, device=device)
    x, shares = torch.randn(1, HIDDEN, device=device), torch.rand(1, 2, device=device)
    ours(x, ids, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(x, ids, shares)
    for step in ([0, 1], [2, 7], [6, 1], [1, 0], [5, 4]):
        ids.copy_(torch.tensor([step]))
        graph.replay()
        assert torch.equal(out, right(x, ids, shares))
        check(layer)
    assert sum(layer.counts) == 12


def test_a_cache_has_them_where_its_memory_is_page_locked_and_on_a_gpu(device: torch.device) -> None:
    """Elsewhere the host chooses."""
    for pinned in (True, False):
        ours = experts_of(torch.device("cpu"), "bf16")
        place = torch.empty(cache_bytes([ours], 3), dtype=torch.uint8)
        made = ExpertCache([ours], 3, place, copies_to(torch.device("cpu")), pinned=pinned)
        assert made.device_slots == 0

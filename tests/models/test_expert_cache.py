"""Experts in host memory give the answers of experts on the device, to the bit, whatever is in the slots.

The copies here are the worst that a GPU may do: a place is overwritten as soon as a copy to it is asked for,
and holds the new bytes only when they are waited for.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from snugvl.core.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.engine.memory import allocate, expert_bytes, reallocate
from snugvl.engine.precompile import network_from, outline_of
from snugvl.engine.pressure import DeviceMemory, PlannedBytes, PressureMonitor, sizes
from snugvl.layers.experts import Experts
from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.layers.weights import FormatName
from snugvl.models import expert_cache, loader
from snugvl.models.expert_cache import (
    ExpertCache,
    InPlace,
    cache_bytes,
    copies_to,
    experts_of,
    experts_to_host,
)
from snugvl.models.loader import Storage, device_bytes, load_model, tensor_bytes
from snugvl.models.networks import give_memory
from tests import mixtures
from tests.draws import draws
from tests.engine.toy import run, tokens
from tests.mixtures import COUNT, FAMILIES, USED, Options
from tests.models.forward import logits
from tests.models.test_mixtures import CONFIG, PICTURE, SAMPLING, request
from tests.models.test_qwen3_vl import CASES, prompt

FEW = replace(SAMPLING, max_tokens=16)
CPU = torch.device("cpu")
CASES_ = {"picture": PICTURE} | {str(n): prompt(*range(20 + n, 30 + 3 * n)) for n in range(3)}


@dataclass
class LateCopies:
    """Stands for `CopyStream`: what a copy brings is there when it is waited for, and not before; or, if
    `early`, as soon as it is asked for."""

    early: bool = False
    bytes_copied: int = 0
    marks: int = 0
    afters: list[int] = field(default_factory=list)
    waiting: list[Sequence[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: int) -> Any:
        self.afters.append(after)
        for place, source in pairs:
            assert place.shape == source.shape
            place.copy_(source) if self.early else place.fill_(255)
            self.bytes_copied += source.nbytes
        self.waiting.append(pairs)
        return pairs

    def wait(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert self.waiting.pop(0) is pairs, "in the order in which they were asked for"
        for place, source in pairs if not self.early else ():
            place.copy_(source)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a checkpoint, written once."""
    return cache(lambda options: mixtures.write(tmp_path_factory.mktemp("mixture"), options))


@pytest.fixture(params=[True, False], ids=["page-locked", "pageable"])
def _late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late copies, two experts at a time."""
    monkeypatch.setattr(loader, "copies_to", lambda _device: LateCopies())
    monkeypatch.setattr(loader, "experts_to_host", given_as(request.param))
    monkeypatch.setattr(expert_cache, "HALF", 2)


def given_as(pinned: bool) -> Callable[..., bool]:
    """`experts_to_host` that says so of its memory."""

    def to_host(*arguments: Any, **said: Any) -> bool:
        experts_to_host(*arguments, **said)
        return pinned

    return to_host


def load(folder: Path, slots: int | None, weights: FormatName = "bf16", **said: Any) -> Any:
    storage = Storage(weights, group=32 if weights == "int4" else None, expert_slots=slots)
    return load_model(folder, dtype=torch.float32, device=CPU, storage=storage, **said)


def answers(network: Any, config: EngineConfig = CONFIG) -> dict[str, Any]:
    """Tokens of each case alone, then of all together in chunks of seven tokens."""
    asked = [replace(request(name, case), sampling=FEW) for name, case in CASES_.items()]
    found = {each.request_id: tokens(run(Engine(network, config), each)[each.request_id]) for each in asked}
    tight = EngineConfig(num_blocks=44, block_size=4, max_model_len=160, max_num_seqs=4, max_batched_tokens=7)
    together = run(Engine(network, tight), *asked)
    return found | {f"{name} in company": tokens(together[name]) for name in CASES_}


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("pageable-qwen3_vl_moe")
def test_answers_are_the_same_with_no_slots_some_and_all(family: str, made: Any) -> None:
    folder = made(Options(family))
    plain = load(folder, None)
    right, scores = answers(plain), {name: logits(plain, case) for name, case in CASES.items()}
    assert all(len(set(new)) > 3 for new in right.values())
    for slots in (0, 4, COUNT):
        ours = load(folder, slots)
        assert answers(ours) == right
        assert all(torch.equal(logits(ours, case), scores[name]) for name, case in CASES.items())
        hits, misses, nbytes = ours.expert_cache.counts()
        assert (hits > 0) == (slots > 0)
        layer = ours.expert_cache.layers[0]
        assert nbytes == misses * layer.expert_bytes
        assert len(layer.held) == slots
        if slots == COUNT:
            assert misses == COUNT * len(ours.expert_cache.layers), "each crosses once"


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.sample("page-locked-int4", "page-locked-fp8", "pageable-int8")
def test_formats_with_scales_bring_them(weights: FormatName, made: Any) -> None:
    fp8 = weights == "fp8"
    folder = made(Options(hidden=128, width=128, form="apart" if fp8 else "whole", fp8=fp8))
    plain, ours = (load(folder, slots, "bf16" if fp8 else weights) for slots in (None, 3))
    case = CASES["text"]
    for _ in range(3):
        assert torch.equal(logits(ours, case), logits(plain, case))
    assert ours.expert_cache.counts()[0] > 0


def layer_of(slots: int, copies: Any, weights: FormatName = "bf16", pinned: bool = True) -> Any:
    """(the same experts twice: all on the device, and in host memory)."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        experts = Experts(32, 8, 32)
        for linear in (experts.gate_up_proj, experts.down_proj):
            linear.store_as(weights, 32 if weights != "bf16" else 128)
        found.append(experts)
    with torch.no_grad():
        for one, two in zip(*([each.gate_up_proj, each.down_proj] for each in found), strict=True):
            values = torch.randn(one.rows, one.columns)
            one.put(0, values)
            two.put(0, values)
    place = torch.empty(cache_bytes(found[1:], slots), dtype=torch.uint8)
    made_ = ExpertCache(found[1:], slots, place, copies, pinned=pinned)
    return found[0], found[1], made_.layers[0]


def drawn(*steps: Sequence[int]) -> torch.Tensor:
    return torch.tensor(steps, dtype=torch.int32)


def through(experts: Experts, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return experts(torch.randn(len(ids), 32), ids, torch.rand(*ids.shape))


STEPS = st.lists(
    st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=6),
    min_size=1,
    max_size=12,
)


@draws(60)
@given(
    STEPS, st.integers(0, 8), st.booleans(), st.booleans(), st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([None, 1, 3]),
)  # fmt: skip
def test_any_row_of_steps_is_exact_and_brings_each_missing_expert_once(
    steps: list[list[list[int]]], slots: int, pinned: bool, early: bool, half: int, fails_at: int | None
) -> None:
    """Also where one of them was given up in its middle."""
    before, expert_cache.HALF = expert_cache.HALF, half  # type: ignore[misc]
    try:
        copies = LateCopies(early)
        right, ours, layer = layer_of(slots, copies, pinned=pinned)
        for number, step in enumerate(steps):
            ids = drawn(*step)
            if fails_at == number:
                rounds = layer.rounds(ids)
                next(rounds)
                rounds.close()
                copies.waiting.clear()
                continue
            missing = set(ids.flatten().tolist()) - set(layer.held)
            was = copies.bytes_copied
            assert torch.equal(through(ours, ids), through(right, ids))
            assert copies.bytes_copied - was == len(missing) * layer.expert_bytes
            assert not copies.waiting
            assert len(layer.held) <= slots
    finally:
        expert_cache.HALF = before  # type: ignore[misc]


def test_every_expert_is_in_one_round_and_those_at_hand_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cache, "HALF", 2)
    _, _, layer = layer_of(3, LateCopies())
    list(layer.rounds(drawn([0, 1])))
    rounds = list(layer.rounds(drawn([1, 2], [3, 4], [5, 6])))
    found = [{int(each) for each in torch.where(part.slots >= 0)[0]} for part in rounds]
    assert 1 in found[0]
    assert not found[0] & {2, 3, 4, 5, 6}
    assert sorted(each for part in found[1:] for each in part) == [2, 3, 4, 5, 6]
    assert all(len(part) <= 2 for part in found[1:])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_a_gguf_are_brought_plane_by_plane(kind: GgmlType) -> None:
    torch.manual_seed(0)
    right, ours = Experts(32, 8, 32), Experts(32, 8, 32)
    for name in ("gate_up_proj", "down_proj"):
        one, two = getattr(right, name), getattr(ours, name)
        scale = torch.rand(one.rows, 1).half().view(torch.uint8)
        codes = torch.randint(256, (one.rows, LAYOUTS[kind].nbytes - 2), dtype=torch.uint8)
        for linear in (one, two):
            linear.store_blocks([(kind, linear.rows)])
            linear.put_bytes(0, torch.cat([scale, codes], dim=1))
    place = torch.empty(cache_bytes([ours], 3), dtype=torch.uint8)
    ExpertCache([ours], 3, place, LateCopies(), pinned=True)  # type: ignore[arg-type]
    for ids in (drawn([0, 1], [5, 2]), drawn([0, 3]), drawn([7, 5], [6, 0])):
        found = through(ours, ids)
        assert found.isfinite().all()
        assert torch.equal(found, through(right, ids))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_half_is_written_to_when_the_round_before_the_last_is_over(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one round later, or nothing is copied beside what is computed."""
    monkeypatch.setattr(expert_cache, "HALF", 1)
    copies = LateCopies()
    _, _, layer = layer_of(0, copies, pinned=pinned)
    rounds = layer.rounds(drawn([0, 1, 2, 3, 4]))
    asked_for = [len(copies.afters) for _ in rounds]  # with each round, copies that were asked for by then
    assert copies.afters == [1, 1, 2, 3, 4]
    assert asked_for == ([2, 3, 4, 5, 5] if pinned else [1, 2, 3, 4, 5])


def test_an_expert_that_is_used_often_stays_and_the_oldest_of_the_others_goes() -> None:
    _, _, layer = layer_of(3, LateCopies())
    for _ in range(8):
        list(layer.rounds(drawn([0])))
    for expert in (1, 2, 3):
        list(layer.rounds(drawn([expert])))
    assert layer.held == (0, 2, 3)
    list(layer.rounds(drawn([4])))
    assert layer.held == (0, 3, 4)
    for expert in (1, 2, 3, 4) * 12:
        list(layer.rounds(drawn([expert])))
    assert 0 not in layer.held, "what was used often long ago goes at last"


@pytest.mark.parametrize("early", [True, False])
def test_a_half_isnt_written_to_while_it_is_read(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cache, "HALF", 1)
    right, ours, _ = layer_of(0, LateCopies(early))
    ids = drawn([0, 1], [2, 3], [4, 5])
    assert torch.equal(through(ours, ids), through(right, ids))


def test_an_empty_slot_is_taken_first_and_those_that_a_step_needs_stay() -> None:
    _, _, layer = layer_of(3, LateCopies())
    for _ in range(4):
        list(layer.rounds(drawn([7])))
    list(layer.rounds(drawn([1])))
    assert layer.held == (1, 7)
    list(layer.rounds(drawn([2])))
    list(layer.rounds(drawn([1, 4], [3, 4], [3, 4])))
    assert 1 in layer.held


def test_an_expert_that_is_wanted_less_than_those_in_slots_takes_none() -> None:
    """Of a prompt of which nine tokens in ten or one chose it; it is brought all the same."""
    right, ours, layer = layer_of(2, LateCopies())
    list(layer.rounds(drawn([0, 1])))
    ids = drawn(*[[2, 3]] * 9, [4, 5])
    assert torch.equal(through(ours, ids), through(right, ids))
    assert layer.held == (0, 1)
    assert layer.counts == (0, 6)


def test_a_router_that_is_broken_asks_for_nothing_that_isnt_there() -> None:
    """`choose` gives rows of NaN a number that no expert has."""
    _, _, layer = layer_of(2, LateCopies())
    (part,) = layer.rounds(drawn([8, 1], [8, 8]))
    assert [int(each) for each in torch.where(part.slots >= 0)[0]] == [1]


def test_bytes_are_those_of_host_and_device(made: Any) -> None:
    plain, ours = (load(made(Options(form="whole")), slots) for slots in (None, 2))
    assert device_bytes(plain) == tensor_bytes(plain)
    held = ours.expert_cache
    assert device_bytes(ours) == tensor_bytes(ours) - held.host_nbytes + held.nbytes
    experts = [each.mlp.experts for each in plain.decoder.layers]
    assert held.host_nbytes == sum(tensor_bytes(each) for each in experts)
    each = tensor_bytes(experts[0]) // COUNT
    assert held.nbytes == (len(experts) * 2 + 2 * COUNT) * each
    assert ours.capturable_tokens == 0
    assert plain.capturable_tokens is None
    assert USED < COUNT


def test_slots_are_a_piece_of_memory_that_can_be_given_back_alone(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = list[list[int]]()

    def give(model: Any, device: torch.device, sizes: Sequence[int] = ()) -> None:
        beside.append(list(sizes))
        give_memory(model, device, sizes)

    monkeypatch.setattr(loader, "give_memory", give)
    ours = load(made(Options()), 2)
    assert beside == [[0]], "weights, and the room of a tower that doesn't stream"
    assert ours.expert_cache.nbytes > 0


def test_with_a_predictor_its_own_experts_stay_where_they_are(made: Any) -> None:
    folder = made(Options(predictor=True))
    plain, ours = load(folder, None), load(folder, 2, predictor=True)
    assert ours.mtp.layers[0].mlp.experts.places is None
    whole = load(folder, None, predictor=True)
    drafters = [Engine(each, CONFIG)._runner.drafter for each in (ours, whole)]
    assert [each and each.most for each in drafters] == [1, 3], "each draft brings experts of its own"
    guessing = EngineConfig(num_blocks=64, block_size=4, max_model_len=160, speculation="mtp")
    right = tokens(run(Engine(plain, CONFIG), request("a", PICTURE))["a"])
    assert len(right) == SAMPLING.max_tokens
    assert tokens(run(Engine(ours, guessing), request("a", PICTURE))["a"]) == right


def test_kernels_are_compiled_and_checked_as_they_run_with_tables(made: Any) -> None:
    folder = made(Options())
    for slots, tables in ((None, None), (2, 0)):
        outlines = []
        ours = load(folder, slots, outlined=lambda each: outlines.append(outline_of(each, each.config)))  # noqa: B023
        assert [each.slots for each in (*outlines, outline_of(ours, ours.config))] == [tables, tables]
        found = [each.places for each in experts_of(network_from(outlines[0]).decoder)]
        assert [each is None for each in found] == [tables is None] * len(found)
        for places in found if tables is not None else ():
            (part,) = places.rounds(torch.empty(1, USED, dtype=torch.int32, device="meta"))
            assert part.slots.is_meta
            assert part.slots.shape == (COUNT,)


def test_a_place_by_a_table_is_an_experts_own() -> None:
    right, ours, _ = layer_of(2, LateCopies())
    ours.places = InPlace(ours)
    ids = drawn([0, 3], [7, 3])
    assert torch.equal(through(ours, ids), through(right, ids))


def test_a_cpus_copies_are_done_at_once() -> None:
    copies, place = copies_to(CPU), torch.zeros(2, 3, dtype=torch.uint8)
    source = torch.arange(6, dtype=torch.uint8).view(2, 3)
    copies.wait(copies.copy_all([(place, source)], copies.mark()))
    assert torch.equal(place, source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory is a GPU's")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpu_answers_the_same_with_no_slots_some_and_all(family: str, pinned: bool, made: Any) -> None:
    """By kernels, with copies on a stream of their own: eager steps beside graphs of all on the GPU."""
    folder, device = made(Options(family)), torch.device("cuda")

    def loaded(slots: int | None) -> Any:
        storage = Storage(expert_slots=slots, experts_pinned=pinned)
        return load_model(folder, dtype=torch.float32, device=device, storage=storage)

    right = answers(loaded(None))
    for slots in (0, 4, COUNT):
        assert answers(loaded(slots)) == right


class Shared:
    """A device that other programs use, too, with a clock that only tests turn."""

    def __init__(self) -> None:
        self.free, self.now = 1 << 33, 0.0

    def watch(self) -> PressureMonitor:
        def read() -> DeviceMemory:
            return DeviceMemory(self.free, 0)

        return PressureMonitor(read, PlannedBytes(0), clock=lambda: self.now)


@pytest.mark.usefixtures("_late")
@pytest.mark.sample("page-locked")
def test_other_programs_get_slots_as_well_and_answers_stay(
    made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = made(Options()), request("a", PICTURE)
    right = tokens(run(Engine(load(folder, None), CONFIG), asked)["a"])
    ours, device = load(folder, 5), Shared()
    experts, engine = ours.expert_cache, Engine(ours, CONFIG, device.watch())
    full, said, slots, limited = experts.nbytes, list[int](), list[int](), list[int]()
    monkeypatch.setattr(engine._runner, "limit_graphs", lambda: limited.append(experts.slots))
    engine.add(asked)
    while engine.has_work:
        device.now += 1
        said += [each.token_id for each in engine.step() if each.token_id is not None]
        device.free = 0 if 3 <= len(said) < 6 else 1 << 33
        slots.append(experts.slots)
        assert (experts.nbytes == full) == (experts.slots == 5)
        assert all(len(each.held) <= experts.slots for each in experts.layers)
    assert said == right
    assert min(slots) == expert_cache.LEAST_SLOTS
    assert slots[0] == slots[-1] == 5, "they come back"
    assert limited == [min(slots), 5], "graphs hold what is fetched then"
    assert f"and {min(slots)} experts of each layer have copies on the GPU" in caplog.text


@pytest.mark.usefixtures("_late")
@pytest.mark.sample("page-locked")
def test_where_another_program_is_faster_slots_and_blocks_are_fewer_together(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load(made(Options()), 4)
    cache, experts, resize = allocate(ours, CONFIG), ours.expert_cache, ExpertCache.resize

    def short(self: ExpertCache, slots: int) -> None:
        if slots > 2:
            raise torch.OutOfMemoryError
        resize(self, slots)

    monkeypatch.setattr(ExpertCache, "resize", short)
    blocks = CONFIG.num_blocks
    reallocate(cache, sizes(blocks), CONFIG, CONFIG.max_num_seqs, experts)
    assert (cache.num_blocks, experts.slots) == (blocks // 2, 2)
    assert experts.nbytes == experts.bytes_of(2)
    assert expert_bytes(ours, CONFIG)(blocks // 2) == experts.nbytes  # type: ignore[misc]


def test_a_monitor_that_outlives_its_engine_keeps_no_experts(made: Any) -> None:
    ours, monitor = load(made(Options()), 2), Shared().watch()
    engine = Engine(ours, CONFIG, monitor)
    kept = weakref.ref(ours.expert_cache), weakref.ref(experts_of(ours.decoder)[0])
    engine.close()
    del ours
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert monitor._beside(0) == 0

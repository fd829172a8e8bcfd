"""A neighbour takes the device's memory: the KV cache makes room, comes back, and nothing dies."""

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine import memory
from snugvl.engine.engine import Engine
from snugvl.engine.pressure import KEPT_BYTES, LOW_BYTES, DeviceMemory, PlannedBytes, PressureMonitor
from snugvl.engine.request import TokenOutput
from snugvl.errors import OutOfMemory, RequestTooLarge
from snugvl.layers.kv_cache import KVCache, StateCache
from snugvl.planner.engines.native.footprint import LATE_BYTES
from tests.engine.eager import EagerGraphs
from tests.engine.toy import HybridToy, Toy, oracle, picture, request, tokens

MIB = 1 << 20
BLOCK = 4 * MIB  # as the watch is told; the toy's are smaller
CONFIG = EngineConfig(
    num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=8, max_batched_tokens=16,
    encoder_cache_bytes=1 << 20,
)  # fmt: skip
LEAST = 4  # a quarter of one conversation


class Card:
    """A device of which a neighbour takes what it likes, with a clock that only tests turn."""

    def __init__(self, margin_mib: int = 128) -> None:
        self.margin, self.neighbour = margin_mib * MIB, 0
        self.to_come = 0  # planned, not held yet
        self.now = 0.0
        self.told = 0
        self.engine: Engine | None = None

    def read(self) -> DeviceMemory:
        given = 0 if self.engine is None else (64 - self.engine.stats.num_blocks) * BLOCK
        held = 64 * BLOCK + 512 * MIB - given - self.to_come
        return DeviceMemory(self.margin + given + self.to_come - self.neighbour, held)

    def tell(self) -> None:
        self.told += 1

    def watch(self) -> PressureMonitor:
        return PressureMonitor(self.read, PlannedBytes(64 * BLOCK + 512 * MIB), self.tell, lambda: self.now)

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds


def engine_on(card: Card, model: Toy | None = None) -> Engine:
    here = Engine(model or Toy(), CONFIG, card.watch())
    here._reclaimer._monitor._block_bytes = BLOCK  # type: ignore[union-attr]
    card.engine = here
    return here


def steps(here: Engine, card: Card, count: int = 2000) -> list[TokenOutput]:
    said: list[TokenOutput] = []
    while here.has_work and count:
        count -= 1
        card.pass_time(0.2)
        said += here.step()
        here.check_integrity()
    return said


def test_a_neighbour_that_grows_and_leaves(caplog: pytest.LogCaptureFixture) -> None:
    card = Card()
    here = engine_on(card)
    here.poll_memory()
    assert (here.stats.num_blocks, card.told) == (64, 0), "the margin is nobody's fault"
    card.neighbour = 100 * MIB
    card.pass_time()
    here.poll_memory()
    assert here.stats.num_blocks == 64 - 34, "as much as it took is free for it again, and the mark"
    assert here.memory()["kv_cache"] == 2 * 2 * 30 * 4 * 8 * 8, "the memory is really given back"
    assert card.told == 1
    assert "other programs need memory: the KV cache shrinks to 120 tokens" in caplog.text
    card.neighbour = 2000 * MIB
    card.pass_time()
    here.poll_memory()
    assert here.stats.num_blocks == LEAST, "a quarter of a conversation always fits"
    for _ in range(3):
        card.pass_time()
        here.poll_memory()
    assert card.told == 2, "there is no more to give"
    card.neighbour = 0
    card.pass_time()
    here.poll_memory()
    card.pass_time(9)
    here.poll_memory()
    assert here.stats.num_blocks == LEAST, "it may come back"
    card.pass_time(2)
    here.poll_memory()
    assert here.stats.num_blocks == 64
    assert here.stats.planned_blocks == 64
    assert "there is memory again: the KV cache grows to 256 tokens" in caplog.text


def test_what_goes_with_the_blocks_is_given_as_well() -> None:
    """Slots for experts, here of as many bytes as blocks: half as many blocks bring a neighbour as much."""
    found = []
    for beside in (None, lambda blocks: blocks * BLOCK):
        planned = PlannedBytes((2 if beside else 1) * 64 * BLOCK)
        watch = PressureMonitor(lambda planned=planned: DeviceMemory(0, planned.total_bytes), planned)  # type: ignore[misc]
        watch.begin(CONFIG, BLOCK, beside=beside)
        found.append(64 - (watch.update(64) or 0))
    assert found == [32, 16]


def test_a_flicker_gives_nothing_back() -> None:
    card = Card()
    here = engine_on(card)
    here.poll_memory()
    card.neighbour = 100 * MIB
    card.pass_time()
    here.poll_memory()
    assert here.stats.num_blocks == 64 - 34
    for _ in range(9):  # every nine seconds it takes all again
        for neighbour, seconds in ((0, 9), (100, 1)):
            card.neighbour = neighbour * MIB
            card.pass_time(seconds)
            here.poll_memory()
    assert here.stats.num_blocks == 64 - 34
    assert card.told == 1


def test_a_neighbour_that_breathes_gets_no_less_each_time() -> None:
    """Only what was free all the time comes back, so that the cache needn't shrink at its next breath."""
    card = Card()
    here = engine_on(card)
    here.poll_memory()
    card.neighbour = 100 * MIB
    card.pass_time()
    here.poll_memory()
    for second in range(40):
        card.neighbour = (100 if second % 4 == 0 else 60) * MIB
        card.pass_time()
        here.poll_memory()
    assert here.stats.num_blocks >= 64 - 34 + 17
    assert card.told == 1


def test_it_comes_back_in_part_and_when_a_plan_left_a_little_less() -> None:
    card = Card(margin_mib=100)
    here = engine_on(card)
    card.neighbour = 3000 * MIB
    here.poll_memory()
    assert here.stats.num_blocks == LEAST
    for neighbour, blocks in ((28, 64 - 6), (0, 64)):
        card.neighbour = neighbour * MIB
        for _ in range(12):
            card.pass_time()
            here.poll_memory()
        assert here.stats.num_blocks == blocks


def test_memory_that_is_still_to_come_counts_as_taken() -> None:
    card = Card()
    here = engine_on(card)
    card.to_come = 100 * MIB
    card.neighbour = 96 * MIB  # 132 MiB are free, but 100 of them are needed soon
    here.poll_memory()
    assert here.stats.num_blocks < 64


def test_looks_are_rare() -> None:
    card = Card()
    here = engine_on(card)
    here.poll_memory()
    card.neighbour = 100 * MIB
    card.pass_time(0.05)
    here.poll_memory()
    assert here.stats.num_blocks == 64
    card.pass_time(0.06)
    here.poll_memory()
    assert here.stats.num_blocks < 64


@pytest.mark.parametrize("kind", [Toy, HybridToy])
@pytest.mark.parametrize("grows_after", [1, 3, 8])
@pytest.mark.sample("1-Toy", "3-Toy", "8-Toy")
def test_every_answer_is_the_same_whatever_the_neighbour_does(kind: type[Toy], grows_after: int) -> None:
    """It grows during the first prefill, or between tokens; it leaves, and comes again."""
    items = [
        request(str(i), i + 1, *([picture(i)] if kind is Toy else []), *range(2, 20 + i), max_tokens=12)
        for i in range(5)
    ]
    card = Card()
    here = engine_on(card, kind())
    for item in items:
        here.add(item)
    said: list[TokenOutput] = []
    for phase, neighbour in enumerate((0, 90, 3000, 0, 3000, 0)):
        card.neighbour = neighbour * MIB
        card.pass_time(11 * (phase == 4))
        said += steps(here, card, grows_after)
    said += steps(here, card)
    for item in items:
        found = [o for o in said if o.request_id == item.request_id]
        assert tokens(found) == oracle(kind(), item, 12)
        assert found[-1].finish == "length"
    assert here.stats.preemptions > 0
    assert here.stats.faults == 0


def test_steps_in_the_air_are_computed_again() -> None:
    card = Card()
    here = engine_on(card)
    graphs = EagerGraphs(here)
    here._runner.graphs, here._runner.has_graphs = graphs, True
    items = [request(str(i), i + 1, *range(2, 20 + i), max_tokens=30) for i in range(2)]
    for item in items:
        here.add(item)
    said = steps(here, card, 9)
    assert here._in_flight is not None
    card.neighbour = 200 * MIB
    said += steps(here, card)
    assert graphs.followed
    for item in items:
        assert tokens([o for o in said if o.request_id == item.request_id]) == oracle(Toy(), item, 30)


def test_choices_that_fit_no_longer_are_refused_with_numbers() -> None:
    card = Card()
    here = engine_on(card)
    wide = request("a", *range(20), n=6, max_tokens=30)
    here.add(wide)
    here.abort("a")
    card.neighbour = 3000 * MIB
    card.pass_time()
    here.poll_memory()
    with pytest.raises(
        OutOfMemory, match=r"other programs have taken .* KV cache 16\. What fits: a prompt of"
    ):
        here.add(wide)
    with pytest.raises(RequestTooLarge, match=r"the context holds 64 and the KV cache 256\."):
        here.add(request("never", *range(40), max_tokens=40))
    here.add(request("one", *range(8), max_tokens=8))
    assert steps(here, card)[-1].finish == "length"


def test_what_waits_while_not_even_one_conversation_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.engine.loop.POLL_S", 0)
    card = Card()
    here = engine_on(card)
    item = request("a", *range(2, 20), max_tokens=12)
    here.add(item)
    said = steps(here, card, 4)
    resize = KVCache.resize

    def full(cache: KVCache, num_blocks: int) -> None:
        resize(cache, 0)
        if num_blocks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 26.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "resize", full)
        card.neighbour = 3000 * MIB
        said += steps(here, card, 20)
        assert here.stats.num_blocks == 0
        assert here.stats.waiting == 1
        here.add(request("b", 1, 2, 3))
    card.neighbour = 0
    said += steps(here, card)
    assert tokens([o for o in said if o.request_id == "a"]) == oracle(Toy(), item, 12)
    assert {o.request_id for o in said if o.finish == "length"} == {"a", "b"}


def test_who_waits_in_vain_ends_with_numbers_and_smaller_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody took the memory in the moment in which the cache let go of it: half a conversation is left."""
    monkeypatch.setattr("snugvl.engine.loop.POLL_S", 0)
    resize = KVCache.resize

    def tight(cache: KVCache, num_blocks: int) -> None:
        resize(cache, 0)
        if num_blocks > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 26.00 MiB.")
        resize(cache, num_blocks)

    monkeypatch.setattr(KVCache, "resize", tight)
    card = Card()
    here = engine_on(card)
    small, grows = request("small", 1, 2, 3), request("grows", *range(30), max_tokens=10)
    for item in (request("large", *range(40)), grows, small):
        here.add(item)
    card.neighbour = 3000 * MIB
    said = steps(here, card, 50)
    assert here.stats.num_blocks == 6, "half of what the largest needs"
    assert not said
    monkeypatch.setattr("snugvl.engine.pressure.PATIENCE_S", 0)
    said += steps(here, card)
    ends = {o.request_id: o for o in said if o.finish}
    assert isinstance(ends["large"].error, OutOfMemory)
    assert str(ends["large"].error) == (
        "out of memory: other programs have taken the KV cache's memory; 24 tokens of it are left, and this "
        "request has 40; try again when they have given memory back"
    )
    assert isinstance(ends["grows"].error, OutOfMemory)
    assert tokens([o for o in said if o.request_id == "small"]) == oracle(Toy(), small, 8)
    assert ends["small"].finish == "length"


def test_pictures_kept_for_later_go_first_and_are_kept_again() -> None:
    card = Card()
    here = engine_on(card)
    here.add(request("a", 1, picture(1)))
    steps(here, card)
    assert here.memory()["encoder_outputs"]
    card.neighbour = 100 * MIB
    card.pass_time()
    here.poll_memory()
    assert not here.memory()["encoder_outputs"]
    here.add(request("b", 1, picture(1)))
    steps(here, card)
    assert not here.memory()["encoder_outputs"]
    card.neighbour = 0
    for _ in range(12):
        card.pass_time()
        here.poll_memory()
    assert here.stats.num_blocks == 64
    here.add(request("c", 1, picture(1)))
    steps(here, card)
    assert here.memory()["encoder_outputs"]


def test_marks_lie_inside_the_margin_of_a_plan() -> None:
    from snugvl.planner.budget import margin_bytes

    least = min(margin_bytes(free * MIB, "linux") for free in range(1024, 90000, 512))
    assert least >= 2 * LOW_BYTES


def test_everything_that_holds_memory_lets_go_of_it_before_the_cache_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card()
    here = engine_on(card)
    graphs = EagerGraphs(here)
    here._runner.graphs, here._runner.has_graphs = graphs, True
    here.add(request("a", 1, 2, 3, max_tokens=30))
    steps(here, card, 5)
    assert here._in_flight is not None
    done: list[str] = []
    graph_cache = here._runner.graph_cache
    monkeypatch.setattr(graph_cache, "clear", lambda: done.append(f"graphs, in the air {here._in_flight}"))
    monkeypatch.setattr(
        memory, "release", lambda _device: done.append(f"release, {here._cache.nbytes} bytes")
    )
    card.neighbour = 200 * MIB
    card.pass_time()
    here.poll_memory()
    assert done == ["graphs, in the air None", "release, 0 bytes"]


def test_a_cache_that_could_not_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    here = engine_on(card)
    here.add(request("a", 1, 2, 3, max_tokens=30))
    steps(here, card, 3)
    resize = KVCache.resize

    def broken(cache: KVCache, num_blocks: int) -> None:
        resize(cache, 0)
        if num_blocks:
            raise RuntimeError("an unknown error")

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "resize", broken)
        card.neighbour = 200 * MIB
        assert [o.finish for o in steps(here, card, 1)] == ["error"]
    card.neighbour = 0
    item = request("b", 1, 2, 3)
    here.add(item)
    assert tokens(steps(here, card)) == oracle(Toy(), item, 8)


def test_what_was_admitted_ends_first_and_new_ones_must_fit_into_what_will_be_left() -> None:
    card = Card()
    here = engine_on(card)
    long, short = request("long", *range(2, 40), max_tokens=26), request("short", 1, 2, 3, max_tokens=8)
    for item in (long, short):
        here.add(item)
    said = steps(here, card, 3)
    card.neighbour = 3000 * MIB
    said += steps(here, card, 2)
    assert here.stats.num_blocks == 16, "the long one may still come to need a whole conversation"
    with pytest.raises(OutOfMemory, match="other programs have taken a part"):
        here.add(request("new", *range(2, 30), max_tokens=26))
    here.add(request("small", 1, 2, 3, max_tokens=8))
    said += steps(here, card)
    card.pass_time()
    here.poll_memory()
    assert here.stats.num_blocks == LEAST
    assert tokens([o for o in said if o.request_id == "long"]) == oracle(Toy(), long, 26)
    assert {o.request_id for o in said if o.finish == "length"} == {"long", "short", "small"}


def test_kernels_that_load_late_shrink_the_cache_and_hold_torch_to_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held: list[int] = []
    plan = 64 * BLOCK + 512 * MIB
    card, driver = Card(), 760 * MIB

    def read() -> DeviceMemory:
        memory = card.read()
        return DeviceMemory(memory.free_bytes, memory.held_bytes, memory.held_bytes + driver)

    planned = PlannedBytes(plan, cap_bytes=plan + 760 * MIB + LATE_BYTES)
    here = Engine(Toy(), CONFIG, PressureMonitor(read, planned, card.tell, lambda: card.now, held.append))
    here._reclaimer._monitor._block_bytes = BLOCK  # type: ignore[union-attr]
    card.engine = here
    here.poll_memory()
    assert here.stats.num_blocks == 64
    driver += LATE_BYTES - KEPT_BYTES + 2 * MIB
    card.pass_time()
    here.poll_memory()
    assert here.stats.num_blocks == here.stats.planned_blocks == 59, "18 MiB, in blocks of 4"
    assert held[-1] == plan - 2 * MIB
    assert card.told == 0, "that was no neighbour"
    assert "the driver's kernels take 20 MiB more than planned: the KV cache shrinks to 236" in caplog.text


def test_a_step_that_loads_kernels_is_looked_at_before_it_is_time() -> None:
    """A kernel that loads takes driver memory: two of them within a tenth of a second could pass the cap."""
    card = Card()
    here = engine_on(card)
    reads: list[int] = []
    monitor = here._reclaimer._monitor  # type: ignore[union-attr]
    read = monitor._read
    monitor._read = lambda: (reads.append(1), read())[1]
    here.poll_memory()
    looked = len(reads)
    here.poll_memory()
    assert len(reads) == looked, "it isn't time"
    here._runner.compilations.loaded += 1
    here.poll_memory()
    assert len(reads) == looked + 1
    here.poll_memory()
    assert len(reads) == looked + 1, "once for each"


def test_recurrent_states_are_given_up_with_the_cache_and_come_back() -> None:
    """Of Qwen3.5-4B they are 50 MiB a sequence, its keys and values 32 KiB a token."""
    card = Card()
    model = HybridToy()
    here = engine_on(card, model)
    states = here._cache.states
    assert states is not None
    whole = states.nbytes
    items = [request(str(i), i + 1, *range(2, 10), max_tokens=6) for i in range(6)]
    for item in items:
        here.add(item)
    said = steps(here, card, 3)
    card.neighbour = 3000 * MIB
    said += steps(here, card)
    card.pass_time()
    here.poll_memory()
    assert (here.stats.num_blocks, states.slots) == (LEAST, 1)
    assert states.nbytes == here.memory()["recurrent_state"] == whole * 2 // 9, "and one that is nobody's"
    for item in items:
        assert tokens([o for o in said if o.request_id == item.request_id]) == oracle(HybridToy(), item, 6)
    card.neighbour = 0
    for _ in range(12):
        card.pass_time()
        here.poll_memory()
    assert (here.stats.num_blocks, states.slots) == (64, 8)
    again = request("again", 1, 2, 3)
    here.add(again)
    assert tokens(steps(here, card)) == oracle(HybridToy(), again, 8)


def test_not_even_one_state_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.engine.loop.POLL_S", 0)
    card = Card()
    here = engine_on(card, HybridToy())
    item = request("a", *range(2, 12), max_tokens=4)
    here.add(item)
    said = steps(here, card, 2)
    resize = StateCache.resize

    def full(states: StateCache, slots: int, snapshots: int = 0) -> None:
        resize(states, 0)
        if slots:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 50.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setattr(StateCache, "resize", full)
        card.neighbour = 3000 * MIB
        said += steps(here, card, 20)
        assert (here.stats.num_blocks, here.stats.waiting) == (0, 1)
    card.neighbour = 0
    said += steps(here, card)
    assert tokens(said) == oracle(HybridToy(), item, 4)

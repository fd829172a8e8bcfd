"""Images in slices beside streams: the same tokens, streams that go on, and nothing left behind."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.engine.engine import Engine
from snugvl.engine.graphs.cache import GraphKey
from snugvl.engine.graphs.decode import SIZES
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.errors import RequestError
from tests.draws import draws
from tests.engine.toy import Toy, engine, oracle, picture, request, run, tokens

MODEL = Toy()
ROW_BYTES = 2 * 16 * 8  # of an image token's row: (1 + levels) · hidden · float64


def sliced(operations: float, **config: int) -> Engine:
    """An engine whose slices are of so many operations; the toy makes a thousand a row of patches."""
    here = engine(MODEL, **config)
    here._encoder.slice = operations
    return here


def streaming(here: Engine, name: str = "text", count: int = 40) -> list[int]:
    """Start a stream and return the list its tokens come to."""
    here.add(request(name, 1, 2, 3, max_tokens=count))
    return [o.token_id for o in here.step() if o.token_id is not None]


def test_a_stream_gets_a_token_in_every_step_while_an_image_is_encoded() -> None:
    here = sliced(1000)
    got = streaming(here)
    here.add(request("image", 5, picture(1, 8, 4), max_tokens=2))
    steps = 0
    while here.stats.items_encoded == 0:
        outputs = here.step()
        here.check_integrity()
        assert [o.request_id for o in outputs] == ["text"]
        got += [o.token_id for o in outputs if o.token_id is not None]
        steps += 1
    assert steps == 9, "eight rows of patches, and the end"
    outputs = here.step()
    assert [o.request_id for o in outputs] == ["text", "image"], "encoded: its prompt is computed"
    rest = run(here)
    assert got + tokens(outputs[:1]) + tokens(rest["text"]) == oracle(MODEL, request("x", 1, 2, 3), 40)


def test_alone_an_image_is_encoded_in_one_go() -> None:
    here = sliced(1000)
    here.add(request("image", 5, picture(1, 8, 4)))
    assert [o.request_id for o in here.step()] == ["image"]


def test_the_next_image_is_begun_while_the_host_reads_the_tokens_of_a_prompt() -> None:
    here = sliced(1000, max_batched_tokens=12)  # a token of the stream, and all of one prompt
    here._runner.has_graphs = True  # as on a GPU, which works while the host reads
    here._runner.graph_cache._short.update(GraphKey("decode", (size,)) for size in SIZES)  # but with no graph
    streaming(here)
    items = [request(str(seed), 5, picture(seed, 8, 4), max_tokens=9) for seed in (1, 2)]
    for item in items:
        here.add(item)
    outputs: list[TokenOutput] = []
    while not any(o.request_id == "1" for o in outputs):
        outputs += here.step()
    assert not here._encoder.idle, "the second image is under way, and waits for nobody"
    assert [s.request.request_id for s in here._scheduler.waiting] == ["2"]
    here.check_integrity()
    rest = run(here)
    for item in items:
        got = [o.token_id for o in outputs if o.request_id == item.request_id]
        assert [*got, *tokens(rest[item.request_id])] == oracle(MODEL, item, 9)


ITEMS = [picture(seed, h, w) for seed, h, w in ((1, 4, 6), (2, 8, 2), (3, 2, 2), (4, 8, 8))]


@given(
    operations=st.sampled_from([1000, 3000, 1e9]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.sampled_from([7, 8, *ITEMS]), min_size=1, max_size=5)),
        min_size=1,
        max_size=6,
    ),
    batched=st.sampled_from([8, 16, 64]),
    blocks=st.sampled_from([32, 64]),
    cache=st.sampled_from([0, 10 * ROW_BYTES, 1 << 20]),
    aborts=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=2),
)
@draws(15)
def test_any_slicing_gives_the_same_tokens(
    operations: float,
    arrivals: list[tuple[int, list[int | VisionItem]]],
    batched: int,
    blocks: int,
    cache: int,
    aborts: dict[int, int],
) -> None:
    here = sliced(operations, max_batched_tokens=batched, num_blocks=blocks, encoder_cache_bytes=cache)
    requests = {f"r{i}": request(f"r{i}", 1, *parts, max_tokens=6) for i, (_, parts) in enumerate(arrivals)}
    waiting = [(at, requests[f"r{i}"]) for i, (at, _) in enumerate(arrivals)]
    got: dict[str, list[int]] = {name: [] for name in requests}
    step = 0
    while waiting or here.has_work:
        for _, item in [pair for pair in waiting if pair[0] <= step]:
            here.add(item)
        waiting = [pair for pair in waiting if pair[0] > step]
        for index, at in aborts.items():
            if at == step:
                here.abort(f"r{index}")
        for output in here.step():
            got[output.request_id].append(output.token_id or 0)
        here.check_integrity()
        step += 1
        assert step < 2000
    for index, (name, item) in enumerate(requests.items()):
        right = oracle(MODEL, item, 6)
        assert got[name] == right[: len(got[name])]
        assert index in aborts or len(got[name]) == 6
    assert here.memory()["encoder_outputs"] <= cache


def test_an_abort_in_the_middle_of_an_image_frees_it() -> None:
    here = sliced(1000)
    streaming(here)
    here.add(request("image", 5, picture(1, 8, 4)))
    for _ in range(3):
        here.step()
    assert not here._encoder.idle
    here.abort("image")
    assert here._encoder.idle
    here.check_integrity()
    assert len(run(here)["text"]) == 36
    assert here.stats.free_blocks == 64


def test_a_request_behind_the_image_waits_for_its_turn() -> None:
    here = sliced(1000)
    streaming(here)
    here.add(request("image", 5, picture(1, 8, 4), max_tokens=1))
    here.add(request("behind", 9, max_tokens=1))
    order = [o.request_id for _ in range(14) for o in here.step() if o.request_id != "text"]
    assert order == ["image", "behind"]


def test_a_fault_in_the_middle_of_an_image_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = sliced(1000)
    got = streaming(here)

    def explode(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(MODEL, "encode_vision", explode)
    here.add(request("image", 5, picture(1, 8, 4), n=2))
    outputs = run(here)
    monkeypatch.undo()
    assert [o.finish for o in outputs["image"]] == ["error", "error"]
    assert str(outputs["image"][0].error) == "the engine failed: MemoryError: no more"
    assert "encoding an image failed" in caplog.text
    assert here.stats.faults == 1
    assert got + tokens(outputs["text"]) == oracle(MODEL, request("x", 1, 2, 3), 40)
    assert run(here, request("again", 5, picture(1, 8, 4)))["again"][-1].finish == "length"


def test_a_preempted_prompt_starts_its_image_again() -> None:
    here = sliced(1000, num_blocks=12, max_model_len=48)
    got = streaming(here)
    item = request("image", 5, picture(1, 40, 2), max_tokens=4)
    here.add(item)
    while not here.stats.preemptions:
        got += tokens(here.step())
        here.check_integrity()
    assert here.stats.items_encoded == 0
    assert here._encoder.idle, "it holds nothing while it waits"
    outputs = run(here)
    assert got + tokens(outputs["text"]) == oracle(MODEL, request("x", 1, 2, 3), 40)
    assert tokens(outputs["image"]) == oracle(MODEL, item, 4)
    assert here.stats.items_encoded == 1


class TestCache:
    """Encodings that outlive their request."""

    @staticmethod
    def ask(here: Engine, *parts: int | VisionItem) -> list[int]:
        item = request("q", *parts, max_tokens=3)
        got = tokens(run(here, item)["q"])
        assert got == oracle(MODEL, item, 3)
        return got

    def test_a_second_question_does_not_encode_again(self) -> None:
        here = engine(MODEL, encoder_cache_bytes=1 << 20)
        for question in range(5, 8):
            self.ask(here, question, picture(1))
        assert (here.stats.items_encoded, here.stats.encoder_hits) == (1, 2)

    def test_without_a_budget_nothing_stays(self) -> None:
        here = engine(MODEL)
        for question in range(5, 8):
            self.ask(here, question, picture(1))
        assert (here.stats.items_encoded, here.stats.encoder_hits) == (3, 0)
        assert here.memory()["encoder_outputs"] == 0

    def test_the_least_recently_used_goes_first(self) -> None:
        a, b, c = (picture(seed, 4, 4) for seed in (1, 2, 3))
        here = engine(MODEL, encoder_cache_bytes=8 * ROW_BYTES)  # two of four tokens
        for number, item in enumerate((a, b, a, c)):
            self.ask(here, number, item)
        assert here.memory()["encoder_outputs"] == 8 * ROW_BYTES
        encoded = here.stats.items_encoded
        self.ask(here, 8, a)
        assert here.stats.items_encoded == encoded, "b went, not a"
        self.ask(here, 9, b)
        assert here.stats.items_encoded == encoded + 1

    def test_one_that_is_larger_than_the_budget_is_not_kept(self) -> None:
        here = engine(MODEL, encoder_cache_bytes=3 * ROW_BYTES)
        self.ask(here, 1, picture(1, 4, 4))
        assert here.memory()["encoder_outputs"] == 0

    def test_one_shared_in_a_step_is_a_hit(self) -> None:
        here = engine(MODEL)
        run(here, request("a", 5, picture(1)), request("b", 6, picture(1)))
        assert (here.stats.items_encoded, here.stats.encoder_hits) == (1, 1)

    def test_a_reset_empties_it(self) -> None:
        here = engine(MODEL, encoder_cache_bytes=1 << 20)
        self.ask(here, 5, picture(1))
        here.reset()
        assert here.memory()["encoder_outputs"] == 0

    def test_the_budget_is_checked(self) -> None:
        with pytest.raises(RequestError, match="encoder_cache_bytes must be at least 0, not -1"):
            engine(MODEL, encoder_cache_bytes=-1)


def test_bytes_are_admitted_and_nonsense_refused() -> None:
    dim, generator = 12, torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (24, dim // 2), dtype=torch.uint8, generator=generator)
    levels = torch.randn(3, 256, generator=generator)
    good = VisionItem(codes, (1, 4, 6), b"1", levels, 2)
    item = request("a", 5, good)
    assert tokens(run(engine(MODEL), item)["a"]) == tokens(
        run(engine(MODEL), request("b", 5, VisionItem(good.values(), (1, 4, 6), b"2")))["b"]
    )
    bad = [
        VisionItem(codes, (1, 4, 6), b"1", levels, 1),
        VisionItem(codes.float(), (1, 4, 6), b"1", levels, 2),
        VisionItem(codes, (1, 4, 6), b"1", levels[:, :255], 2),
        VisionItem(codes, (1, 4, 6), b"1", levels.to(torch.int32), 2),
        VisionItem(codes, (1, 4, 6), b"1", levels[:0], 2),
        VisionItem(codes[0], (1, 4, 6), b"1", levels, 2),
    ]
    for wrong in bad:
        with pytest.raises(RequestError, match="has patches"):
            engine(MODEL).add(EngineRequest("a", item.prompt_ids, vision=(wrong,)))

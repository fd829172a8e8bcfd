"""The supervised engine with pocket: what comes out is what the same model gives in this process."""

import asyncio
import os
import shutil
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image, ImageDraw

import snugvl
from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.checkpoint.locate import locate
from snugvl.core.messages import Delta, Request, Stream, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import CheckpointError, DeadlineExceeded, EngineError, RequestError, RequestTooLarge
from snugvl.hardware import host
from tests.backends.waiting import ready, until

pytestmark = pytest.mark.slow


class Running:
    """A service in an event loop that lives as long as the module's tests."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.service = SupervisedEngine(EngineChoice(device="cpu"), Supervision(snapshot_s=0.05))
        self.run(self.service.start())
        self.run(ready(self.service))
        self.first = self.service.snapshot

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    pid = running.service.pid
    assert pid is not None
    running.run(running.service.close())
    running.runner.close()
    assert not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def model() -> Iterator[snugvl.Model]:
    with snugvl.load("pocket", device="cpu") as model:
        yield model


def picture(size: tuple[int, int] = (128, 96)) -> Image.Image:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((10, 8, size[0] // 3, size[1] // 2), fill="red")
    return image


REQUESTS = {
    "text": Request((user("hello"),), SamplingParams(max_tokens=40)),
    "picture": Request((user(picture(), "What is in this image?"),), SamplingParams(max_tokens=40)),
    "sampled": Request((user("hello"),), SamplingParams(max_tokens=20, temperature=0.9, seed=7, n=3)),
    "logprobs": Request((user("hello"),), SamplingParams(max_tokens=8, logprobs=2)),
    "short": Request((user(picture(), "What is in this image?"),), SamplingParams(max_tokens=4)),
    "12 megapixels": Request((user(picture((4032, 3024)), "Describe."),), SamplingParams(max_tokens=20)),
}


def joined(deltas: list[Delta]) -> list[Any]:
    """Per choice: the text, its tokens where asked for, why it ended; and the tokens counted."""
    choices = sorted({delta.choice for delta in deltas})
    return [
        [
            "".join(delta.text for delta in deltas if delta.choice == choice),
            [logprob.token for delta in deltas if delta.choice == choice for logprob in delta.logprobs],
            [delta.finish_reason for delta in deltas if delta.choice == choice and delta.finish_reason],
        ]
        for choice in choices
    ] + [delta.usage for delta in deltas if delta.usage]


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "short"])
@pytest.mark.sample("text", "picture", "logprobs")
def test_answers_as_in_this_process(name: str, running: Running, model: snugvl.Model) -> None:
    async def ask() -> list[Delta]:
        return await read(await running.service.submit(REQUESTS[name]))

    assert joined(running.run(ask())) == joined(list(model.backend.submit(REQUESTS[name])))


def test_log_probabilities_arrive_whole(running: Running, model: snugvl.Model) -> None:
    async def ask() -> list[Delta]:
        return await read(await running.service.submit(REQUESTS["logprobs"]))

    got, expected = running.run(ask()), list(model.backend.submit(REQUESTS["logprobs"]))
    ours, theirs = ([item for delta in deltas for item in delta.logprobs] for deltas in (got, expected))
    assert len(ours) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one.bytes == other.bytes
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)  # sums of floats in another order
        assert [top.token for top in one.top] == [top.token for top in other.top]


@pytest.mark.extended
def test_several_at_once(running: Running, model: snugvl.Model) -> None:
    requests = [REQUESTS["text"], REQUESTS["picture"]] * 5

    async def ask() -> list[list[Delta]]:
        streams = await asyncio.gather(*(running.service.submit(request) for request in requests))
        return list(await asyncio.gather(*map(read, streams)))

    expected = [joined(list(model.backend.submit(REQUESTS[name]))) for name in ("text", "picture")]
    assert [joined(answer) for answer in running.run(ask())] == expected * 5


def test_an_abort_frees_blocks_at_once(running: Running) -> None:
    service = running.service

    async def test() -> None:
        await until(service, lambda: service.snapshot and service.snapshot.load.running == 0)
        assert service.snapshot is not None
        every = service.snapshot.load.num_blocks
        long = Request((user("hello"),), SamplingParams(max_tokens=3000, ignore_eos=True))
        stream = await service.submit(long)
        await until(service, lambda: service.snapshot and service.snapshot.load.running == 1)
        held = service.snapshot.load.free_blocks
        assert held < every
        row = service.snapshot.ledger.row("KV cache")
        assert row is not None
        assert row.used_bytes
        assert row.measured_bytes
        stream.close()
        await until(service, lambda: service.snapshot and service.snapshot.load.running == 0)
        assert service.snapshot.load.free_blocks > held

    running.run(test())


def test_the_ledger_has_plan_and_measurement_side_by_side(running: Running) -> None:
    snapshot = running.service.snapshot
    assert snapshot is not None
    ledger = snapshot.ledger
    for name in ("text weights", "vision weights", "KV cache"):
        row = ledger.row(name)
        assert row is not None
        assert row.planned_bytes == row.measured_bytes
    assert {row.name for row in ledger.rows} >= {"encoder outputs", "workspace", "Python and libraries"}
    measured = sum(row.measured_bytes or 0 for row in ledger.rows)
    assert measured == pytest.approx(ledger.process_bytes, rel=0.05)
    assert 0 < ledger.process_bytes < ledger.total_bytes
    assert ledger.total_bytes == host.memory().total_bytes
    assert list(ledger.rows) == sorted(ledger.rows, key=lambda row: -(row.planned_bytes or 0))


def test_counters_start_at_zero(running: Running) -> None:
    """The token that warms the engine up is nobody's."""
    assert running.first is not None
    load = running.first.load
    assert (load.prompt_tokens, load.generated_tokens, load.running) == (0, 0, 0)


def test_refusals_arrive_with_their_field(running: Running) -> None:
    async def test() -> None:
        with pytest.raises(RequestTooLarge, match="tokens") as caught:
            await running.service.submit(Request((user("red " * 9000),)))
        assert caught.value.field == "messages"
        with pytest.raises(RequestError, match=r"<\|im_end\|>"):
            await running.service.submit(Request(prompt="<|im_end|>"))

    running.run(test())


def test_a_deadline_counts_from_the_submission(running: Running) -> None:
    async def test() -> None:
        late = Request((user("hello"),), SamplingParams(max_tokens=3000, ignore_eos=True), deadline_s=0.2)
        with pytest.raises(DeadlineExceeded, match="deadline"):
            await read(await running.service.submit(late))

    running.run(test())


def test_tokens_of_a_conversation_and_back(running: Running, model: snugvl.Model) -> None:
    async def test() -> None:
        tokens = await running.service.tokenize(Request((user(picture(), "hello"),)))
        assert tokens.image_tokens > 0
        assert tokens.ids.count(max(tokens.ids, key=tokens.ids.count)) >= tokens.image_tokens
        plain = await running.service.tokenize(Request(prompt="a red circle"))
        assert await running.service.detokenize(plain.ids) == "a red circle"

    running.run(test())


@pytest.mark.extended
def test_memory_stays_flat(running: Running) -> None:
    async def ask(count: int) -> None:
        for _ in range(count):
            streams = [await running.service.submit(REQUESTS["short"]) for _ in range(8)]
            streams[0].close()
            await asyncio.gather(*map(read, streams[1:]))

    assert running.service.pid is not None
    child, own = psutil.Process(running.service.pid), psutil.Process()
    running.run(ask(4))  # caches and arenas settle
    before = child.memory_info().rss, own.memory_info().rss
    running.run(ask(6))
    grown = child.memory_info().rss - before[0], own.memory_info().rss - before[1]
    assert max(grown) < 16 << 20


def test_killed_in_the_middle_of_a_stream_it_serves_again(running: Running) -> None:
    service = running.service

    async def test() -> None:
        long = Request((user("hello"),), SamplingParams(max_tokens=3000, ignore_eos=True))
        deltas = aiter(await service.submit(long))
        await anext(deltas)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            async for _ in deltas:
                pass
        await ready(service)
        assert service.health.restarts == 1
        assert await read(await service.submit(REQUESTS["text"]))

    running.run(test())


def test_a_broken_checkpoint_is_final(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(locate("pocket"), folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100_000])

    async def test() -> None:
        service = SupervisedEngine(EngineChoice(str(folder), device="cpu"))
        await service.start()
        await until(service, lambda: service.health.state == "failed")
        assert isinstance(service.failure, CheckpointError)
        assert service.failure.exit_code == 4
        assert weights.name in service.health.detail
        await service.close()
        assert weights.name in service.health.detail

    asyncio.run(test())

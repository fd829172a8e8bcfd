"""`VllmEngine` over a fake vLLM in real processes: what goes out, what comes back, and how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

from snugvl.backends.child.settings import Facts
from snugvl.backends.vllm.service import VllmEngine
from snugvl.core.ledger import LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Delta, Grammar, Request, Tool, ToolUse, Usage, Video, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    RequestError,
    RequestTooLarge,
    SnugvlError,
)
from tests.backends.vllm.helpers import answer, engine, fake, read, say
from tests.backends.waiting import ready
from tests.patience import PATIENCE_S
from tests.patience import until_async as until

pytestmark = pytest.mark.anyio
GIB = 1 << 30


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncIterator[VllmEngine]:
    """One that most tests share."""
    async with engine(fake(facts=Facts(control_tokens=("<|im_end|>",)))) as started:
        await ready(started)
        yield started


async def test_an_answer(service: VllmEngine) -> None:
    stream = await service.submit(say("one two"))
    assert stream.prompt_tokens == 7
    deltas = await read(stream)
    # The last one waits for the usage, which comes after it.
    end = Delta(deltas[-1].text, finish_reason="length", usage=Usage(7, 2, 4), completion_tokens=2)
    assert deltas[-1] == end
    assert "".join(delta.text for delta in deltas) == "one two"
    await until(lambda: service.running == 0)


async def test_capabilities_tell_what_is_known() -> None:
    facts = Facts(images=True, min_pixels=4096, max_pixels=65536, device="a GPU", weights="fp8")
    words = ("--mm-processor-kwargs", '{"max_pixels":8192}', "--dtype", "bfloat16")
    async with engine(fake(facts=facts, arguments=words)) as service:
        await ready(service)
        found = service.capabilities
        assert found is not None
        assert (found.model, found.engine, found.context_tokens) == ("echo", "vllm", 64)
        assert (found.images, found.video, found.max_pixels, found.min_pixels) == (True, False, 8192, 4096)
        assert (found.device, found.dtype, found.weights) == ("a GPU", "bfloat16", "fp8")


async def test_without_images_a_picture_is_refused() -> None:
    words = ("--limit-mm-per-prompt", '{"image":0,"video":0}')
    async with engine(fake(facts=Facts(images=True, max_pixels=99), arguments=words)) as service:
        await ready(service)
        assert service.capabilities is not None
        assert not service.capabilities.images
        with pytest.raises(RequestError, match="without images"):
            await service.submit(Request((user(Image.new("RGB", (8, 8))),)))


async def test_the_command_has_what_we_decide(service: VllmEngine) -> None:
    """The fake's answer to `show` is the body it got; its command line is checked by where it listens."""
    (delta,) = await read(await service.submit(say("show", temperature=0.5, seed=2**64 - 1, max_tokens=9)))
    body = json.loads(delta.text)
    assert body["model"] == "echo"
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.5, 1.0, 0, 0.0)
    assert (body["seed"], body["max_tokens"], body["n"]) == (-1, 9, 1)
    assert body["repetition_penalty"] == 1.0


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("long", RequestTooLarge, "maximum context length"),
        ("wrong", RequestError, "temperature is wrong"),
        ("late", RequestError, "Grammar error"),
        ("broken", EngineError, "status 500: it is broken"),
        ("garbage", EngineError, "not a JSON object"),
        ("deep", EngineError, "not a JSON object"),
    ],
)
async def test_refusals_are_ours(
    service: VllmEngine, text: str, error: type[SnugvlError], match: str
) -> None:
    with pytest.raises(error, match=match) as raised:
        await answer(service, text)
    assert type(raised.value) is error
    fields = {"wrong": "temperature", "late": "response_format", "long": "messages"}
    assert getattr(raised.value, "field", None) == fields.get(text)
    assert await answer(service, "and on") == "and on"


async def test_several_requests_at_once(service: VllmEngine) -> None:
    texts = [f"slow answer number {number}" for number in range(8)]
    assert await asyncio.gather(*(answer(service, text) for text in texts)) == texts


async def test_greedy_choices_are_asked_for_once(service: VllmEngine) -> None:
    deltas = await read(await service.submit(say("a b", n=3)))
    for choice in range(3):
        assert "".join(delta.text for delta in deltas if delta.choice == choice) == "a b"
    assert deltas[-1].usage == Usage(7, 6, 4)
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert sum(delta.finish_reason is not None for delta in deltas) == 3


async def test_a_stream_that_is_closed_ends_the_request(service: VllmEngine) -> None:
    stream = await service.submit(say("begin stall"))
    await until(lambda: service.running == 1)
    stream.close()
    await until(lambda: service.running == 0)
    assert "".join(delta.text for delta in await read(stream)) in ("", "begin")
    assert await answer(service, "next") == "next"


async def test_a_reader_that_is_cancelled_ends_the_request(service: VllmEngine) -> None:
    task = asyncio.create_task(service.submit(say("stall")))
    await until(lambda: service.running == 1)
    task.cancel()
    await until(lambda: service.running == 0)


async def test_a_deadline_passes(service: VllmEngine) -> None:
    request = Request((user("begin stall"),), deadline_s=0.1)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        await read(await service.submit(request))
    with pytest.raises(DeadlineExceeded):  # nothing came at all
        await service.submit(Request((user("stall"),), deadline_s=0.05))
    await until(lambda: service.running == 0)


async def test_a_bare_prompt_gets_what_the_context_leaves(service: VllmEngine) -> None:
    (delta,) = await read(await service.submit(Request(prompt="show it")))
    assert json.loads(delta.text)["max_tokens"] == 62
    deltas = await read(await service.submit(Request(prompt=(3, 1), sampling=SamplingParams(max_tokens=1))))
    assert [delta.text for delta in deltas] == ["xxx"]


async def test_tokens_and_back(service: VllmEngine) -> None:
    assert (await service.tokenize(Request(prompt="ab c"))).ids == (2, 1)
    assert (await service.tokenize(Request((user("abc d"),)))).ids == (3, 1)
    assert await service.detokenize((2, 1)) == "xx x"


async def test_the_ledger_has_plan_and_log_side_by_side() -> None:
    planned = (
        LedgerRow("weights: decoder", 2 * GIB, kind=Kind.WEIGHTS),
        LedgerRow("vLLM rotary cache", GIB, kind=Kind.BUFFERS),
        LedgerRow("KV cache", GIB, kind=Kind.CACHE),
        LedgerRow("CUDA graphs", GIB // 4, kind=Kind.GRAPHS),
        LedgerRow("prefill workspace", GIB // 2, kind=Kind.WORKSPACE),
    )
    async with engine(fake(planned=planned)) as service:
        await ready(service)
        assert service.snapshot is not None
        ledger, load = service.snapshot.ledger, service.snapshot.load
        rows = {row.name: (row.planned_bytes, row.measured_bytes) for row in ledger.rows}
        assert rows["weights and buffers"] == (3 * GIB, round(3.25 * GIB))
        assert rows["KV cache"] == (GIB, round(1.5 * GIB))
        assert rows["CUDA graphs"] == (GIB // 4, GIB // 4)
        assert rows["activations and libraries"][0] == GIB // 2
        cache = ledger.row("KV cache")
        assert cache is not None
        assert cache.used_bytes == round(1.5 * GIB * 0.25)
        assert ledger.process_bytes > 0
        assert (load.running, load.waiting, load.num_blocks, load.free_blocks) == (1, 2, 876, 657)
        assert (load.prompt_tokens, load.generated_tokens, load.prefix_hit_tokens) == (17, 9, 16)
        first = service.snapshot.at
        await until(lambda: service.snapshot is not None and service.snapshot.at > first)


async def test_progress_is_told() -> None:
    async with engine(fake("hang")) as service:
        assert service.capabilities is None
        await until(lambda: "vLLM knows the model" in service.health.detail)
        assert service.health.progress == 0.1
        with pytest.raises(EngineUnavailable, match="echo is loading"):
            await service.submit(say("too early"))


async def test_drain_waits_and_takes_nothing_new(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    async with engine(fake(environment=(("FAKE_NOTES", str(gate)),))) as service:
        await ready(service)
        stream = await service.submit(say("begin gate end"))
        assert not await service.drain(0.05)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await service.submit(say("late"))
        gate.touch()
        assert await service.drain(PATIENCE_S)
        assert "".join(delta.text for delta in await read(stream)) == "begin gate end"


async def test_it_sleeps_when_idle_and_wakes_for_a_request(caplog: pytest.LogCaptureFixture) -> None:
    async with engine(fake(sleep_after_s=0.1)) as service:
        await ready(service)
        await until(lambda: "sleeps" in service.health.detail)
        assert service.health.ready
        assert await answer(service, "awake") == "awake"
        assert "sleeps" not in service.health.detail


async def test_deep_sleep_reads_the_weights_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "snugvl.vllm")
    async with engine(fake(sleep_after_s=0.1, sleep_level=2)) as service:
        await ready(service)
        await until(lambda: "sleeps" in service.health.detail)
        assert await answer(service, "awake") == "awake"
    did = [text.partition(" ")[2] for text in caplog.messages if text.startswith("did ")]
    assert [text.strip() for text in did[:4]] == [
        "/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc reload_weights", "/wake_up?tags=kv_cache"
    ]  # fmt: skip


async def test_what_vllm_does_not_take(service: VllmEngine) -> None:
    video = Video((Image.new("RGB", (8, 8)),) * 2, (0.0, 1.0))
    tool = ToolUse((Tool("f"),))
    refused = {
        "no videos": Request((user(video),)),
        "control token": Request(prompt="<|im_end|>"),
        "not by both": Request((user("x"),), tools=tool, grammar=Grammar("regex", "a")),
        "tools need a conversation": Request(prompt="x", tools=tool),
        "a prompt, not both": Request((user("x"),), prompt="x"),
        "is empty; send at least one message": Request(),
        "the prompt is empty": Request(prompt=""),
        "choice is 'auto'": Request((user("x"),), tools=ToolUse((Tool("f"),), "g")),
    }
    for match, request in refused.items():
        with pytest.raises(RequestError, match=match):
            await service.submit(request)
    assert service.running == 0


def test_flags_that_are_ours_are_refused() -> None:
    with pytest.raises(RequestError, match=r"--port.*leave it out"):
        VllmEngine(fake(arguments=("--port", "80")))

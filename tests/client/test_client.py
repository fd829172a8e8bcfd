"""`snugvl.Client` and `AsyncClient` give what a loaded model gives."""

import asyncio
import copy
import io
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import snugvl
from snugvl import AsyncClient, Client, Model, SamplingParams, user
from snugvl.backends.native.backend import NativeBackend
from snugvl.client.calls import Call
from snugvl.client.clients import AHEAD, AsyncClientStream
from snugvl.client.connection import DEFAULT_URL, address_of
from snugvl.core.messages import NO_MORE, Delta, Message, Text, ToolCall
from snugvl.core.service import Health, Load
from snugvl.core.training import Training
from snugvl.inputs.image import ImageLimits
from snugvl.tasks.ask import collect
from tests.client.conftest import LEDGER, RawServer, ScriptedEngine
from tests.patience import until
from tests.photographs import photograph
from tests.server.live import live
from tests.tasks.fake import FakeBackend, images_of, prompt_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "images"
SHAPES = EXAMPLES / "shapes.png"

TASKS: dict[str, Callable[[Any], Any]] = {
    "caption": lambda m: m.caption(SHAPES),
    "detailed": lambda m: m.caption(SHAPES, detail="detailed"),
    "ask": lambda m: m.ask(SHAPES, "How many squares are there?"),
    "together": lambda m: m.ask([SHAPES, EXAMPLES / "stars.png"], "What color is the circle?"),
    "scene": lambda m: m.scene(EXAMPLES / "sign.png"),
    "detect": lambda m: m.detect(SHAPES),
    "named": lambda m: m.detect(SHAPES, ["blue square"]),
    "cut": lambda m: m.caption(SHAPES, sampling=SamplingParams(max_tokens=3)),
    "drawn": lambda m: m.caption(SHAPES, sampling=SamplingParams(temperature=1.0, seed=4)),
    "small": lambda m: m.caption(SHAPES, max_pixels=4096),
    "chat": lambda m: m.chat(user(Image.open(SHAPES).convert("RGB"), "What color is the circle?")),
}


@pytest.fixture(scope="module")
def loaded(pocket: NativeBackend) -> Callable[[str], Any]:
    """`loaded(task)`: what a loaded model gives, computed once a task."""
    return cache(lambda task: TASKS[task](Model(pocket)))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.sample("caption", "together", "scene", "detect", "cut", "drawn", "chat")
def test_a_server_gives_what_a_loaded_model_gives(url: str, loaded: Callable[[str], Any], task: str) -> None:
    with Client(url) as client:
        assert TASKS[task](client) == loaded(task)


def test_the_async_client_gives_the_same(url: str, loaded: Callable[[str], Any]) -> None:
    async def everything() -> list[Any]:
        async with AsyncClient(url) as client:
            return await asyncio.gather(*(task(client) for task in TASKS.values()))

    assert asyncio.run(everything()) == [loaded(task) for task in TASKS]


STREAMS: dict[str, Callable[[Any], Any]] = {
    "caption": lambda m: m.stream_caption(SHAPES, detail="detailed"),
    "ask": lambda m: m.stream_ask(SHAPES, "How many squares are there?"),
    "cut": lambda m: m.stream_caption(SHAPES, sampling=SamplingParams(max_tokens=3)),
    "chat": lambda m: m.stream_chat(user("Describe this image.", Image.open(SHAPES).convert("RGB"))),
    "two": lambda m: m.stream_chat(
        user(Image.open(SHAPES).convert("RGB"), "What is it?"), SamplingParams(n=2, temperature=1, seed=1)
    ),
}


def shown(deltas: list[Any]) -> Any:
    """Text and finish of every choice, and the tokens of the answer."""
    choices: dict[int, list[Any]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    return {
        number: (
            "".join(each.text for each in some),
            [each.finish_reason for each in some if each.finish_reason],
        )
        for number, some in choices.items()
    }, [delta.usage.completion_tokens for delta in deltas if delta.usage]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.sample("caption", "cut")
def test_streams_carry_the_same_answer(url: str, pocket: NativeBackend, stream: str) -> None:
    async def read() -> list[Any]:
        async with AsyncClient(url) as client, await STREAMS[stream](client) as deltas:
            return [delta async for delta in deltas]

    with STREAMS[stream](Model(pocket)) as deltas:
        wanted = list(deltas)
    with Client(url) as client, STREAMS[stream](client) as deltas:
        got = list(deltas)
    assert shown(got) == shown(wanted)
    assert len(got) > 2 or stream in ("ask", "cut")
    assert shown(asyncio.run(read())) == shown(wanted)
    if stream != "two":
        assert collect(got) == collect(wanted)


def test_log_probabilities_come_through(url: str, pocket: NativeBackend) -> None:
    sampling = SamplingParams(logprobs=2, max_tokens=4)
    question = user(Image.open(SHAPES).convert("RGB"), "What color is the circle?")
    with Client(url) as client:
        got = [each for delta in client.stream_chat(question, sampling) for each in delta.logprobs]
    wanted = [each for delta in Model(pocket).stream_chat(question, sampling) for each in delta.logprobs]
    assert [(each.token, each.bytes, len(each.top)) for each in got] == [
        (each.token, each.bytes, len(each.top)) for each in wanted
    ]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in wanted], abs=1e-4)


def test_every_kind_of_source_is_the_same_picture(engine: ScriptedEngine, scripted: str) -> None:
    data = SHAPES.read_bytes()
    sideways = Image.new("RGBA", (40, 20), (255, 0, 0, 128))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    file = io.BytesIO()
    sideways.convert("RGB").save(file, "JPEG", exif=exif)
    with Client(scripted) as client:
        for source in (SHAPES, str(SHAPES), data, io.BytesIO(data), Image.open(SHAPES)):
            client.caption(source)
        client.caption(Image.open(io.BytesIO(file.getvalue())))
        client.caption(file.getvalue())
    *same, turned, turned_too = [images_of(request)[0] for request in engine.backend.requests]
    assert {image.tobytes() for image in same} == {Image.open(SHAPES).convert("RGB").tobytes()}
    assert turned.size == turned_too.size == (20, 40)


def test_a_url_is_left_to_the_server(raw: RawServer) -> None:
    raw.says(200, b'{"text": "x", "model": "m"}')
    with Client(raw.url) as client:
        assert client.caption("https://example.org/a.png") == snugvl.Caption(text="x")
    assert b'"image":"https://example.org/a.png"' in raw.asked[0].body


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", "doesn't exist"),
        (".", "is a folder"),
        (b"", "is empty"),
        ("nul\0.png", "can't be read"),
    ],
)
def test_a_picture_that_is_not_there_is_told_before_anything_is_sent(
    raw: RawServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with Client(raw.url) as client, pytest.raises(snugvl.ImageError, match=message):
        client.caption(source)
    assert raw.asked == []


def test_a_picture_of_too_many_bytes_is_not_sent(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.client.pictures.ImageLimits", lambda: ImageLimits(max_bytes=100))
    with Client(raw.url) as client, pytest.raises(snugvl.ImageTooLarge, match="the limit is 100;"):
        client.caption(SHAPES)
    assert raw.asked == []


def test_what_is_asked_reaches_the_engine(engine: ScriptedEngine, scripted: str) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.5, seed=4)
    with Client(scripted, model="pocket") as client:
        client.ask(SHAPES, " Why? ", sampling=sampling, max_pixels=4096)
        client.chat(
            (
                Message("system", (Text("Be brief."),)),
                user(Image.new("RGB", (8, 8)), "Look."),
                Message("assistant", (), (ToolCall("c1", "look", '{"x": 1}'),)),
                Message("tool", (Text("seen"),), tool_call_id="c1"),
                Message("assistant", (Text("Yes."),)),
                user("And now?"),
            ),
            SamplingParams(
                max_tokens=9, temperature=0.5, seed=4, top_p=0.5, top_k=3, stop=("z",), logit_bias={7: 1.5},
                presence_penalty=0.1, min_p=0.1, repetition_penalty=1.1,
            ),
        )  # fmt: skip
    ask, chat = engine.backend.requests
    assert (prompt_of(ask), ask.sampling, ask.messages[0].content[0].max_pixels) == ("Why?", sampling, 4096)
    assert [message.role for message in chat.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert chat.messages[2].tool_calls == (ToolCall("c1", "look", '{"x": 1}'),)
    assert chat.messages[3].tool_call_id == "c1"
    assert images_of(engine.backend.requests[1].__class__(messages=(chat.messages[1],)))[0].size == (8, 8)
    assert chat.sampling.stop == ("z",)
    assert chat.sampling.logit_bias == {7: 1.5}
    assert (chat.sampling.top_k, chat.sampling.min_p, chat.sampling.repetition_penalty) == (3, 0.1, 1.1)


def test_health_memory_and_models(engine: ScriptedEngine, scripted: str) -> None:
    async def three() -> list[Any]:
        async with AsyncClient(scripted) as client:
            return [await client.health(), await client.memory(), await client.models()]

    with Client(scripted + "/v1/") as client:
        health, memory, models = client.health(), client.memory(), client.models()
        assert health == Health("ready", "fake is ready")
        assert (memory.ledger, memory.load, memory.at) == (LEDGER, engine.load, 1000.0)
        assert memory.health == health
        assert models == ("pocket",)
        assert asyncio.run(three()) == [health, memory, models]
        engine.health = Health("restarting", "it crashed; starting again", 0.5, 3, 2.0)
        told = client.health()
        assert not told.ready
        assert asdict(told) | {"retry_after_s": 2.0} == asdict(engine.health)
        assert client.memory().health.state == "restarting"
        engine.load = Load()


def test_a_closed_stream_stops_the_server(engine: ScriptedEngine, scripted: str) -> None:
    engine.delay = 0.02
    engine.backend._script = lambda _: "word " * 100_000
    with Client(scripted) as client, client.stream_caption(SHAPES) as stream:
        next(iter(stream))
    (served,) = engine.backend.streams
    until(lambda: served.closed)


def test_a_warning_of_a_server_points_at_the_line_of_the_program() -> None:
    backend = FakeBackend()
    backend.described = replace(backend.described, training=Training(drawings=True, min_images=1))
    shown = photograph(96, 64)

    async def asked(url: str) -> None:
        async with snugvl.AsyncClient(url) as client:
            await client.caption(shown)

    with live(ScriptedEngine(backend)) as url:
        with snugvl.Client(url) as client, pytest.warns(snugvl.SnugvlWarning) as found:
            client.caption(shown)
        with pytest.warns(snugvl.SnugvlWarning) as also:
            asyncio.run(asked(url))
    assert [each.filename for each in (*found, *also)] == [__file__, __file__]


def test_a_stream_that_was_read_or_closed_is_at_its_end(url: str, pocket: NativeBackend) -> None:
    """As that of a loaded model is: it had broken off, the client said, once more read or after its close."""

    async def there() -> list[int]:
        async with AsyncClient(url) as client:
            stream = await client.stream_caption(SHAPES)
            once = [delta async for delta in stream]
            again = [delta async for delta in stream]
            closed = await client.stream_caption(SHAPES)
            await closed.close()
            return [bool(once), len(again), len([delta async for delta in closed])]

    with Client(url) as client:
        for model in (client, Model(pocket)):
            stream = model.stream_caption(SHAPES)
            assert list(stream)
            assert list(stream) == []
        closed = client.stream_caption(SHAPES)
        next(iter(closed))
        closed.close()
        assert list(closed) == []
        client.caption(SHAPES)
    assert asyncio.run(there()) == [True, 0, 0]


def test_a_stream_is_an_iterator(url: str, pocket: NativeBackend) -> None:
    """`next` works, a loop goes on where another one stopped, and the end says why there is no more."""

    async def there(stream: Any) -> tuple[list[str], str]:
        texts = [str(await anext(stream))]
        async for delta in stream:
            texts.append(str(delta))
            break
        texts += [str(delta) async for delta in stream]
        with pytest.raises(StopAsyncIteration) as ended:
            await anext(stream)
        return texts, str(ended.value)

    def here(stream: Any) -> tuple[list[str], str]:
        texts = [str(next(stream))]
        for delta in stream:
            texts.append(str(delta))
            break
        texts += map(str, stream)
        with pytest.raises(StopIteration) as ended:
            next(stream)
        return texts, str(ended.value)

    async def asked() -> list[tuple[list[str], str]]:
        async with AsyncClient(url) as client:
            chat = client.chat()
            streams = (
                await client.stream_ask(SHAPES, "What is here?"),
                await chat.stream(SHAPES, "What is here?"),
            )
            found = [await there(stream) for stream in streams]
            assert len(chat.messages) == 2
            return found

    whole = Model(pocket).ask(SHAPES, "What is here?").text
    found = asyncio.run(asked())
    with Client(url) as client:
        for model in (client, Model(pocket)):
            chat = model.chat()
            found += [
                here(model.stream_ask(SHAPES, "What is here?")),
                here(chat.stream(SHAPES, "What is here?")),
            ]
            assert len(chat.messages) == 2
    found.append(asyncio.run(there(Model(pocket).stream_ask(SHAPES, "What is here?"))))
    assert [("".join(texts), why) for texts, why in found] == [(whole, NO_MORE)] * 7


def test_a_closed_client_says_so_to_its_streams(url: str) -> None:
    async def there() -> None:
        client = AsyncClient(url)
        stream = await client.stream_caption(SHAPES)
        await anext(stream)
        await client.close()
        with pytest.raises(snugvl.EngineError, match="the client is closed"):
            [delta async for delta in stream]

    client = Client(url)
    stream = client.stream_caption(SHAPES)
    next(stream)
    client.close()
    with pytest.raises(snugvl.EngineError, match="the client is closed"):
        list(stream)
    asyncio.run(there())


def test_a_client_may_be_pickled_and_copied(url: str) -> None:
    options: dict[str, Any] = {"api_key": "k", "model": "pocket", "timeout": 9.0, "max_retries": 1}
    with Client(url, **options) as client:
        wanted = client.caption(SHAPES).text
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            # By a function that is not of this module: the other process would import torch for it.
            assert pool.submit(operator.methodcaller("caption", SHAPES), client).result().text == wanted
        again = pickle.loads(pickle.dumps(client))
        assert again.openai is not client.openai
        assert (again.openai.api_key, again.openai.timeout.read, again.openai.max_retries) == ("k", 9.0, 1)
        chat = client.chat()
        chat.send(SHAPES, "What is it?")
        for other in (again, copy.copy(client), copy.deepcopy(client)):
            with other:
                assert other.caption(SHAPES).text == wanted
        assert len(copy.deepcopy(chat).messages) == 2

    async def there() -> str:
        async with copy.deepcopy(AsyncClient(url, **options)) as other:
            return (await other.caption(SHAPES)).text

    assert asyncio.run(there()) == wanted


LEFT = """
import asyncio, gc, sys
import snugvl

async def left() -> None:
    client = snugvl.AsyncClient(sys.argv[1])
    for stream in await client.stream_caption(sys.argv[2]), await client.chat().stream(sys.argv[2]):
        async for delta in stream:
            break
    await client.stream_caption(sys.argv[2])  # never read

async def dropped() -> None:
    async with snugvl.AsyncClient(sys.argv[1]) as client:
        async for delta in await client.stream_caption(sys.argv[2]):
            break

asyncio.run(left())
asyncio.run(dropped())
gc.collect()
"""


def test_a_stream_that_nobody_reads_is_not_read_ahead_without_end() -> None:
    read = 0

    class Events:
        def __aiter__(self) -> "Events":
            return self

        async def __anext__(self) -> object:
            nonlocal read
            await asyncio.sleep(0)
            read += 1
            return read

        async def close(self) -> None:
            nonlocal read
            read = -1

    async def test() -> None:
        call = Call("/v1/chat/completions", {}, lambda number: (Delta(str(number)),))
        events: Any = Events()
        async with AsyncClientStream(address_of(DEFAULT_URL), call, events, lambda: False) as stream:
            assert (await anext(stream)).text == "1"
            for _ in range(10 * AHEAD):
                await asyncio.sleep(0)
            assert read <= AHEAD + 3
            assert [(await anext(stream)).text for _ in range(3 * AHEAD)][-1] == str(3 * AHEAD + 1)
        assert read == -1, "its work is stopped"

    asyncio.run(test())


def test_a_stream_that_a_loop_leaves_makes_no_noise(url: str) -> None:
    """asyncio printed errors of the HTTP library's generators, all of which it closed at once."""
    run = subprocess.run(
        [sys.executable, "-c", LEFT, url, SHAPES], capture_output=True, text=True, check=True
    )
    assert run.stdout + run.stderr == ""


def test_a_stream_that_is_dropped_stops_the_server(engine: ScriptedEngine, scripted: str) -> None:
    async def dropped() -> None:
        async with AsyncClient(scripted) as client:
            async for _ in await client.stream_caption(SHAPES):
                break
            (served,) = engine.backend.streams
            await asyncio.to_thread(until, lambda: served.closed)

    engine.delay = 0.02
    engine.backend._script = lambda _: "word " * 100_000
    asyncio.run(dropped())


@pytest.mark.parametrize("path", ["/version", "version", "//version"])
def test_a_path_may_begin_with_a_slash_or_not(url: str, path: str) -> None:
    with Client(url) as client:
        assert client.get(path) == {"version": snugvl.__version__}
        with pytest.raises(snugvl.RequestError, match="there is no GET /http:"):
            client.get("http://example.org/x")

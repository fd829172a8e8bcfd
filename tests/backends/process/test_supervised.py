"""The supervisor over a fake engine in a real process: what it passes on, and to whom."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from snugvl.backends.preparers import LIGHT, LONG_TEXT
from snugvl.backends.process.supervised import SupervisedEngine, Supervision
from snugvl.backends.process.wire import Arena
from snugvl.core.messages import Picture, Request, Text, user
from snugvl.core.resources import Region
from snugvl.core.sampling import SamplingParams
from snugvl.errors import (
    EngineError,
    EngineUnavailable,
    OutputError,
    QueueFull,
    RequestTooLarge,
    SnugvlError,
)
from tests.backends.process.supervised import FOREVER, engine, read, run, say
from tests.backends.waiting import ready, until
from tests.patience import PATIENCE_S, until_async


def test_loads_serves_and_leaves_no_process() -> None:
    async def test() -> None:
        async with engine() as service:
            assert service.health.state == "starting"
            assert service.capabilities is None
            await ready(service)
            assert service.capabilities is not None
            assert service.capabilities.model == "fake"
            stream = await service.submit(say("hello"))
            assert stream.prompt_tokens == 1
            deltas = await read(stream)
            assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 "
            assert deltas[-1].finish_reason == "length"
            assert deltas[-1].usage is not None
            assert await service.tokenize(Request(prompt="ab")) == await service.tokenize(
                Request(prompt="ab")
            )
            assert (await service.tokenize(Request(prompt="ab"))).ids == (97, 98)
            assert await service.detokenize((97, 98)) == "ab"
            assert service.snapshot is not None
            assert service.snapshot.ledger.device == "nothing"
            pid = service.pid
            assert pid is not None
            assert psutil.pid_exists(pid)
        assert not psutil.pid_exists(pid)
        await service.close()
        with pytest.raises(EngineUnavailable, match="shut down"):
            await service.submit(say("hello"))

    run(test())


@pytest.mark.parametrize(("model", "with_pixels"), [("echo", 0), ("sees", 1)])
def test_pictures_that_are_counted_bring_their_pixels_where_the_engine_counts_by_them(
    model: str, with_pixels: int
) -> None:
    async def test() -> None:
        async with engine(model) as service:
            await ready(service)
            shown = (user(Picture(Image.new("RGB", (2, 2))), Text("hello")),)
            assert (await service.tokenize(Request(shown))).ids == (with_pixels,)

    run(test())


def test_a_thread_may_read_a_stream() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello"))
            deltas = await asyncio.to_thread(list, stream)
            assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 "

    run(test())


def test_says_how_loading_goes_and_takes_nothing_meanwhile() -> None:
    async def test() -> None:
        async with engine("slow") as service:
            await until(service, lambda: "pretending" in service.health.detail)
            assert service.health.progress == 0.5
            with pytest.raises(EngineUnavailable, match="slow is loading: pretending") as caught:
                await service.submit(say("hello"))
            assert caught.value.retry_after_s >= 1
            with pytest.raises(EngineUnavailable):
                await service.tokenize(Request(prompt="hello"))

    run(test())


@pytest.mark.parametrize(
    ("text", "kind", "message", "attributes"),
    [
        ("large", RequestTooLarge, "9 tokens, at most 8 fit", {"field": "messages"}),
        ("full", QueueFull, "256 requests are waiting already", {"retry_after_s": 1.0}),
        ("output", OutputError, "no boxes", {"text": "the answer"}),
        ("bug", EngineError, "the engine failed: ZeroDivisionError: a bug", {}),
        ("odd", EngineError, "odd 1 2", {}),
    ],
)
def test_a_refusal_keeps_its_class_message_and_attributes(
    text: str, kind: type[SnugvlError], message: str, attributes: dict[str, Any]
) -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            with pytest.raises(SnugvlError) as caught:
                await service.submit(say(text))
            assert type(caught.value) is kind
            assert str(caught.value) == message
            for name, value in attributes.items():
                assert getattr(caught.value, name) == value
            assert await read(await service.submit(say("hello")))  # and nothing else is harmed

    run(test())


@pytest.mark.parametrize("leave", ["close", "drop", "cancel"])
def test_a_reader_that_leaves_ends_its_request(leave: str) -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello", FOREVER))
            await until(service, lambda: service.snapshot and service.snapshot.load.running == 1)
            if leave == "close":
                stream.close()
                stream.close()
                assert len(await read(stream)) <= 2  # what was there, what was on its way, then the end
            elif leave == "cancel":
                reader = asyncio.create_task(read(stream))
                await asyncio.sleep(0.02)
                reader.cancel()
                await asyncio.wait([reader])
                del reader
            del stream
            await until(service, lambda: service.snapshot and service.snapshot.load.running == 0)
            assert service._life is not None
            assert service._life.running == 0

    run(test())


def test_a_request_cancelled_while_it_is_prepared_never_runs() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            submitting = asyncio.create_task(service.submit(say("wait", FOREVER)))
            await until(service, lambda: service.snapshot and service.snapshot.load.waiting == 1)
            submitting.cancel()
            for _ in range(2):  # the second question follows the cancellation through the same socket
                await service.tokenize(Request(prompt="a"))
            assert service._life is not None
            assert not submitting.done(), "its work goes on, and counts"
            assert service._life.running == 1
            await read(await service.submit(say("release")))  # it would run now
            await asyncio.wait([submitting])
            assert submitting.cancelled()
            assert service._life.running == 0
            assert service.snapshot is not None
            seen = service.snapshot.at
            await until(service, lambda: service.snapshot and service.snapshot.at > seen)
            await until(service, lambda: service.snapshot and service.snapshot.load.running == 0)
            assert service.snapshot.load.items_encoded == 1, "the answer to what released it, and no other"

    run(test())


def test_a_request_cancelled_before_it_is_prepared_is_not_prepared_at_all() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            # As many as are prepared at once, so that the next one waits for its turn.
            others = [asyncio.create_task(service.submit(say("wait"))) for _ in range(LIGHT)]
            await until(service, lambda: service.snapshot and service.snapshot.load.waiting == LIGHT)
            submitting = asyncio.create_task(service.submit(say("tire")))  # which no engine survives
            await until(service, lambda: service._life and service._life.running == LIGHT + 1)
            submitting.cancel()
            heavy = Request((user(Text("release")), user(Text(" " * 2 * LONG_TEXT))))  # doesn't wait for them
            await read(await service.submit(heavy))
            await asyncio.wait([submitting, *others])
            assert submitting.cancelled()
            assert service.snapshot is not None
            seen = service.snapshot.at
            await until(service, lambda: service.snapshot and service.snapshot.at > seen)
            assert service.health.restarts == 0

    run(test())


def test_a_prompt_that_takes_long_to_prepare_holds_up_nobody() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            slow = asyncio.create_task(service.submit(say("wait")))
            await asyncio.sleep(0)  # it goes first
            await read(await service.submit(say("release")))
            assert await read(await slow)

    run(test())


def show(red: int, size: tuple[int, int] = (100, 100), text: str = "look") -> Request:
    message = user(Text(text), Image.new("RGB", size, (red, 0, 0)))
    return Request((message,), SamplingParams(max_tokens=1))


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")
@pytest.mark.parametrize("shared", [None, 4096, 100_000, 10_000_000])
def test_pictures_come_to_their_own_requests_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, shared: int | None
) -> None:
    """Through no shared memory, too little, enough for a few, enough for all."""
    made = Region.made
    monkeypatch.setattr(Region, "made", lambda _: None if shared is None else made(shared))

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            for _ in range(2):
                streams = await asyncio.gather(*(service.submit(show(red)) for red in range(1, 21)))
                assert [stream.prompt_tokens for stream in streams] == list(range(1, 21))
                await asyncio.gather(*map(read, streams))
            assert shared is None or not arena_of(service)._used

    run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")
def test_pictures_of_requests_that_are_given_up_leave_nothing_behind() -> None:
    """Before they are packed, while they are, and in every state that they have in the engine's process."""

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            for pause_s in (0.0, 0.002, 0.01, 0.1):
                # More than prepare at once, so that some wait for their turn.
                begun = [asyncio.create_task(service.submit(show(9, (700, 700), "think"))) for _ in range(6)]
                await asyncio.sleep(pause_s)
                for each in begun:
                    each.cancel()
                await asyncio.wait(begun)
            assert (await service.submit(show(7))).prompt_tokens == 7
            await until(service, lambda: not arena_of(service)._used)

    run(test())


def arena_of(service: SupervisedEngine) -> Arena:
    assert service._life is not None
    assert service._life._arena is not None
    return service._life._arena


def test_an_unread_stream_is_merged_and_loses_nothing() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello", 300))
            assert service._life is not None
            await until(service, lambda: service._life and service._life.running == 0)
            deltas = await read(stream)
            assert "".join(delta.text for delta in deltas) == "".join(f"{i} " for i in range(300))
            assert len(deltas) == 1
            assert deltas[0].usage is not None

    run(test())


def test_no_secret_goes_to_the_child_and_its_output_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SNUGVL_API_KEY", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("HF_HOME_OF_TESTS", "x")

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            await read(await service.submit(say("print the environment")))
            await until(service, lambda: "HF_HOME_OF_TESTS" in caplog.text)
            assert "SNUGVL_API_KEY" not in caplog.text
            assert "HF_TOKEN" not in caplog.text

    run(test())


def test_the_servers_side_imports_no_torch() -> None:
    code = "import sys, snugvl.backends.process.supervised; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_engine_logs_is_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    """Remarks come as such; warnings over stderr, among the last words that a death is explained by."""
    caplog.set_level("DEBUG", "snugvl")

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            await read(await service.submit(say("log")))
            await until(service, lambda: {"a remark about 1", "a warning"} <= set(caplog.messages))

    run(test())
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert (levels["a remark about 1"], levels["a warning"]) == ("INFO", "WARNING")
    assert "a detail" not in levels


def test_ctrl_c_in_the_terminal_is_the_servers_business() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            assert service.pid is not None
            assert os.getpgid(service.pid) != os.getpgid(0)
            os.kill(service.pid, signal.SIGINT)
            assert await read(await service.submit(say("hello")))
            assert service.health.restarts == 0

    run(test())


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [Supervision().pause_s(deaths) for deaths in (1, 2, 3, 4, 5, 8, 9, 10_000)]
    assert pauses == [0, 0, 1, 2, 4, 32, 60, 60]


@pytest.mark.slow
def test_memory_that_others_took_meanwhile_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(f"once {tmp_path / 'loaded'}") as service:
            await ready(service)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            told = r"needs 9 GiB, 1 GiB is free; that was \d+ times"
            await until_async(  # state and text of one moment: it is soon tried again
                lambda: (now := service.health).state == "restarting" and re.search(told, now.detail)
            )
            (tmp_path / "loaded").unlink()
            await ready(service)

    run(test())


def test_drain_waits_for_what_runs_and_refuses_what_is_new() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello", 100))
            endless = await service.submit(say("hello", 100_000))
            assert not await service.drain(0.01)
            assert service.health.state == "draining"
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await service.submit(say("hello"))
            assert len("".join(delta.text for delta in await read(stream)).split()) == 100
            endless.close()
            assert await service.drain(PATIENCE_S)

    run(test())

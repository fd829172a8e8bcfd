"""The supervisor over a fake engine in a real process: every way to die, and every way back."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from snugvl.backends.arena import Arena
from snugvl.backends.protocol import Delta, Request, Stream, Text, user
from snugvl.backends.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.errors import (
    CheckpointError,
    EngineError,
    EngineUnavailable,
    OutputError,
    QueueFull,
    RequestTooLarge,
    SnugvlError,
)
from snugvl.region import Region
from snugvl.sampling import SamplingParams

COMMAND = (sys.executable, str(Path(__file__).parent / "fake_child.py"))
QUICK = Supervision(ping_s=0.05, snapshot_s=0.02, backoff_s=0.05, watchdog_s=30.0)
PATIENCE_S = 60.0


@asynccontextmanager
async def engine(model: str = "echo", supervision: Supervision = QUICK) -> AsyncIterator[SupervisedEngine]:
    service = SupervisedEngine(EngineChoice(model), supervision, COMMAND)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def say(text: str, tokens: int = 5) -> Request:
    return Request((user(Text(text)),), SamplingParams(max_tokens=tokens))


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


def test_loads_serves_and_leaves_no_process() -> None:
    async def test() -> None:
        async with engine() as service:
            assert service.health.state == "starting"
            assert service.capabilities is None
            await until(lambda: service.health.ready)
            assert service.capabilities is not None
            assert service.capabilities.model == "fake"
            stream = await service.submit(say("hello"))
            assert stream.prompt_tokens == 1
            deltas = await read(stream)
            assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 "
            assert deltas[-1].finish_reason == "length"
            assert deltas[-1].usage is not None
            assert await service.tokenize("ab") == await service.tokenize("ab")
            assert (await service.tokenize("ab")).ids == (97, 98)
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


def test_a_thread_may_read_a_stream() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            stream = await service.submit(say("hello"))
            deltas = await asyncio.to_thread(list, stream)
            assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 "

    run(test())


def test_says_how_loading_goes_and_takes_nothing_meanwhile() -> None:
    async def test() -> None:
        async with engine("slow") as service:
            await until(lambda: "pretending" in service.health.detail)
            assert service.health.progress == 0.5
            with pytest.raises(EngineUnavailable, match="slow is loading: pretending") as caught:
                await service.submit(say("hello"))
            assert caught.value.retry_after_s >= 1
            with pytest.raises(EngineUnavailable):
                await service.tokenize("hello")

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
            await until(lambda: service.health.ready)
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
            await until(lambda: service.health.ready)
            stream = await service.submit(say("hello", 100_000))
            await until(lambda: service.snapshot and service.snapshot.load.running == 1)
            if leave == "close":
                stream.close()
                stream.close()
                assert len(await read(stream)) <= 1  # what was there, then the end
            elif leave == "cancel":
                reader = asyncio.create_task(read(stream))
                await asyncio.sleep(0.02)
                reader.cancel()
                await asyncio.wait([reader])
                del reader
            del stream
            await until(lambda: service.snapshot and service.snapshot.load.running == 0)
            assert service._process is not None
            assert service._process.running == 0

    run(test())


def test_a_request_cancelled_while_it_is_prepared_never_runs() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            submitting = asyncio.create_task(service.submit(say("think", 100_000)))
            await asyncio.sleep(0.1)
            submitting.cancel()
            await asyncio.wait([submitting])
            assert service._process is not None
            assert service._process.running == 0
            await read(await service.submit(say("think")))  # longer than the other would take to start
            await until(lambda: service.snapshot and service.snapshot.load.running == 0)

    run(test())


def test_a_prompt_that_takes_long_to_prepare_holds_up_nobody() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
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
            await until(lambda: service.health.ready)
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
            await until(lambda: service.health.ready)
            for pause_s in (0.0, 0.002, 0.01, 0.1):
                # More than prepare at once, so that some wait for their turn.
                begun = [asyncio.create_task(service.submit(show(9, (700, 700), "think"))) for _ in range(6)]
                await asyncio.sleep(pause_s)
                for each in begun:
                    each.cancel()
                await asyncio.wait(begun)
            assert (await service.submit(show(7))).prompt_tokens == 7
            await until(lambda: not arena_of(service)._used)

    run(test())


def arena_of(service: SupervisedEngine) -> Arena:
    assert service._process is not None
    assert service._process._arena is not None
    return service._process._arena


def test_an_unread_stream_is_merged_and_loses_nothing() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            stream = await service.submit(say("hello", 300))
            assert service._process is not None
            await until(lambda: service._process and service._process.running == 0)
            deltas = await read(stream)
            assert "".join(delta.text for delta in deltas) == "".join(f"{i} " for i in range(300))
            assert len(deltas) == 1
            assert deltas[0].usage is not None

    run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_ends_streams_with_an_error_and_the_engine_comes_back(how: signal.Signals) -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            streams = [await service.submit(say("hello", 100_000)) for _ in range(3)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            preparing = asyncio.create_task(service.submit(say("think")))
            await asyncio.sleep(0.05)
            pid = service.pid
            assert pid is not None
            os.kill(pid, how)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            for end in ends:
                assert type(end) is EngineError
                assert f"signal {int(how)}, {how.name}" in str(end)
                assert "it is starting again" in str(end)
            refused = (await asyncio.gather(preparing, return_exceptions=True))[0]
            assert isinstance(refused, EngineUnavailable)
            assert service.health.state == "restarting"
            assert how.name in service.health.detail
            assert service.capabilities is not None
            with pytest.raises(EngineUnavailable, match=how.name) as caught:
                await service.submit(say("hello"))
            assert caught.value.retry_after_s >= 1
            await until(lambda: service.health.ready)
            assert service.health.restarts == 1
            assert service.pid != pid
            assert await read(await service.submit(say("hello")))

    run(test())


def test_ctrl_c_in_the_terminal_is_the_servers_business() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            assert service.pid is not None
            assert os.getpgid(service.pid) != os.getpgid(0)
            os.kill(service.pid, signal.SIGINT)
            assert await read(await service.submit(say("hello")))
            assert service.health.restarts == 0

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("abort", "SIGABRT.*the GPU's memory ran out.*CUDA out of memory. Tried to allocate 2 GiB"),
        ("bug", "exit code 1.*ZeroDivisionError: a bug while loading"),
    ],
)
def test_deaths_in_a_row_back_off_and_say_why(model: str, why: str) -> None:
    async def test() -> None:
        async with engine(model, Supervision(ping_s=0.05, backoff_s=0.01, backoff_max_s=1000.0)) as service:
            await until(lambda: service._deaths >= 2)
            assert service.health.state in ("starting", "restarting")
            await until(lambda: "4 times in a row, it starts again in 0.02 s" in service.health.detail)
            assert service.failure is None
            with pytest.raises(EngineUnavailable, match=f"(?s){why}"):
                await service.submit(say("hello"))

    run(test())


def test_a_process_that_can_not_be_started_is_tried_again() -> None:
    async def test() -> None:
        service = SupervisedEngine(EngineChoice(), Supervision(backoff_s=0.01), ("/not/there",))
        await service.start()
        await until(
            lambda: "can't be started" in service.health.detail and "3 times" in service.health.detail
        )
        assert service.health.state == "restarting"
        await service.close()

    run(test())


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [Supervision().pause_s(deaths) for deaths in (1, 2, 3, 4, 5, 8, 9, 10_000)]
    assert pauses == [0, 0, 1, 2, 4, 32, 60, 60]


@pytest.mark.slow
def test_a_death_long_after_ready_is_not_in_a_row() -> None:
    async def test() -> None:
        async with engine(supervision=Supervision(ping_s=0.05, settle_s=0.0)) as service:
            for round_ in range(4):
                await until(lambda count=round_: service.health.ready and service.health.restarts == count)  # type: ignore[misc]
                assert service.pid is not None
                os.kill(service.pid, signal.SIGKILL)
                await until(lambda: not service.health.ready)
                assert "in a row" not in service.health.detail

    run(test())


def test_an_error_that_loading_reports_is_final() -> None:
    async def test() -> None:
        async with engine("broken") as service:
            await until(lambda: service.health.state == "failed")
            assert type(service.failure) is CheckpointError
            assert service.health.detail == "model.safetensors is truncated"
            with pytest.raises(EngineUnavailable, match=r"model\.safetensors is truncated"):
                await service.submit(say("hello"))
            await until(lambda: service.pid is None)
            assert service.health.state == "failed"

    run(test())


@pytest.mark.slow
def test_memory_that_others_took_meanwhile_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(f"once {tmp_path / 'loaded'}") as service:
            await until(lambda: service.health.ready)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            await until(lambda: "needs 9 GiB, 1 GiB is free; that was 3 times" in service.health.detail)
            assert service.health.state == "restarting"
            (tmp_path / "loaded").unlink()
            await until(lambda: service.health.ready)

    run(test())


@pytest.mark.slow
def test_a_process_that_stops_answering_is_killed() -> None:
    async def test() -> None:
        async with engine(supervision=Supervision(ping_s=0.05, watchdog_s=0.5)) as service:
            await until(lambda: service.health.ready)
            stream = await service.submit(say("hello", 100_000))
            assert service.pid is not None
            os.kill(service.pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match="hung: it has not answered for"):
                await read(stream)
            await until(lambda: service.health.ready)

    run(test())


@pytest.mark.slow
def test_a_step_that_never_ends_is_killed() -> None:
    async def test() -> None:
        supervision = Supervision(ping_s=0.05, snapshot_s=0.05, watchdog_s=1.0)
        async with engine("stuck", supervision) as service:
            await until(lambda: "a step lasted more than 1 s" in service.health.detail)
            assert service.health.state == "restarting"

    run(test())


def test_drain_waits_for_what_runs_and_refuses_what_is_new() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
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


@pytest.mark.slow
def test_close_ends_streams_and_a_process_that_does_not_listen() -> None:
    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            stream = await service.submit(say("hello", 100_000))
            pid = service.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await service.close()
            with pytest.raises(EngineError, match=r"^the server has shut down$"):
                await read(stream)
            assert not psutil.pid_exists(pid)

    run(test())


def test_close_while_starting() -> None:
    async def test() -> None:
        async with engine("slow") as service:
            await until(lambda: service.pid)
            pid = service.pid
            assert pid is not None
        assert not psutil.pid_exists(pid)

    run(test())


def test_no_secret_goes_to_the_child_and_its_output_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SNUGVL_API_KEY", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("HF_HOME_OF_TESTS", "x")

    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            await read(await service.submit(say("print the environment")))
            await until(lambda: "HF_HOME_OF_TESTS" in caplog.text)
            assert "SNUGVL_API_KEY" not in caplog.text
            assert "HF_TOKEN" not in caplog.text

    run(test())


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import asyncio\n"
        "from snugvl.backends.supervised import EngineChoice, SupervisedEngine\n"
        "async def main():\n"
        f"    service = SupervisedEngine(EngineChoice('echo'), command={COMMAND!r})\n"
        "    await service.start()\n"
        "    while not service.health.ready: await asyncio.sleep(0.01)\n"
        "    print(service.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
    gone, _ = psutil.wait_procs([child], timeout=PATIENCE_S)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_the_servers_side_imports_no_torch() -> None:
    code = "import sys, snugvl.backends.supervised; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_engine_logs_is_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    """Remarks come as such; warnings over stderr, among the last words that a death is explained by."""
    caplog.set_level("DEBUG", "snugvl")

    async def test() -> None:
        async with engine() as service:
            await until(lambda: service.health.ready)
            await read(await service.submit(say("log")))
            await until(lambda: {"a remark about 1", "a warning"} <= set(caplog.messages))

    run(test())
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert (levels["a remark about 1"], levels["a warning"]) == ("INFO", "WARNING")
    assert "a detail" not in levels

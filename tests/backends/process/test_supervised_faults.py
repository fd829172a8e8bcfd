"""The supervisor over a fake engine in a real process: after faults on either side it serves again."""

import asyncio
import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.backends.process import life, wire
from snugvl.backends.process.launch import Launched
from snugvl.backends.process.supervised import SupervisedEngine
from snugvl.backends.spawned import Log
from snugvl.backends.supervisor import Lives
from snugvl.core.messages import Request, user
from snugvl.core.resources import OWNER
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError
from tests.backends.process.supervised import FOREVER, QUICK, engine, read, run, say
from tests.backends.process.test_supervised import arena_of
from tests.backends.waiting import ready, until
from tests.patience import NEVER_S, PATIENCE_S, until_async


async def serves_again(service: SupervisedEngine, lives: int = 1) -> None:
    """Wait until it has been started so often again, and see that it answers."""
    await until(service, lambda: service.health.ready and service.health.restarts >= lives)
    assert await read(await service.submit(say("hello")))


def test_an_engine_error_of_what_is_asked_beside_requests_is_a_death() -> None:
    """As of an engine whose thread has ended: it came out as an error of loading, which is final."""

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            running = await service.submit(say("hello", FOREVER))
            with pytest.raises(EngineError, match="the model is closed"):
                await read(await service.submit(say("tire", FOREVER)))
            with pytest.raises(EngineError, match="the model is closed"):
                await read(running)
            await serves_again(service)

    run(test())


def test_an_error_of_a_later_loading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that a disk doesn't give today, once it was loaded."""
    first = SupervisedEngine._became_ready

    async def test() -> None:
        async with engine() as service:

            def became_ready(self: SupervisedEngine, notice: wire.Ready) -> None:
                first(self, notice)
                monkeypatch.setattr(SupervisedEngine, "_became_ready", first)
                self._notice(wire.Failed(EngineError("the disk doesn't answer")))

            monkeypatch.setattr(SupervisedEngine, "_became_ready", became_ready)
            await serves_again(service)
            assert service.failure is None

    run(test())


@pytest.mark.parametrize(
    ("owner", "what"),
    [(Log, "feed"), (life.EngineProcess, "ping"), (life.EngineProcess, "_deliver")],
)
@pytest.mark.sample("Log-feed")
def test_a_bug_of_the_servers_side_ends_the_process_and_not_the_service(
    monkeypatch: pytest.MonkeyPatch, owner: type, what: str
) -> None:
    """Of a task that nobody waits for, too: what reads the output, and what looks whether it hangs."""
    right = getattr(owner, what)

    def wrong(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, what, right)
        raise ZeroDivisionError("a bug")

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello", FOREVER))
            monkeypatch.setattr(owner, what, wrong)
            with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
                await read(await service.submit(say("print the environment", FOREVER)))
            with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
                await read(stream)
            await serves_again(service)

    run(test())


def test_a_bug_of_a_whole_life_is_a_death_once_there_was_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            right, process = SupervisedEngine._end_requests, service._life
            assert process is not None

            def wrong(self: SupervisedEngine, *arguments: Any) -> None:
                monkeypatch.setattr(SupervisedEngine, "_end_requests", right)
                right(self, *arguments)
                raise ZeroDivisionError("a bug")

            monkeypatch.setattr(SupervisedEngine, "_end_requests", wrong)
            process.kill("enough")
            await serves_again(service)

    run(test())


def test_a_bug_of_the_first_life_is_final() -> None:
    async def broken() -> float | None:
        raise ZeroDivisionError("a bug")

    async def test() -> None:
        lives = Lives(QUICK, "not started")
        lives.start("starting", broken)
        await until_async(lambda: lives.state == "failed")
        assert "ZeroDivisionError: a bug" in str(lives.failure)
        await lives.close()

    run(test())


def test_a_cancellation_that_a_library_drops_is_repeated_until_the_life_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """anyio dropped some that came with an answer: closing an engine that was attached to waited for ever."""
    monkeypatch.setattr("snugvl.backends.supervisor.CANCEL_S", 0.01)
    steps: list[str] = []

    async def live() -> float | None:
        lives.begin()
        try:
            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(NEVER_S)
                steps.append("dropped")
            await asyncio.sleep(NEVER_S)
        finally:
            lives.ending = True
            await asyncio.sleep(0.1)  # another one would keep it from what follows
            steps.append("ended")
        return None

    async def test() -> None:
        lives.start("starting", live)
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(lives.close(), lives.close())
        assert steps == ["dropped", "dropped", "ended"]

    lives = Lives(QUICK, "not started")
    run(test())


def test_what_can_not_be_warmed_up_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        async with engine("cold") as service:
            await ready(service)
            await until(service, lambda: "a bug while warming up" in caplog.text)
            assert service.snapshot is not None
            seen = service.snapshot.at
            await until(service, lambda: service.snapshot and service.snapshot.at > seen)
            assert service.health.restarts == 0

    run(test())


class Broken(Image.Image):
    """Like a file that ends in the middle, which shows when its pixels are wanted."""

    def tobytes(self, *_: Any, **__: Any) -> bytes:
        raise OSError("image file is truncated")


def test_a_picture_that_can_not_be_sent_leaves_no_others_behind() -> None:
    whole = Image.new("RGB", (64, 64))
    broken = Broken()
    broken._size, broken._mode = (64, 64), "RGB"  # type: ignore[attr-defined]

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            request = Request((user(whole, broken),), SamplingParams(max_tokens=1))
            for _ in range(3):
                with pytest.raises(OSError, match="truncated"):
                    await service.submit(request)
            assert not arena_of(service)._used
            assert service._life is not None
            assert not service._life.running
            assert await read(await service.submit(say("hello")))

    run(test())


def test_what_a_process_had_on_disk_goes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            await read(await service.submit(say("keep")))
            (folder,) = tmp_path.iterdir()
            assert (folder / OWNER).exists()
            assert service._life is not None
            service._life.kill("enough")
            await serves_again(service)
            assert not folder.exists()
            await read(await service.submit(say("keep")))
            assert list(tmp_path.iterdir())
        assert not list(tmp_path.iterdir()), "after a goodbye, too"

    run(test())


def test_a_second_close_does_not_keep_the_first_from_ending_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when draining has taken too long and the server ends at the same time."""
    stop, go_on = life.EngineProcess.stop, asyncio.Event()

    async def test() -> None:
        stopping = asyncio.Event()

        async def slow(self: life.EngineProcess) -> None:
            stopping.set()
            await go_on.wait()
            await stop(self)

        monkeypatch.setattr(life.EngineProcess, "stop", slow)
        async with engine() as service:
            await ready(service)
            process = service._life
            assert process is not None
            first = asyncio.create_task(service.close())
            await stopping.wait()
            second = asyncio.create_task(service.close())
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(first, second)
            assert process._popen.returncode is not None

    run(test())


def test_a_message_that_can_not_be_sent_to_a_new_process_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        launched = Launched(("/bin/cat",))
        monkeypatch.setattr(wire, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await life.EngineProcess.meet(launched, wire.Start(wire.EngineChoice(), 1.0), lambda _: None)
        assert launched._popen.returncode is not None

    run(test())


def test_what_asks_in_a_wrong_way_gets_the_error_and_ends_nobody_else() -> None:
    """As what comes of a bug in the server."""
    wrong: Any = Request((7,))  # type: ignore[arg-type]

    async def test() -> None:
        async with engine() as service:
            await ready(service)
            with pytest.raises(EngineError, match="AttributeError"):
                await service.submit(wrong)
            assert service._life is not None
            assert not service._life.running
            assert await read(await service.submit(say("hello")))
            assert service.health.restarts == 0

    run(test())

"""The supervisor over a fake engine in a real process: every way to die, and every way back."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.errors import (
    CheckpointError,
    EngineError,
    EngineUnavailable,
)
from tests.backends.process.supervised import FOREVER, QUICK, engine, read, run, say
from tests.backends.waiting import ready, until
from tests.patience import until_async

PAUSE = r"that was (\d+) times in a row, it starts again in ([\d.e+]+) s"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_ends_streams_with_an_error_and_the_engine_comes_back(how: signal.Signals) -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            streams = [await service.submit(say("hello", FOREVER)) for _ in range(3)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            preparing = asyncio.create_task(service.submit(say("wait")))
            await until(service, lambda: service._life and service._life.running == 4)
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
            await ready(service)
            assert service.health.restarts == 1
            assert service.pid != pid
            assert await read(await service.submit(say("hello")))

    run(test())


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("abort", "SIGABRT.*the GPU's memory ran out.*CUDA out of memory. Tried to allocate 2 GiB"),
        ("bug", "exit code 1.*ZeroDivisionError: a bug while loading"),
    ],
)
@pytest.mark.sample("bug-exit code 1.*ZeroDivisionError: a bug while loading")
def test_deaths_in_a_row_back_off_and_say_why(model: str, why: str) -> None:
    async def test() -> None:
        found: list[tuple[str, str]] = []
        async with engine(model, Supervision(ping_s=0.05, backoff_s=0.01, backoff_max_s=1e6)) as service:
            await until_async(lambda: service._lives.deaths >= 2)
            assert service.health.state in ("starting", "restarting")
            # The pauses double until one is seen.
            await until_async(lambda: found.extend(re.findall(PAUSE, service.health.detail)) or found)
            times, pause_s = found[0]
            assert float(pause_s) == pytest.approx(0.01 * 2 ** (int(times) - 3), rel=1e-3)
            assert service.failure is None
            with pytest.raises(EngineUnavailable, match=f"(?s){why}"):
                await service.submit(say("hello"))

    run(test())


def test_a_process_that_can_not_be_started_is_tried_again() -> None:
    async def test() -> None:
        service = SupervisedEngine(EngineChoice(), Supervision(backoff_s=0.01), ("/not/there",))
        await service.start()
        await until_async(
            lambda: "can't be started" in service.health.detail and " times in a row" in service.health.detail
        )
        assert service.health.state == "restarting"
        with pytest.raises(AssertionError, match="in a row: the engine process can't be started"):
            await ready(service)  # the tests themselves don't wait for ever
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
                await ready(service)
                assert service.health.restarts == round_
                assert service.pid is not None
                os.kill(service.pid, signal.SIGKILL)
                await until(service, lambda: not service.health.ready)
                assert "in a row" not in service.health.detail

    run(test())


def test_an_error_that_loading_reports_is_final() -> None:
    async def test() -> None:
        async with engine("broken") as service:
            await until(service, lambda: service.health.state == "failed")
            assert type(service.failure) is CheckpointError
            assert service.health.detail == "model.safetensors is truncated"
            with pytest.raises(EngineUnavailable, match=r"model\.safetensors is truncated"):
                await service.submit(say("hello"))
            await until(service, lambda: service.pid is None)
            assert service.health.state == "failed"

    run(test())


@pytest.mark.slow
def test_memory_that_others_took_meanwhile_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(f"once {tmp_path / 'loaded'}") as service:
            await ready(service)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            await until_async(
                lambda: re.search(r"needs 9 GiB, 1 GiB is free; that was \d+ times", service.health.detail)
            )
            assert service.health.state == "restarting"
            (tmp_path / "loaded").unlink()
            await ready(service)

    run(test())


@pytest.mark.slow
def test_a_process_that_stops_answering_is_killed() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
            stream = await service.submit(say("hello", FOREVER))
            assert service.pid is not None
            os.kill(service.pid, signal.SIGSTOP)
            await until(
                service, lambda: service._silent_s > 5 * QUICK.ping_s
            )  # nothing that it said is on its way
            service._silent_s += QUICK.watchdog_s  # after as many looks as that takes
            with pytest.raises(EngineError, match="hung: it has not answered for"):
                await read(stream)
            await ready(service)

    run(test())


@pytest.mark.slow
def test_a_step_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # However long its process takes to start: that it answers is not what is looked at here.
    silent = property(lambda _: 0.0, lambda *_: None)
    monkeypatch.setattr(SupervisedEngine, "_silent_s", silent, raising=False)

    async def test() -> None:
        supervision = Supervision(ping_s=0.05, snapshot_s=0.05, watchdog_s=1.0)
        async with engine("stuck", supervision) as service:
            await until(service, lambda: "a step lasted more than 1 s" in service.health.detail)
            assert service.health.state == "restarting"

    run(test())

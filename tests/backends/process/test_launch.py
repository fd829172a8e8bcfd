"""A process that is begun before it is needed: taken once, or ended."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from snugvl.backends.process.launch import Launched
from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
from snugvl.core.messages import Capabilities
from snugvl.hardware.describe import describe
from tests.backends.process.supervised import COMMAND, QUICK, read, run, say
from tests.backends.waiting import ready, until

SLEEPER = (sys.executable, "-c", "import time; time.sleep(10000)")


def test_a_process_that_nobody_takes_is_ended() -> None:
    with Launched(SLEEPER) as launched:
        pid = launched._popen.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    launched.abandon()  # a second time: nothing


def test_a_process_that_was_taken_is_its_takers() -> None:
    with Launched(SLEEPER) as launched:
        process, ours = launched.take()
    try:
        assert process.poll() is None
    finally:
        ours.close()
        process.kill()
        process.communicate()


def test_a_command_that_is_not_there_leaves_nothing_open() -> None:
    with pytest.raises(FileNotFoundError):
        Launched(("/nowhere/python",))


def test_the_first_life_is_the_launched_process_and_the_next_is_not() -> None:
    async def test() -> None:
        with Launched(COMMAND) as launched:
            choice = EngineChoice("echo", machine=describe("rtx-4060"))
            service = SupervisedEngine(choice, QUICK, COMMAND, launched)
            await service.start()
            await ready(service)
            assert service._start.choice == EngineChoice("echo")  # the next life looks for itself
            pid = service.pid
            assert pid == launched._popen.pid
            psutil.Process(pid).kill()
            await until(service, lambda: service.health.restarts == 1 and service.health.ready)
            assert service.pid != pid
            assert len(await read(await service.submit(say("hello")))) > 0
            await service.close()

    run(test())


def test_a_launched_process_that_died_is_a_death_like_others() -> None:
    async def test() -> None:
        with Launched((sys.executable, "-c", "raise SystemExit(3)")) as launched:
            launched._popen.wait()
            service = SupervisedEngine(EngineChoice("echo"), QUICK, COMMAND, launched)
            await service.start()
            await ready(service)
            await service.close()

    run(test())


def test_the_time_line_of_a_start() -> None:
    async def test() -> None:
        before = time.time()
        service = SupervisedEngine(EngineChoice("echo"), QUICK, COMMAND)
        assert service.health.timeline == ()
        await service.start()
        await ready(service)
        steps, moments = zip(*service.health.timeline, strict=True)
        assert steps == (
            "process launched", "process runs", "told what to load", "pretending", "warming up", "ready"
        )  # fmt: skip
        assert before <= moments[0]
        assert list(moments) == sorted(moments)
        assert moments[-1] <= time.time()
        await service.close()

    run(test())


def test_grammars_are_prepared_in_the_first_pause(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        service = SupervisedEngine(EngineChoice("echo"), QUICK, COMMAND)
        await service.start()
        await ready(service)
        stream = await service.submit(say("hello", tokens=300))
        assert isinstance(service.capabilities, Capabilities)
        await read(stream)
        await until(service, lambda: "warming up while" in caplog.text)
        await asyncio.sleep(5 * QUICK.snapshot_s)
        await service.close()

    with caplog.at_level("WARNING", "snugvl.engine"):
        run(test())
    said = [record.message for record in caplog.records if "warming up while" in record.message]
    assert said == ["warming up while 0 are running"]


def test_what_launches_the_process_imports_little() -> None:
    code = (
        "import sys, snugvl.backends.process.launch\n"
        "print([n for n in ('asyncio', 'PIL', 'numpy', 'pickle', 'torch') if n in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"

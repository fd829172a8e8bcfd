"""The supervisor over a fake engine in a real process: how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from snugvl.errors import (
    EngineError,
    EngineUnavailable,
)
from tests.backends.process.supervised import COMMAND, engine, read, run, say
from tests.backends.waiting import ready, until
from tests.patience import PATIENCE_S


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


@pytest.mark.slow
def test_close_ends_streams_and_a_process_that_does_not_listen() -> None:
    async def test() -> None:
        async with engine() as service:
            await ready(service)
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
            await until(service, lambda: service.pid)
            pid = service.pid
            assert pid is not None
        assert not psutil.pid_exists(pid)

    run(test())


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import asyncio\n"
        "from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine\n"
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

"""Every fault of an engine's life, over both adapters of the supervisor: the wire and HTTP.

The tables say what happens, what a client gets of it, whether the engine comes back, and what is said. When
the service is closed nothing is left: no process, file, descriptor, thread or shared memory.
"""

import asyncio
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from snugvl.backends.child import watch
from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
from snugvl.backends.supervisor import GIVEN_UP_S, Lives, Supervision
from snugvl.backends.vllm.service import VllmEngine
from snugvl.core.messages import Delta, Request, user
from snugvl.core.resources import sweep
from snugvl.core.sampling import SamplingParams
from snugvl.errors import CheckpointError, DoesNotFit, EngineError, EngineUnavailable, SnugvlError
from tests.backends.children import QUICK, processes, started
from tests.backends.process.faults import held
from tests.backends.process.supervised import COMMAND
from tests.backends.vllm.helpers import fake, read
from tests.backends.waiting import ready
from tests.patience import NEVER_S
from tests.patience import until as until_here
from tests.patience import until_async as until

ROOT = Path(__file__).parents[2]
# An answer that stops in its middle, and leaves the engine well.
BEGIN = "begin pause"
AGAIN = "it is starting again"
PAUSE = r"that was (\d+) times in a row, it starts again in ([\d.e+]+) s"

Service = Any  # `SupervisedEngine` or `VllmEngine`: what is asked of both here is all of `Supervised`


class Wire:
    """Our own engine's process."""

    name = "wire"
    called = "the engine process"

    def make(self, behaviour: str, supervision: Supervision, **_: Any) -> Service:
        return SupervisedEngine(EngineChoice(behaviour), supervision, COMMAND)

    def missing(self, supervision: Supervision) -> Service:
        return SupervisedEngine(EngineChoice(), supervision, ("/not/there",))

    def engine(self, service: Service) -> int:
        """The process that computes."""
        assert service.pid is not None
        return int(service.pid)

    async def freezes(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        """As many looks go by without an answer as the watchdog waits for, after some that show it."""
        await until(lambda: service._silent_s > 5 * QUICK.ping_s)
        service._silent_s += QUICK.watchdog_s

    async def stalls(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        """The same of answers that say that the engine's thread doesn't get on."""
        await until(lambda: service._stalled_s > 5 * QUICK.ping_s)
        with pytest.MonkeyPatch.context() as longer:
            stalled = property(lambda _: 2 * NEVER_S, lambda *_: None)
            longer.setattr(SupervisedEngine, "_stalled_s", stalled, raising=False)
            await lost(service, 0)


class Http:
    """A server of another program."""

    name = "http"
    called = "vLLM"

    def make(self, behaviour: str, supervision: Supervision, **changes: Any) -> Service:
        return VllmEngine(fake(behaviour, **changes), supervision)

    def missing(self, supervision: Supervision) -> Service:
        return VllmEngine(fake(command=("/not/there",)), supervision)

    def engine(self, service: Service) -> int:
        """The process that computes."""
        assert service._life is not None
        return next(each.pid for each in service._life.family() if "fake_vllm.py" in str(each.cmdline()[:3]))

    async def freezes(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        """As many looks go by without an answer as the watchdog waits for, after some that show it."""
        await self._waits(service, "_silent_s")

    async def stalls(self, service: Service, patch: pytest.MonkeyPatch) -> None:
        """The same of looks while which nothing comes of what runs."""
        await self._waits(service, "_stalled_s")

    async def _waits(self, service: Service, count: str) -> None:
        dog = service._life.watchdog
        await until(lambda: getattr(dog, count) > 3 * QUICK.ping_s)
        setattr(dog, count, getattr(dog, count) + QUICK.watchdog_s)


SIDES = {"wire": Wire(), "http": Http()}


@dataclass(frozen=True)
class Serving:
    """A fault of an engine that serves.

    Attributes:
        wire, http: what is said of it; "": this engine goes on, and only the request that met it fails.
        word: what a request says that brings it about.
        waits: what the watchdog has to see, if that is what ends it.
    """

    word: str
    wire: str
    http: str
    waits: Literal["", "freezes", "stalls"] = ""


OUT = r"the GPU's memory ran out; another program may have taken it \(it said: .*CUDA out of memory"
KILLED = r"signal 9, SIGKILL\): killed from outside, perhaps by the system because host memory ran out"
SERVING = {
    "a crash with last words": Serving("crash", f"exit code 1: {OUT}", f"exit code 1: {OUT}"),
    "a segmentation fault": Serving("segfault", r"signal 11, SIGSEGV", r"signal 11, SIGSEGV"),
    "killed, as by the host's OOM killer": Serving(
        "kill", KILLED, KILLED
    ),
    "an end that nobody asked for": Serving("leave", "ended with exit code 0", "ended with exit code 0"),
    "a log that is too long": Serving("flood", OUT, OUT),
    "a process that is frozen": Serving(
        "freeze", "the engine process hung: it has not answered for", "vLLM hung: it has not answered for",
        "freezes",
    ),
    "a step that never ends": Serving(
        "stall", "the engine hung: a step lasted more than", "vLLM hung: nothing came of 2 running requests",
        "stalls",
    ),
    "garbage in place of an answer": Serving("garbage", "says can't be taken", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Starting:
    """A fault of every start.

    Attributes:
        behaviour: of the fake; `wire` and `http`, what is said of it.
        log: of a vLLM which reports it so: another program has no other way.
        wire_ends, http_ends: the error that ends it for good; None: it is tried again, with longer and longer
            pauses. Where our own process dies it may be for what passes, another program's start is a command
            that its user can change.
    """

    behaviour: str
    wire: str
    http: str
    wire_ends: type[SnugvlError] | None = None
    http_ends: type[SnugvlError] | None = EngineError
    log: str = ""


STARTING = {
    "a crash with last words": Starting("start:crash", OUT, "memory", http_ends=DoesNotFit),
    "a bug": Starting("start:raise", "exit code 1.*no such thing as a model", "no such thing as a model"),
    "killed, as by the host's OOM killer": Starting("start:kill", KILLED, KILLED),
    "an end that nobody asked for": Starting("start:leave", "exit code 0", "exit code 0"),
    "a log that is too long": Starting("start:flood", OUT, "memory", http_ends=DoesNotFit),
    "an error that is reported": Starting(
        "broken",
        r"model\.safetensors is truncated",
        "does not accept its settings",
        CheckpointError,
        log="log:vllm022_gpu_names.log",
    ),
}


@pytest.fixture(params=list(SIDES))
def side(request: pytest.FixtureRequest) -> Any:
    """Each adapter in turn."""
    return SIDES[request.param]


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, which is empty in the end; and this process has what it had."""
    monkeypatch.setattr(watch, "LOOK_S", 0.3)
    logging.disable()  # pytest keeps what is logged, and with a traceback all that the functions in it had
    known = {each.pid for each in psutil.Process().children(recursive=True)}
    before, failed = held(), request.session.testsfailed
    with tempfile.TemporaryDirectory(prefix="life-") as name:  # short: a socket's path goes into it
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
        logging.disable(logging.NOTSET)
        if request.session.testsfailed > failed:
            return  # its traceback keeps what the functions in it had
        until_here(lambda: all(now <= before[each] for each, now in held().items()))
        assert not list(Path(name).iterdir())
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= known


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def say(text: str, tokens: int = 5) -> Request:
    return Request((user(text),), SamplingParams(max_tokens=tokens))


@asynccontextmanager
async def serving(side: Any, behaviour: str = "echo", **changes: Any) -> AsyncIterator[Service]:
    async with started(side.make(behaviour, QUICK, **changes)) as service:
        await ready(service)
        yield service


async def begun(service: Service) -> AsyncIterator[Delta]:
    """An answer of which a piece has come, and no more will."""
    reader = aiter(await service.submit(say(BEGIN)))
    await anext(reader)
    return reader  # type: ignore[no-any-return]


async def ended(reader: AsyncIterator[Delta]) -> EngineError:
    """What ends an answer."""
    with pytest.raises(EngineError) as caught:
        async for _ in reader:
            pass
    return caught.value


async def refused(service: Service) -> EngineUnavailable:
    """What a new request is told."""
    with pytest.raises(EngineUnavailable) as caught:
        await service.submit(say("hello"))
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s >= 1
    return caught.value


async def lost(service: Service, lives: int) -> None:
    """It has died after so many restarts; it may be ready again before anybody looks."""
    await until(lambda: not service.health.ready or service.health.restarts > lives)


async def back(service: Service, lives: int = 1) -> None:
    """It has been started so often again, by itself, and answers."""
    await ready(service)
    assert service.health.restarts == lives
    assert await read(await service.submit(say("hello")))


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.sample(
    "wire-a crash with last words",
    "wire-a process that is frozen",
    "wire-garbage in place of an answer",
    "http-killed, as by the host's OOM killer",
    "http-a log that is too long",
    "http-a step that never ends",
)
def test_a_fault_ends_what_runs_with_its_cause_and_the_engine_comes_back(
    name: str, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = SERVING[name]
    cause = getattr(fault, side.name)

    async def test() -> None:
        async with serving(side) as service:
            family = processes(service)
            reader = await begun(service)
            asked = asyncio.create_task(service.submit(say(fault.word)))
            if not cause:
                with pytest.raises(EngineError, match="not a JSON object"):
                    await read(await asked)
                assert service.health.ready
                await back(service, lives=0)
                return
            if fault.waits:
                await getattr(side, fault.waits)(service, monkeypatch)
            error = await ended(reader)
            assert type(error) is EngineError
            assert error.http_status == 500
            assert re.search(cause, str(error)), error
            assert str(error).endswith(AGAIN)
            told = await refused(service)  # and not what a later life says: it may be ready at any moment
            assert re.search(cause, str(told)), told
            (unanswered,) = await asyncio.gather(asked, return_exceptions=True)
            if not isinstance(
                unanswered, BaseException
            ):  # it was taken before the engine was seen to be gone
                unanswered = await ended(unanswered)
            assert isinstance(unanswered, EngineError), unanswered
            assert re.search(cause, str(unanswered))
            await back(service)
            assert not [process for process in family if process.is_running()]

    run(test())


def test_a_death_while_idle_is_seen(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def expect(lives: Lives, state: Any, detail: str, pause_s: float = 0.0) -> None:
        told.append(detail)
        expected(lives, state, detail, pause_s)

    expected = Lives.expect
    monkeypatch.setattr(Lives, "expect", expect)

    async def test() -> None:
        async with serving(side, "family") as service:
            family, known = processes(service), service.capabilities
            os.kill(side.engine(service), signal.SIGKILL)
            await lost(service, 0)
            assert re.search("SIGKILL|gone", "\n".join(told))
            assert service.capabilities == known is not None, "requests are read by them meanwhile"
            await back(service)
            assert not [process for process in family if process.is_running()], "its children are gone, too"

    run(test())


@pytest.mark.parametrize("name", STARTING)
@pytest.mark.sample(
    "wire-a crash with last words",
    "wire-an error that is reported",
    "http-a crash with last words",
    "http-a bug",
)
def test_a_fault_of_the_start_is_final_or_tried_again(name: str, side: Any) -> None:
    fault = STARTING[name]
    behaviour = fault.log if fault.log and side.name == "http" else fault.behaviour
    final = getattr(fault, f"{side.name}_ends")
    cause = getattr(fault, side.name)
    supervision = replace(QUICK, backoff_s=0.01, backoff_max_s=NEVER_S)

    async def test() -> None:
        async with started(side.make(behaviour, supervision)) as service:
            await fails_or_backs_off(service, final, cause)

    run(test())


async def fails_or_backs_off(service: Service, final: type[SnugvlError] | None, cause: str) -> None:
    """It has failed for good with this error; or it is tried again, and the pauses double."""
    if final is None:
        found: list[tuple[str, str]] = []

        def backs_off() -> bool:  # state and text of one moment: it is soon tried again
            health = service.health
            found.extend(re.findall(PAUSE, health.detail) if health.state == "restarting" else ())
            return bool(found)

        await until(backs_off)
        times, pause_s = found[0]
        assert float(pause_s) == pytest.approx(0.01 * 2 ** (int(times) - 3), rel=1e-3)
        assert service.failure is None
        assert re.search(f"(?s){cause}", str(await refused(service)))
        return
    await until(lambda: service.health.state == "failed")
    assert type(service.failure) is final
    assert re.search(f"(?s){cause}", str(service.failure)), service.failure
    told = await refused(service)
    assert str(told) == str(service.failure)
    assert told.retry_after_s == GIVEN_UP_S
    await until(lambda: service.pid is None)


def test_what_can_not_be_started(side: Any) -> None:
    async def test() -> None:
        async with started(side.missing(replace(QUICK, backoff_s=0.01, backoff_max_s=NEVER_S))) as service:
            await fails_or_backs_off(service, EngineError, "/not/there")

    run(test())


@pytest.mark.parametrize(
    ("number", "final"), [(errno.ENOENT, True), (errno.EACCES, True), (errno.EAGAIN, False)]
)
def test_a_first_start_is_tried_again_only_where_that_can_help(
    side: Any, monkeypatch: pytest.MonkeyPatch, number: int, final: bool
) -> None:
    """A container without /dev/null has none a second later; a process limit may let the next one begin."""
    if side.name != "wire":
        pytest.skip("other engines fail in their first start, whatever the reason")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/dev/null")

    async def test() -> None:
        monkeypatch.setattr("subprocess.Popen", refuse)
        async with started(side.make("", replace(QUICK, backoff_s=0.01, backoff_max_s=NEVER_S))) as service:
            await fails_or_backs_off(service, EngineError if final else None, "can't be started: .*/dev/null")

    run(test())


def test_a_start_that_hangs_is_ended(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is asked whether it lives, and tried again; what another program does is looked at."""

    async def test() -> None:
        async with started(side.make("start:freeze", QUICK, idle_s=0.4)) as service:
            if side.name == "wire":
                await side.freezes(service, monkeypatch)
                hung = ("restarting", "hung: it has not answered")
                await until(lambda: (health := service.health).state == hung[0] and hung[1] in health.detail)
            else:
                await until(lambda: service.health.state == "failed")
                assert "computed, read and written nothing" in str(service.failure)
            assert "hung" in str(await refused(service))

    run(test())


@pytest.mark.sample("wire")
def test_a_restart_that_fails_is_tried_again_until_it_works(side: Any, nothing_is_left: Path) -> None:
    """Of any kind: what served once may serve again. The cause stays visible, and the pauses grow."""
    seen = nothing_is_left / "seen"

    async def test() -> None:
        async with serving(side, f"again:raise:{seen}") as service:
            reader = await begun(service)
            os.kill(side.engine(service), signal.SIGKILL)
            assert "SIGKILL" in str(await ended(reader))
            await until(lambda: " times in a row" in service.health.detail)
            assert "no such thing as a model" in str(await refused(service))
            assert service.failure is None
            seen.unlink()
            await back(service)
            seen.unlink()

    run(test())


@pytest.mark.sample("http")
def test_deaths_after_a_good_while_are_not_in_a_row(side: Any) -> None:
    async def test() -> None:
        async with started(side.make("echo", replace(QUICK, settle_s=0.0))) as service:
            for lives in range(3):
                await back(service, lives)
                os.kill(side.engine(service), signal.SIGKILL)
                await lost(service, lives)
                assert "in a row" not in service.health.detail

    run(test())


def test_another_program_on_its_port_is_no_death(nothing_is_left: Path) -> None:
    """Of a server over HTTP: our own process has no port, but a pair of sockets that it inherits."""
    notes = nothing_is_left / "port"

    async def test() -> None:
        async with serving(SIDES["http"], "port", environment=(("FAKE_NOTES", str(notes)),)) as service:
            await back(service, lives=0)
        notes.unlink()

    run(test())


@pytest.mark.parametrize("behaviour", ["echo", "start:freeze"])
@pytest.mark.sample("wire-start:freeze", "http-echo")
def test_closing_ends_a_start(behaviour: str, side: Any) -> None:
    """As soon as there is a process, which listens to nobody yet, or never will."""

    async def test() -> None:
        service = side.make(behaviour, QUICK)
        await service.start()
        await until(lambda: processes(service))
        family = processes(service)
        await service.close()
        assert not [process for process in family if process.is_running()]
        assert service.health.state == "failed"
        assert "shut down" in str(await refused(service))

    run(test())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.sample("wire-False", "http-True")
def test_closing_ends_answers_and_may_come_twice(frozen: bool, side: Any) -> None:
    """As when draining has taken too long and the server ends at the same time; a frozen engine, too."""

    async def test() -> None:
        async with serving(side) as service:
            family = processes(service)
            reader = await begun(service)
            assert not await service.drain(0.01)
            if frozen:
                os.kill(side.engine(service), signal.SIGSTOP)
            await asyncio.gather(service.close(), service.close())
            error = await ended(reader)
            assert (type(error), str(error)) == (EngineUnavailable, "the server has shut down")
            assert not [process for process in family if process.is_running()]
            await service.close()

    run(test())


def test_our_own_death_takes_it_along(side: Any) -> None:
    """However it comes: here by a signal that nobody can catch."""
    code = (
        "import asyncio\n"
        "from tests.backends.children import processes\n"
        "from tests.backends.test_life_faults import SIDES, serving\n"
        "async def main():\n"
        f"    async with serving(SIDES[{side.name!r}], 'family') as service:\n"
        "        print(*(each.pid for each in processes(service)), flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env=environment
    ) as server:
        assert server.stdout is not None
        family = []
        for pid in server.stdout.readline().split():
            with suppress(psutil.NoSuchProcess):
                family.append(psutil.Process(int(pid)))
        assert len(family) == (1 if side.name == "wire" else 4)
        server.kill()

    def gone() -> bool:
        return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)

    until_here(gone)
    sweep()  # as every server does that starts

"""llama.cpp for commands and `snugvl.load`: a plan, a server of this process' own, ended with the model.

Its service runs in an event loop of its own, in a thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from snugvl.backends.child.service import ChildEngine
from snugvl.backends.llamacpp import settings
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.llamacpp.settings import llamacpp_choice
from snugvl.backends.native.allocation import choose
from snugvl.backends.place import device_of, place_on
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.messages import Capabilities, GoOn, Request, Stream, going_on
from snugvl.core.options import LoadOptions, Progress
from snugvl.errors import EngineError
from snugvl.hardware.probe import probe
from snugvl.planner.plan import Choice
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import wishes_of

logger = logging.getLogger(__name__)

POLL_S: Final = 0.02

T = TypeVar("T")


class ChildBackend:
    """A server that is started, and ended with `close`."""

    def __init__(self, make: Callable[[], ChildEngine], progress: Progress | None = None) -> None:
        """Returns when it serves. `make`: the service, in its loop; `progress`: as in `snugvl.load`.

        Raises:
            EngineError, DoesNotFit: it doesn't start.
        """
        self._loop = asyncio.new_event_loop()
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="snugvl-child", daemon=True)
        self._thread.start()
        try:
            self._service = self._run(_started(make, progress))
        except BaseException:
            self._end()
            raise

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the loaded model."""
        assert self._service.capabilities is not None
        return self._service.capabilities

    def submit(self, request: Request, go_on: GoOn = going_on) -> Stream:
        """Start a request; see `Backend`."""
        if self._closed:
            raise EngineError("the engine has been closed")
        return self._run(self._service.submit(request))

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        snapshot = self._service.snapshot
        rows = () if snapshot is None else snapshot.ledger.rows
        return {row.name: row.measured_bytes for row in rows if row.measured_bytes is not None}

    def close(self) -> None:
        """End the server and all that runs. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._run(self._service.close())
            self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _serve(self) -> None:
        """Run the loop until it is to end: whatever stops it before, others wait for what it does."""
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException:
                logger.exception("the loop of the engine's service stopped, and goes on")

    def _end(self) -> None:
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _started(make: Callable[[], ChildEngine], progress: Progress | None) -> ChildEngine:
    service = make()
    await service.start()
    try:
        while not (health := service.health).ready:
            if health.state == "failed":
                raise service.failure or EngineError(health.detail)
            if progress is not None:
                progress(health.detail, health.progress or 0.0)
            await asyncio.sleep(POLL_S)
    except BaseException:
        await service.close()
        raise
    return service


def load_planned(options: LoadOptions, *, progress: Progress | None = None) -> ChildBackend:
    """Plan for what is free now, then start the server and wait for it.

    Raises:
        EngineError: llama.cpp isn't installed, or doesn't start.
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the file.
        DoesNotFit: with the plan's numbers.
        RequestError: an option that no plan can meet.
    """
    settings.find(None)  # before anything is planned
    locate(options.model)
    facts = replace(facts_of(options.model, offline=True), name=options.model)
    choice = _elsewhere(facts, options) or choose(
        facts, options, place_on(device_of(options.device), options.memory_bytes, kernels=False), "llamacpp"
    )
    return ChildBackend(lambda: LlamacppEngine(llamacpp_choice(choice, options)), progress)


def _elsewhere(facts: ModelFacts, options: LoadOptions) -> Choice | None:
    """The plan for a GPU that torch doesn't know; None where there is none, or another device is meant."""
    if options.device != "auto" or device_of("auto").type != "cpu":
        return None
    machine = probe()
    if not machine.others:
        return None
    wishes = wishes_of(options, sees=facts.vision is not None, backend="llamacpp")
    return require(solve([Candidate(facts)], machine, wishes))

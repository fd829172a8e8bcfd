"""A vLLM server behind the service protocol: launched as a supervised child, or found running.

    start ─► starting ─► ready ─ died ─► restarting ─► ready …       with pauses after three deaths in a row
                 │ its start failed
                 ├─ the log says why, and changed flags could help ─► once more with those
                 └─ otherwise ─► failed                                  `failure` has the cause and a way out

The server's process talks HTTP with it and imports neither torch nor transformers.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from snugvl.backends.preparers import Preparation, Preparers
from snugvl.backends.protocol import Capabilities, Message, Request, Stream, ToolUse
from snugvl.backends.service import Health, Snapshot, State, Tokens
from snugvl.backends.supervised import FIRST_LOAD_S, GIVEN_UP_S, Supervision
from snugvl.backends.vllm import command, flags, log, metrics
from snugvl.backends.vllm.answer import Answer
from snugvl.backends.vllm.api import Served
from snugvl.backends.vllm.chunks import reasoning_of
from snugvl.backends.vllm.facts import capabilities_of, limited, read_facts
from snugvl.backends.vllm.failure import Ending, understand
from snugvl.backends.vllm.life import Attached, Launched, Life
from snugvl.backends.vllm.log import Stage
from snugvl.backends.vllm.measure import Gauge
from snugvl.backends.vllm.requests import Model, blamed, body_of, refuse_control_tokens, tokenize_body
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.backends.vllm.sleep import Sleeper
from snugvl.errors import EngineError, EngineUnavailable, RequestError, SnugvlError
from snugvl.inputs.trials import Trials

DRAIN_POLL_S = 0.05

logger = logging.getLogger("snugvl.vllm")


@dataclass(slots=True)
class _Session:
    """A life that serves, and what belongs to it."""

    life: Life
    model: Model
    gauge: Gauge
    measured: log.Measured
    sleeper: Sleeper | None
    answers: set[Answer] = field(default_factory=set)


class VllmEngine:
    """An `EngineService` whose engine is a vLLM server."""

    def __init__(self, choice: VllmChoice, supervision: Supervision | None = None) -> None:
        flags.check(choice.arguments)
        self._choice = choice
        self._supervision = supervision or Supervision()
        self._session: _Session | None = None
        self._life: Life | None = None
        self._task: asyncio.Task[None] | None = None
        self._preparers, self._trials = Preparers(), Trials()
        self._waking = 0  # requests that wait for their pictures, or for vLLM to wake up
        self._state: State = "starting"
        self._detail = "vLLM has not been started"
        self._progress: float | None = None
        self._load_s = FIRST_LOAD_S
        self._ready_by = 0.0  # monotonic seconds at which it should be ready
        self._started_at = self._ready_at = 0.0  # monotonic, of the present life; 0: not ready yet
        self._lives = self._deaths = 0  # that became ready; in a row
        self._retried = self._moved = False  # with changed flags; to another port
        self._last_death = ""
        self._capabilities: Capabilities | None = None
        self._snapshot: Snapshot | None = None
        self._failure: SnugvlError | None = None

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the served model; None until it was ready once."""
        return self._capabilities

    @property
    def choice(self) -> VllmChoice:
        """What runs: the choice it was made with, or the one that was retried."""
        return self._choice

    @property
    def failure(self) -> SnugvlError | None:
        """Why it doesn't run, once `health.state` is "failed" for it."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """Process that holds those of the present vLLM together; None where it isn't ours."""
        return self._life.pid if isinstance(self._life, Launched) else None

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one of the present vLLM; None while there is none."""
        return self._snapshot

    @property
    def running(self) -> int:
        """Requests that vLLM has."""
        return 0 if self._session is None else len(self._session.answers)

    @property
    def busy(self) -> bool:
        """Whether requests are under way, those that are made ready for vLLM among them."""
        return bool(self._waking or self.running)

    @property
    def health(self) -> Health:
        """Where the engine stands now."""
        wait_s = None
        if self._state in ("starting", "restarting"):
            wait_s = max(1.0, round(self._ready_by - time.monotonic(), 1))
        elif self._state == "draining":
            wait_s = FIRST_LOAD_S  # whoever starts a server in its place needs that, too
        detail = self._detail
        sleeper = None if self._session is None else self._session.sleeper
        if self._state == "ready" and sleeper is not None and sleeper.asleep:
            detail = f"{self._choice.name} sleeps: its GPU memory is given back; the next request wakes it"
        return Health(self._state, detail, self._progress, max(self._lives - 1, 0), wait_s)

    async def start(self) -> None:
        """Begin to launch or to look, and return."""
        assert self._task is None, "an engine is started once"
        what = f"looking for vLLM at {self._choice.attach}" if self._choice.attach else "vLLM is starting"
        self._expect_ready("starting", what, 0.0)
        self._task = asyncio.create_task(self._supervise(), name="snugvl-vllm")

    async def submit(self, request: Request) -> Stream:
        """Start a request; returns with the first piece of its answer.

        Raises:
            RequestError, ImageError, EngineError: what it is refused with, by us or by vLLM.
        """
        session = self._serving()
        began = time.monotonic()
        self._waking += 1
        try:
            preparation = Preparation(request.deadline_s)
            make = partial(body_of, request, session.model, self._trials, preparation.go_on)
            body = await self._preparers.run(preparation, make, heavy=self._preparers.heavy(request))
            self._preparers.remember(request)
            session = await self._awake(session)
            if request.prompt is not None and request.sampling.max_tokens is None:
                body.fields["max_tokens"] = await self._room(request.prompt, session)
            data = await asyncio.to_thread(body.encoded)
        finally:
            self._waking -= 1
        reasoning = reasoning_of(request, session.model.facts)
        answer = Answer(session.life.api, request.sampling, session.life.dog, reasoning)
        session.answers.add(answer)
        left_s = request.deadline_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - began), 0.0)
        try:
            return await answer.open(body.path, data, left_s, lambda: session.answers.discard(answer))
        except RequestError as error:
            raise blamed(error, request) from None

    async def tokenize(self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None) -> Tokens:
        """Token ids of a text as it is, or of a conversation through the chat template."""
        session, preparation = self._serving(), Preparation()
        make = partial(tokenize_body, prompt, tools, session.model, preparation.go_on)
        ids = await session.life.api.tokens(await self._preparers.run(preparation, make))
        pictures = 0 if isinstance(prompt, str) else ids.count(session.model.facts.image_token)
        return Tokens(ids, pictures)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        session = self._serving()
        answer = await session.life.api.call(
            "/detokenize", {"model": session.model.name, "tokens": list(ids)}
        )
        return str(answer.get("prompt", ""))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what is new, wait for what runs. Whether everything finished in time."""
        if self._state != "failed":
            self._state, self._progress = "draining", None
            self._detail = "the server is shutting down and takes no new requests"
        end = time.monotonic() + timeout_s
        while self.busy:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    async def close(self) -> None:
        """End everything: a vLLM that was launched with all its processes. Safe to call twice."""
        self._state, self._progress = "failed", None
        self._detail = str(self._failure) if self._failure is not None else "the server has shut down"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._preparers.close()
        self._trials.close()

    def loading(self, stage: Stage) -> None:
        """A start got further."""
        self._progress = stage.progress
        if self._state == "starting":
            self._detail = f"{self._choice.name} is loading: {stage.detail}"
        elif self._state == "restarting":  # why it died stays visible while it comes back
            self._detail = f"{self._last_death} ({stage.detail})"

    async def ready(self, life: Life, served: Served, marker_tokens: Mapping[str, int]) -> None:
        """It serves: measure it once, then open the door."""
        choice = self._choice
        facts = choice.facts
        if facts is None:
            facts = await asyncio.to_thread(read_facts, choice.model or served.root)
        facts = limited(facts, choice.arguments)
        sleeper = None
        if choice.sleep_after_s is not None:
            sleeper = Sleeper(life.api, choice.sleep_after_s, choice.sleep_level, lambda: self.busy)
        session = _Session(
            life,
            Model(served.model, served.context_tokens, facts, marker_tokens),
            Gauge(choice.planned, facts.gpu_uuids, facts.device),
            await asyncio.to_thread(log.measured, life.log),
            sleeper,
        )
        await self._measure(session)
        self._session = session
        self._ready_at = time.monotonic()
        self._load_s = self._ready_at - self._started_at
        device = facts.device or (self._snapshot.ledger.device if self._snapshot else "")
        self._capabilities = capabilities_of(choice, served, replace(facts, device=device))
        self._lives += 1
        self._retried = self._moved = False
        if self._state in ("starting", "restarting"):
            self._state, self._progress = "ready", None
            self._detail = f"{self._capabilities.model} is ready (vLLM {served.version})"

    def lost(self, reason: str) -> None:
        """It no longer serves; what runs ends when it is known why."""
        if self._state == "ready":
            self._expect_ready("restarting", f"{reason}; {self._again}", 0.0)

    def _serving(self) -> _Session:
        if self._state != "ready" or self._session is None:
            raise self._unavailable()
        return self._session

    async def _awake(self, session: _Session) -> _Session:
        """The session that takes the request: vLLM may have died while pictures were made ready."""
        if session.sleeper is not None:
            await session.sleeper.wake()
        return self._serving()

    async def _room(self, prompt: str | tuple[int, ...], session: _Session) -> int:
        """Tokens that the context leaves for the answer to a bare prompt."""
        length = len(prompt)
        if isinstance(prompt, str):
            refuse_control_tokens(prompt, session.model.facts, "prompt")
            body = {"model": session.model.name, "add_special_tokens": False, "prompt": prompt}
            length = len(await session.life.api.tokens(body))
        return max(session.model.context_tokens - length, 1)

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(self._detail, retry_after_s=self.health.retry_after_s or GIVEN_UP_S)

    def _expect_ready(self, state: State, detail: str, pause_s: float) -> None:
        self._state, self._detail, self._progress = state, detail, 0.0
        self._ready_by = time.monotonic() + pause_s + self._load_s

    def _fail(self, error: SnugvlError) -> None:
        self._failure = error
        self._state, self._detail, self._progress = "failed", str(error), None

    async def _supervise(self) -> None:
        """One life after the other."""
        try:
            found = None if self._choice.attach else await self._found()
            while True:
                ending = await self._live(found)
                if self._state in ("failed", "draining"):
                    return
                pause_s = self._next(ending)
                if pause_s is None:
                    return
                await asyncio.sleep(pause_s)
        except SnugvlError as error:
            self._fail(error)
        except Exception as error:  # a bug of ours: nobody may wait for an engine that won't come
            logger.exception("the supervisor failed")
            self._fail(EngineError(f"the supervisor failed: {type(error).__name__}: {error}"))

    async def _found(self) -> command.Command:
        found = await asyncio.to_thread(command.find, self._choice.command)
        if found.doubt is not None:
            logger.warning("%s", found.doubt)
        return found

    async def _live(self, found: command.Command | None) -> Ending:
        """One life from start to end."""
        self._ready_at, self._started_at = 0.0, time.monotonic()
        if found is None:
            self._life = Attached(self._choice, self._supervision, self, again=self._lives > 0)
        else:
            self._life = Launched(self._choice, found, self._supervision, self)
        helpers = asyncio.create_task(self._while_ready())
        reason = "the server has shut down"
        try:
            ending = await self._life.live()
            reason = ending.reason
        finally:
            helpers.cancel()
            self._end_requests(reason)
            self._session = self._snapshot = self._life = None
        return ending

    def _next(self, ending: Ending) -> float | None:
        """Seconds until the next life, or None where there will be none."""
        if ending.was_ready:
            logger.error("%s", ending.reason)
            return self._count_death(ending.reason)
        failure = understand(ending, self._choice)
        if failure.port_taken and not self._moved:
            self._moved = True
            logger.warning("vLLM's port was taken by another program; trying another one")
            return 0.0
        if failure.retry is not None and self._choice.retry and not self._retried:
            logger.error("%s", failure.error)
            self._retried, self._choice = True, failure.retry
            told = f"{failure.cause}; trying once more with: {' '.join(failure.retry.arguments)}"
            logger.warning("%s", told)
            self._last_death = told
            self._expect_ready("restarting", told, 0.0)
            return 0.0
        if not self._lives:  # whoever waits for `failure` tells of it
            tried = f" (A second start, with {' '.join(self._choice.arguments)}, failed too.)"
            self._fail(type(failure.error)(f"{failure.error}{tried}") if self._retried else failure.error)
            return None
        logger.error("%s", failure.error)
        return self._count_death(failure.cause)

    def _count_death(self, reason: str) -> float:
        """Seconds to wait before the next life."""
        settled = self._ready_at and time.monotonic() - self._ready_at >= self._supervision.settle_s
        self._deaths = 1 if settled else self._deaths + 1
        pause_s = self._supervision.pause_s(self._deaths)
        if pause_s:
            reason = f"{reason}; that was {self._deaths} times in a row"
            detail = f"{reason}, {self._again} in {pause_s:g} s"
        else:
            detail = f"{reason}; {self._again}"
        self._last_death = f"{reason}; {self._again}"
        self._expect_ready("restarting", detail, pause_s)
        return pause_s

    @property
    def _again(self) -> str:
        return "waiting for it" if self._choice.attach else "it is starting again"

    def _end_requests(self, reason: str) -> None:
        if self._session is None:
            return
        if self._state in ("ready", "restarting"):
            self._expect_ready("restarting", f"{reason}; {self._again}", 0.0)
        text = self._detail if self._state != "draining" else f"{reason}; {self._detail}"
        for answer in tuple(self._session.answers):
            answer.end(EngineError(text) if answer.began else self._unavailable())

    async def _while_ready(self) -> None:
        """What goes on beside the requests: a snapshot now and then, and sleep."""
        dozing: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self._supervision.snapshot_s)
                session = self._session
                if session is None:
                    continue
                if dozing is None and session.sleeper is not None:
                    dozing = asyncio.create_task(session.sleeper.doze())
                await self._measure(session)
        finally:
            if dozing is not None:
                dozing.cancel()

    async def _measure(self, session: _Session) -> None:
        """A snapshot; where vLLM doesn't answer, the last one stays."""
        try:
            counters = metrics.read(await session.life.api.metrics())
        except (SnugvlError, ValueError):
            return
        ledger = await asyncio.to_thread(
            lambda: session.gauge.read(session.measured, counters, session.life.family())
        )
        self._snapshot = Snapshot(time.time(), ledger, counters.load)

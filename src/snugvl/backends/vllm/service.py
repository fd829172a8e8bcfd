"""A vLLM server behind the service protocol: launched as a supervised child, or found running.

Its lives are counted as those of our own engine are (see `lives.py`). Where its start fails and the log says
that changed flags could help, it is started once more with those.

The server's process talks HTTP with it and imports neither torch nor transformers.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from snugvl.backends.lives import Lives, Supervision
from snugvl.backends.preparers import Preparation, Preparers
from snugvl.backends.vllm import command, flags, log
from snugvl.backends.vllm.answer import VllmStream, reasoning_of
from snugvl.backends.vllm.api import Served, VllmApi
from snugvl.backends.vllm.facts import apply_limits, capabilities_of, read_facts
from snugvl.backends.vllm.failure import Ending, understand
from snugvl.backends.vllm.life import AttachedServer, LaunchedServer, Life
from snugvl.backends.vllm.log import Stage
from snugvl.backends.vllm.measure import Gauge, read_counters
from snugvl.backends.vllm.requests import (
    ServedModel,
    body_of,
    refuse_control_tokens,
    rename_field,
    tokenize_body,
)
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.core.messages import Capabilities, Message, Request, Stream, ToolUse
from snugvl.core.service import Health, Snapshot, Tokens
from snugvl.errors import EngineError, RequestError, SnugvlError
from snugvl.inputs.trials import Trials

logger = logging.getLogger("snugvl.vllm")

SLEEP_POLL_S = 1.0
MOVE_S = 600.0  # moving or reading all weights may take


class Sleeper:
    """Gives the GPU's memory back while nobody asks (vLLM's sleep mode), and takes it for the next request.

    awake ── idle for so long ──► POST /sleep ──► asleep ── a request ──► POST /wake_up ──► awake

    Level 1 keeps the weights in main memory. Level 2 drops them too; then waking reads them from disk again.
    """

    def __init__(self, api: VllmApi, after_s: float, level: int, busy: Callable[[], bool]) -> None:
        """`busy`: whether requests are under way or wait for it to wake."""
        self._api = api
        self._after_s = after_s
        self._level = level
        self._busy = busy
        self._lock = asyncio.Lock()
        self.asleep = False

    async def doze(self) -> None:
        """Sleep whenever nothing ran for long enough. Never ends, unless vLLM can't sleep."""
        busy_at = time.monotonic()
        pause_s = min(SLEEP_POLL_S, self._after_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            if self._busy() or self.asleep:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= self._after_s:
                try:
                    await self._sleep()
                except SnugvlError as error:
                    logger.warning("vLLM can't sleep, so it stays awake: %s", error)
                    return

    async def wake(self) -> None:
        """Return once it is awake.

        Raises:
            EngineError: it can't wake up.
        """
        async with self._lock:
            if not self.asleep:
                return
            if self._level == 1:
                await self._api.call("/wake_up", timeout_s=MOVE_S)
            else:
                await self._api.call("/wake_up?tags=weights", timeout_s=MOVE_S)
                await self._api.call("/collective_rpc", {"method": "reload_weights"}, timeout_s=MOVE_S)
                await self._api.call("/wake_up?tags=kv_cache", timeout_s=MOVE_S)
            self.asleep = False

    async def _sleep(self) -> None:
        async with self._lock:
            if self._busy():  # one came meanwhile
                return
            await self._api.call(f"/sleep?level={self._level}", timeout_s=MOVE_S)
            self.asleep = True


@dataclass(slots=True)
class _Session:
    """A life that serves, and what belongs to it."""

    life: Life
    model: ServedModel
    gauge: Gauge
    measured: log.Measured
    sleeper: Sleeper | None
    answers: set[VllmStream] = field(default_factory=set)


class VllmEngine:
    """An `EngineService` whose engine is a vLLM server."""

    def __init__(self, choice: VllmChoice, supervision: Supervision | None = None) -> None:
        flags.check(choice.arguments)
        self._choice = choice
        self._supervision = supervision or Supervision()
        waiting = {"again": "waiting for it", "after_pause": "waiting for it"} if choice.attach else {}
        self._lives = Lives(self._supervision, "vLLM has not been started", **waiting)
        self._session: _Session | None = None
        self._life: Life | None = None
        self._command: command.VllmCommand | None = None
        self._preparers, self._trials = Preparers(), Trials()
        self._waking = 0  # requests that wait for their pictures, or for vLLM to wake up
        # With changed flags; with another port, since it was ready last.
        self._retried = self._moved = False
        self._capabilities: Capabilities | None = None
        self._snapshot: Snapshot | None = None

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
        return self._lives.failure

    @property
    def pid(self) -> int | None:
        """Process that holds those of the present vLLM together; None where it isn't ours."""
        return self._life.pid if isinstance(self._life, LaunchedServer) else None

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
        sleeper = None if self._session is None else self._session.sleeper
        asleep = None
        if sleeper is not None and sleeper.asleep:
            asleep = f"{self._choice.name} sleeps: its GPU memory is given back; the next request wakes it"
        return self._lives.health(asleep=asleep)

    async def start(self) -> None:
        """Begin to launch or to look, and return."""
        what = f"looking for vLLM at {self._choice.attach}" if self._choice.attach else "vLLM is starting"
        self._lives.start(what, self._next_life)

    async def submit(self, request: Request) -> Stream:
        """Start a request; returns with the first piece of its answer.

        Raises:
            RequestError, ImageError, EngineError: what it is refused with, by us or by vLLM.
        """
        session = self._require_session()
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
        prompt = request.prompt if request.sampling.prompt_logprobs else None  # vLLM echoes its text
        if isinstance(prompt, tuple):
            prompt = await self.detokenize(prompt)
        answer = VllmStream(
            session.life.api, request.sampling, session.life.watchdog, reasoning, prompt or ""
        )
        session.answers.add(answer)
        left_s = request.deadline_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - began), 0.0)
        try:
            return await answer.open(body.path, data, left_s, lambda: session.answers.discard(answer))
        except RequestError as error:
            raise rename_field(error, request) from None

    async def tokenize(self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None) -> Tokens:
        """Token ids of a text as it is, or of a conversation through the chat template."""
        session, preparation = self._require_session(), Preparation()
        make = partial(tokenize_body, prompt, tools, session.model, preparation.go_on)
        ids = await session.life.api.tokens(await self._preparers.run(preparation, make))
        pictures = 0 if isinstance(prompt, str) else ids.count(session.model.facts.image_token)
        return Tokens(ids, pictures)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        session = self._require_session()
        answer = await session.life.api.call(
            "/detokenize", {"model": session.model.name, "tokens": list(ids)}
        )
        return str(answer.get("prompt", ""))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what is new, wait for what runs. Whether everything finished in time."""
        return await self._lives.drain(timeout_s, lambda: self.busy)

    async def close(self) -> None:
        """End everything: a vLLM that was launched with all its processes. Safe to call twice."""
        await self._lives.close()
        self._preparers.close()
        self._trials.close()

    def on_loading(self, stage: Stage) -> None:
        """A start got further."""
        self._lives.load(self._choice.name, stage.detail, stage.progress)

    async def on_ready(self, life: Life, served: Served, marker_tokens: Mapping[str, int]) -> None:
        """It serves: measure it once, then take requests."""
        choice = self._choice
        facts = choice.facts
        if facts is None:
            facts = await asyncio.to_thread(read_facts, choice.model or served.root)
        facts = apply_limits(facts, choice.arguments)
        sleeper = None
        if choice.sleep_after_s is not None:
            sleeper = Sleeper(life.api, choice.sleep_after_s, choice.sleep_level, lambda: self.busy)
        session = _Session(
            life,
            ServedModel(served.model, served.context_tokens, facts, marker_tokens),
            Gauge(choice.planned, facts.gpu_uuids, facts.device),
            await asyncio.to_thread(log.read_measurements, life.log),
            sleeper,
        )
        await self._measure(session)
        self._session = session
        device = facts.device or (self._snapshot.ledger.device if self._snapshot else "")
        self._capabilities = capabilities_of(choice, served, replace(facts, device=device))
        self._retried = self._moved = False
        self._lives.become_ready(f"{self._capabilities.model} is ready (vLLM {served.version})")

    def on_lost(self, reason: str) -> None:
        """It no longer serves; what runs ends when it is known why."""
        self._lives.lose(reason)

    def _require_session(self) -> _Session:
        if self._lives.state != "ready" or self._session is None:
            raise self._lives.unavailable()
        return self._session

    async def _awake(self, session: _Session) -> _Session:
        """The session that takes the request: vLLM may have died while pictures were made ready."""
        if session.sleeper is not None:
            await session.sleeper.wake()
        return self._require_session()

    async def _room(self, prompt: str | tuple[int, ...], session: _Session) -> int:
        """Tokens that the context leaves for the answer to a bare prompt."""
        length = len(prompt)
        if isinstance(prompt, str):
            refuse_control_tokens(prompt, session.model.facts, "prompt")
            body = {"model": session.model.name, "add_special_tokens": False, "prompt": prompt}
            length = len(await session.life.api.tokens(body))
        return max(session.model.context_tokens - length, 1)

    async def _next_life(self) -> float | None:
        """One life; the seconds until the next one, or None where there is none."""
        if self._command is None and not self._choice.attach:
            self._command = await self._find_command()
        ending = await self._live(self._command)
        return None if self._lives.over else self._pause_s(ending)

    async def _find_command(self) -> command.VllmCommand:
        found = await asyncio.to_thread(command.find, self._choice.command)
        if found.doubt is not None:
            logger.warning("%s", found.doubt)
        return found

    async def _live(self, found: command.VllmCommand | None) -> Ending:
        """One life from start to end."""
        self._lives.begin()
        if found is None:
            self._life = AttachedServer(self._choice, self._supervision, self, again=self._lives.count > 0)
        else:
            self._life = LaunchedServer(self._choice, found, self._supervision, self)
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

    def _pause_s(self, ending: Ending) -> float | None:
        """Seconds until the next life, or None where there will be none."""
        if ending.was_ready:
            logger.error("%s", ending.reason)
            return self._lives.count_death(ending.reason)
        failure = understand(ending, self._choice)
        if failure.port_taken and not self._moved:
            self._moved = True
            logger.warning("vLLM's port was taken by another program; trying another one")
            return 0.0
        if failure.retry is not None and self._choice.retry and not self._retried:
            logger.error("%s", failure.error)
            self._retried, self._choice = True, failure.retry
            message = f"{failure.cause}; trying once more with: {' '.join(failure.retry.arguments)}"
            logger.warning("%s", message)
            self._lives.retry(message)
            return 0.0
        if not self._lives.count:  # whoever waits for `failure` tells of it
            tried = f" (A second start, with {' '.join(self._choice.arguments)}, failed too.)"
            self._lives.fail(
                type(failure.error)(f"{failure.error}{tried}") if self._retried else failure.error
            )
            return None
        logger.error("%s", failure.error)
        return self._lives.count_death(failure.cause)

    def _end_requests(self, reason: str) -> None:
        if self._session is None:
            return
        self._lives.lose(reason)
        text = self._lives.death_of_request(reason)
        for answer in tuple(self._session.answers):
            answer.end(EngineError(text) if answer.began else self._lives.unavailable())

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
            counters = read_counters(await session.life.api.metrics())
        except (SnugvlError, ValueError):
            return
        ledger = await asyncio.to_thread(
            lambda: session.gauge.read(session.measured, counters, session.life.family())
        )
        self._snapshot = Snapshot(time.time(), ledger, counters.load)

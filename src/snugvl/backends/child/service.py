"""A child server behind the service protocol: launched as a supervised child, or found running.

Its lives are those of our own engine (see `supervisor.py`). Where its start fails and the log says
that changed flags could help, it is started once more with those. What an engine speaks is its subclass's.

The server's process talks HTTP with it and imports neither torch nor transformers.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from snugvl.backends.child.answer import ChildStream, Chunks
from snugvl.backends.child.http import ChildApi, Served
from snugvl.backends.child.life import AttachedServer, Launch, LaunchedServer, Life
from snugvl.backends.child.requests import NO_RUNS, ServedModel, capabilities_of
from snugvl.backends.child.settings import ChildChoice, Facts, refuse_flags
from snugvl.backends.preparers import Preparation, Preparers
from snugvl.backends.spawned import Stage
from snugvl.backends.supervisor import Ending, Lives, Supervised, Supervision
from snugvl.core.messages import Request, Stream
from snugvl.core.service import Health, Snapshot, Tokens
from snugvl.diagnose.explain import explain
from snugvl.diagnose.result import Cause, Diagnosis
from snugvl.errors import CheckpointError, DoesNotFit, EngineError, RequestError, SnugvlError
from snugvl.inputs.trials import Trials

_MEMORY: Final = (
    "vision_profile", "context", "utilisation_over_free", "utilisation_low", "tenants", "cuda_graphs",
    "batch", "weights", "fragmentation", "spill", "residency", "out_of_memory", "host_memory", "host_killed",
    "image_buffer", "compute_buffer", "vision_weights",
)  # fmt: skip
_FULL: Final = ("weights", "context")
# Lines that say where it stopped, and nothing of why.
_NO_CAUSE: Final = ("tied_head", "exception")
_FILES: Final = ("checkpoint", "projector", "architecture")
_LESS: Final = (
    "A shorter --context, smaller pictures (--max-pixels) or a smaller model needs less: "
    "`snugvl plan` says what fits."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A start that failed.

    Attributes:
        error: cause and way out.
        cause: what it was, in a clause.
        port_taken: another port is all it needs.
        retry: the choice that could work, or None.
    """

    error: SnugvlError
    cause: str
    port_taken: bool = False
    retry: ChildChoice | None = None


def understand(ending: Ending, choice: ChildChoice, name: str, start: Sequence[str]) -> Failure:
    """Why a start failed and what can be done. `name`: of the engine; `start`: its command without flags."""
    if ending.error is not None:
        return Failure(ending.error, str(ending.error))
    command = shlex.join([*start, *choice.arguments])
    diagnosis = explain("\n".join([command, *ending.lines]), choice.card)
    causes = [cause for cause in diagnosis.causes if cause.kind not in _NO_CAUSE]
    if not causes:
        return Failure(
            EngineError(f"{name} did not start: {ending.reason}; its own command says more: {command}"),
            ending.reason,
        )
    cause = causes[0]
    if cause.kind == "port":
        taken = EngineError(f"{name} did not start: its port was taken twice in a row; start again")
        return Failure(taken, cause.title, port_taken=True)
    text = f"{cause.title}: {cause.explanation}"
    retry = _retry(diagnosis, causes, choice)
    way_out = _way_out(diagnosis)
    if choice.replan is not None and cause.kind in _FULL and retry is None:
        way_out = _LESS  # the plan has given it all that there is: no flag gains anything
    message = f"{name} did not start: {text} {way_out}".rstrip()
    of_files = CheckpointError if cause.kind in _FILES else EngineError
    kind = DoesNotFit if cause.kind in _MEMORY else of_files
    return Failure(kind(message), text.rstrip("."), retry=retry)


def _way_out(diagnosis: Diagnosis) -> str:
    changes = [
        f"remove {change.flag}" if change.new is None else f"{change.flag} {change.new}".rstrip()
        for change in diagnosis.changes
    ]
    if changes:
        return f"Change: {', '.join(changes)}."
    return diagnosis.notes[0] if diagnosis.notes else ""


def _retry(diagnosis: Diagnosis, causes: list[Cause], choice: ChildChoice) -> ChildChoice | None:
    if choice.replan is not None:
        changed: ChildChoice | None = choice.replan(diagnosis, choice)
    else:
        changed = choice.changed(diagnosis.changes)
    if changed is None or (changed.arguments, changed.environment) == (choice.arguments, choice.environment):
        return None
    return changed


@dataclass(slots=True)
class Session:
    """A life that serves, with its model and running answers. `own`: the subclass' own data about it."""

    life: Life
    model: ServedModel
    own: Any
    answers: set[ChildStream] = field(default_factory=set)

    @property
    def api(self) -> ChildApi:
        """The HTTP client of the engine's server."""
        return self.life.api


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine: the path and bodies to POST, and the reader of the answers."""

    path: str
    bodies: tuple[bytes, ...]
    chunks: Chunks


class ChildEngine(Supervised[Life]):
    """An `EngineService` whose engine is a server of another program. `name`, `backend`: the engine's name
    for people, and in options."""

    name: ClassVar[str]
    backend: ClassVar[str]
    ignores: ClassVar[tuple[tuple[str, str], ...]] = (NO_RUNS,)
    ours: ClassVar[Sequence[str]] = ()  # flags that only snugvl sets
    vague_limits: ClassVar[bool] = False

    def __init__(self, choice: ChildChoice, supervision: Supervision | None = None) -> None:
        refuse_flags(choice.arguments, self.ours, self.name)
        supervision = supervision or Supervision()
        waiting = {"again": "waiting for it", "after_pause": "waiting for it"} if choice.attach else {}
        lives = Lives(supervision, f"{self.name} has not been started", **waiting)
        super().__init__(supervision, lives, self.name, logging.getLogger(f"snugvl.{self.backend}"))
        self._choice: Any = choice
        self._session: Session | None = None
        self._preparers, self._trials = Preparers(), Trials()
        self._waking = 0  # requests that are made ready
        # With changed flags; with another port, since it was ready last.
        self._retried = self._moved = False
        self._told: dict[str, str] = {}  # faults, by what failed

    async def launch(self) -> Launch:
        """How the next life is launched, or found."""
        raise NotImplementedError

    def start_words(self) -> tuple[str, ...]:
        """The engine's own command for the model, as people type it, without flags."""
        raise NotImplementedError

    async def read_facts(self, served: Served) -> Facts:
        """Known facts of the checkpoint, under the limits of the flags."""
        raise NotImplementedError

    async def begin(self, life: Life, served: Served, model: ServedModel) -> Any:
        """The subclass' own data about a life that begins to serve (`Session.own`)."""
        raise NotImplementedError

    async def prepare(self, request: Request, session: Session, preparation: Preparation) -> Prepared:
        """The request in the engine's form.

        Raises:
            RequestError, ImageError: a request that the engine doesn't take.
        """
        raise NotImplementedError

    async def measure(self, session: Session) -> Snapshot:
        """Ledger and load now.

        Raises:
            SnugvlError, ValueError: the engine doesn't answer as expected.
        """
        raise NotImplementedError

    async def awake(self, session: Session) -> None:
        """Wait until the engine can compute, waking it where it sleeps."""

    async def beside(self, session: Session) -> None:
        """Background work while it serves, cancelled when the life ends."""

    def asleep(self, session: Session) -> str | None:
        """The health's detail while the engine sleeps; None while it doesn't."""
        return None

    def refused(self, error: RequestError, request: Request) -> RequestError:
        """The engine's refusal, with the field of snugvl's request that is to blame."""
        return error

    @property
    def choice(self) -> Any:
        """The choice that runs: the one it was made with, or the one of a retry."""
        return self._choice

    @property
    def pid(self) -> int | None:
        """Process id of the present engine's reaper; None where snugvl didn't start the engine."""
        return self._life.pid if isinstance(self._life, LaunchedServer) else None

    @property
    def running(self) -> int:
        """Requests that it has."""
        return 0 if self._session is None else len(self._session.answers)

    @property
    def busy(self) -> bool:
        """Whether requests are under way, those that are made ready for it among them."""
        return bool(self._waking or self.running)

    @property
    def health(self) -> Health:
        """The engine's health now."""
        asleep = None if self._session is None else self.asleep(self._session)
        return self._lives.health(asleep=asleep)

    async def start(self) -> None:
        """Begin to launch or to look, and return."""
        await super().start()
        if self._choice.attach:
            self._lives.detail = f"looking for {self.name} at {self._choice.attach}"

    async def submit(self, request: Request) -> Stream:
        """Start a request; returns with the first piece of its answer.

        Raises:
            RequestError, ImageError, EngineError: what it is refused with, by us or by the engine.
        """
        session = self._require_session()
        began = time.monotonic()
        self._waking += 1
        try:
            preparation = Preparation(request.deadline_s)
            prepared = await self.prepare(request, session, preparation)
            self._preparers.remember(request)
            await self.awake(session)
            session = self._require_session()  # it may have died meanwhile
        finally:
            self._waking -= 1
        answer = ChildStream(session.api, prepared.chunks, session.life.watchdog)
        session.answers.add(answer)
        left_s = request.deadline_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - began), 0.0)
        try:
            return await answer.open(
                prepared.path, prepared.bodies, left_s, lambda: session.answers.discard(answer)
            )
        except RequestError as error:
            raise self.refused(error, request) from None

    async def tokenize(self, request: Request) -> Tokens:
        """Token ids of a request's prompt: see `EngineService`."""
        raise NotImplementedError

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        raise NotImplementedError

    async def close(self) -> None:
        """End everything: a server that was launched with all its processes. Safe to call twice."""
        await super().close()
        self._preparers.close()
        self._trials.close()

    def on_loading(self, stage: Stage) -> None:
        """A start got further."""
        self._lives.load(self._choice.name, stage.detail, stage.progress)

    async def on_ready(self, life: Life, served: Served, marker_tokens: Mapping[str, int]) -> None:
        """Measure a server that has become ready, then take requests for it."""
        facts = await self.read_facts(served)
        model = ServedModel(served.model, served.context_tokens, facts, marker_tokens)
        session = Session(life, model, await self.begin(life, served, model))
        await self._measure(session)
        self._session = session
        device = facts.device or (self._snapshot.ledger.device if self._snapshot else "")
        self._capabilities = capabilities_of(
            self._choice.model or served.model,
            served.context_tokens,
            replace(facts, device=device),
            self.backend,
            self.ignores,
            self.vague_limits,
        )
        self._retried = self._moved = False
        version = f"{self.name} {served.version}".strip()
        self._lives.become_ready(f"{self._capabilities.model} is ready ({version})")

    def on_lost(self, reason: str) -> None:
        """Note that the server no longer answers; running requests end once the reason is known."""
        self._lives.lose(reason)

    def _require_session(self) -> Session:
        if self._lives.state != "ready" or self._session is None:
            raise self._lives.unavailable()
        return self._session

    async def _begin(self) -> Life:
        launch = await self.launch()
        if launch.choice.attach is not None:
            return AttachedServer(launch, self._supervision, self, again=self._lives.count > 0)
        return LaunchedServer(launch, self._supervision, self)

    def _pause_s(self, ending: Ending) -> float | None:
        if ending.was_ready:
            return super()._pause_s(ending)
        failure = understand(ending, self._choice, self.name, self.start_words())
        if failure.port_taken and not self._moved:
            self._moved = True
            self._logger.warning("%s's port was taken by another program; trying another one", self.name)
            return 0.0
        if failure.retry is not None and self._choice.retry and not self._retried:
            self._logger.error("%s", failure.error)
            self._retried, self._choice = True, failure.retry
            message = f"{failure.cause}; trying once more with: {' '.join(failure.retry.arguments)}"
            self._logger.warning("%s", message)
            self._lives.retry(message)
            return 0.0
        if not self._lives.count:  # the command that waits for `failure` reports it
            tried = f" (A second start, with {' '.join(self._choice.arguments)}, failed too.)"
            self._lives.fail(
                type(failure.error)(f"{failure.error}{tried}") if self._retried else failure.error
            )
            return None
        self._logger.error("%s", failure.error)
        return self._lives.count_death(failure.cause)

    def _end_requests(
        self, of_streams: Callable[[], SnugvlError], of_others: Callable[[], SnugvlError]
    ) -> None:
        session, self._session = self._session, None
        for answer in () if session is None else tuple(session.answers):
            answer.end(of_streams() if answer.began else of_others())

    async def _look_after(self, life: Life) -> None:
        """Do the background work of a life: a snapshot now and then, and the engine's `beside`."""
        beside: asyncio.Task[None] | None = None
        over = asyncio.Event()  # as what goes on beside requests may drop its cancellation, and begin again
        try:
            while self._life is life:
                await asyncio.sleep(self._supervision.snapshot_s)
                session = self._session
                if session is None:
                    continue
                if beside is None:
                    beside = asyncio.create_task(self._beside(session, over))
                await self._measure(session)
        finally:
            over.set()
            if beside is not None:
                beside.cancel()

    async def _beside(self, session: Session, over: asyncio.Event) -> None:
        """Run `beside`, again whenever it fails, until the life is over."""
        while not (over.is_set() or session.api.closed):
            try:
                await self.beside(session)
                return
            except Exception as error:
                self._tell(session, "what goes on beside requests failed, and begins again", error)
            await asyncio.sleep(self._supervision.snapshot_s)

    async def _measure(self, session: Session) -> None:
        """Take a snapshot; where the engine doesn't answer, the last one stays."""
        try:
            self._snapshot = await self.measure(session)
        except (SnugvlError, ValueError):
            return
        except Exception as error:  # of ours: what goes on beside requests goes on
            self._tell(session, "measuring failed, so the last snapshot stays", error)

    def _tell(self, session: Session, what: str, error: Exception) -> None:
        """Log a fault that ends nothing, once, as long as it is the same; not where a life has just ended."""
        why = f"{type(error).__name__}: {error}"
        if self._told.get(what) != why and not session.api.closed:
            self._told[what] = why
            self._logger.error("%s: %s", what, why, exc_info=error)

"""The engine's process from inside: reads the server's messages, answers with events.

    main thread     reads messages; answers pings; leaves when the server is gone, however it went
    loader          loads, warms up, then becomes the one that takes snapshots
    preparers       turn messages into prompts (`preparers.py`), so that one large picture holds up no other
    engine          steps (`engine_thread.py`); its deltas go into the outbox
    writer          empties the outbox: all that a step made goes out as one message

The process ends by `os._exit`: it holds nothing that the system doesn't take back, and a hung CUDA call
must not keep it.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from snugvl.backends.preparers import GivenUp, Preparation, Preparers
from snugvl.backends.process import wire
from snugvl.backends.process.wire import Channel, EngineChoice, Event
from snugvl.core.folders import leave_removed_folder
from snugvl.core.ledger import Ledger
from snugvl.core.messages import GoOn, Request, Text, user
from snugvl.core.options import Progress
from snugvl.core.resources import Region, keep_freed_memory
from snugvl.core.sampling import SamplingParams
from snugvl.core.service import Load, Recorder, Snapshot, Tokens, mark
from snugvl.errors import ENDINGS, EngineError, RequestTooLarge, SnugvlError, torn

if TYPE_CHECKING:  # it imports torch
    from snugvl.backends.hosted import Hosted, ReceiverStream

logger = logging.getLogger(__name__)

COUNTERS = (
    "preemptions", "prompt_tokens", "generated_tokens", "items_encoded", "prefix_hit_tokens",
    "prefix_query_tokens", "encoder_queries", "encoder_hits", "faults", "shortages",
    "kernel_compilations", "graph_captures",
)  # fmt: skip
SWITCH_S = 0.0005
# Of a prompt whose kernels are those of any longer one: at a first start they are compiled before all others
# (`engine/precompile.py`), those of a few tokens last.
WARM_TOKENS = 256
TOGETHER_S = 0.0003  # that events wait for others: the tokens of a step come within less
_SET_PARENT_DEATH_SIGNAL = 1


class ProcessMeter(Protocol):
    """Measures the process of one backend."""

    def read(self, memory: Mapping[str, int], load: Load) -> Ledger:
        """The ledger now, from what the backend says it holds (`Backend.memory`) and does."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedModel:
    """A loaded model and its meter. `settled`: called once, when requests are taken; quick."""

    backend: "Hosted[Any]"
    meter: ProcessMeter
    settled: Callable[[], None] = lambda: None


Loader = Callable[[EngineChoice, Progress], HostedModel]


def attach(descriptor: str, *region: str) -> Channel:
    """The channel to the server over an inherited socket, and what makes this process a good child.

    The arguments are those of the process: the socket's, and of a `Region`, if there is one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches both; the server decides
    faulthandler.enable()  # a segmentation fault says on stderr where
    threading.excepthook = lambda event: _die(event.exc_value)  # no thread ends unnoticed
    os.set_inheritable(int(descriptor), False)  # no grandchild may keep the connection open
    if region:
        wire.share(Region.inherited(*region))
    if sys.platform == "linux":
        # The main thread may hang in a driver call when the server dies, and not see the connection close.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return Channel(socket.socket(fileno=int(descriptor)))


def run(channel: Channel, load: Loader, prepare: Callable[[], None] | None = None) -> NoReturn:
    """Serve until the server says goodbye or is gone.

    `prepare` is called in a thread while the server plans: imports, without which nothing can be loaded.
    """
    # So soon a thread that prepares a picture gives the interpreter to the engine's thread: the GPU idles
    # meanwhile. Python's own 5 ms are as long as two decode steps.
    sys.setswitchinterval(SWITCH_S)
    leave_removed_folder()  # where torch's linear algebra would end this process
    recorder = Recorder()
    mark("process runs")
    if prepare is not None:
        threading.Thread(target=prepare, name="snugvl-prepare", daemon=True).start()
    try:
        start = channel.receive()
        if isinstance(start, wire.Start):
            child = Child(channel, load, start, recorder)
            while (message := channel.receive()) is not None and not isinstance(message, wire.Bye):
                child.handle(message)
    except BaseException:
        _die()
    os._exit(0)


class Outbox:
    """Events on their way to the server. `put` never waits and may be called in any thread.

    Where several came at once, as the tokens of a step do, the next ones wait for each other: waking for each
    of them would take Python's lock from the engine's thread as often.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put = self._events.put
        threading.Thread(target=self._write, name="snugvl-writer", daemon=True).start()

    def _write(self) -> None:
        events: list[Event] = []
        while True:
            several = len(events) > 1
            events = [self._events.get()]
            if several:
                time.sleep(TOGETHER_S)
            try:
                while True:
                    events.append(self._events.get_nowait())
            except Empty:
                pass
            try:
                self._channel.send(events)
            except OSError:
                os._exit(0)  # the server is gone


class Notes(logging.Handler):
    """Handler of this package's log: warnings go to stderr, as without a handler, INFO to the server."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(logging.INFO)
        self._outbox = outbox
        self._trouble = logging.StreamHandler()
        ours = logging.getLogger("snugvl")
        ours.setLevel(logging.INFO)
        ours.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send or print one record."""
        if record.levelno > logging.INFO:
            self._trouble.handle(record)
        else:
            self._outbox.put(wire.Note(record.getMessage()))


class Child:
    """The engine's process: the model and its requests."""

    def __init__(self, channel: Channel, load: Loader, start: wire.Start, recorder: Recorder) -> None:
        mark("told what to load")
        self._recorder = recorder
        self._outbox = Outbox(channel)
        Notes(self._outbox)
        self._preparers = Preparers()
        self._preparations: dict[int, Preparation] = {}  # of what has no reply yet
        self._model: HostedModel | None = None
        self._asked_at: float | None = None  # when the engine's thread was asked something, until it answers
        self._lock = threading.Lock()
        self._stage = ""  # of loading
        # Requests the server waits for; None while the prompt is prepared.
        self._streams: dict[int, ReceiverStream | None] = {}
        threading.Thread(target=self._live, args=(load, start), name="snugvl-loader", daemon=True).start()

    def handle(self, message: wire.ToEngine) -> None:
        """Do what the server asks, without waiting for it."""
        try:
            self._handle(message)
        except Exception as error:
            if not isinstance(message, wire.Submit | wire.Tokenize | wire.Detokenize):
                raise
            self._streams.pop(message.id, None)
            self._reply(wire.MessageReply(message.id, error=_reported(error)))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Ping():
                asked = self._asked_at
                stalled_s = 0.0 if asked is None else time.monotonic() - asked
                self._outbox.put(wire.Pong(stalled_s, self._preparers.longest_s))
            case wire.Submit():
                self._streams[message.id] = None
                self._prepare(message, lambda preparation: self._submit(message, preparation))
            case wire.Abort():
                preparation = self._preparations.get(message.id)
                if preparation is not None:
                    preparation.give_up()
                with self._lock:
                    stream = self._streams.pop(message.id, None)
                if stream is not None:
                    stream.close()
            case wire.Tokenize():
                backend = self._backend
                self._answer(message, lambda go_on: backend.tokenize(message.request, go_on))
            case wire.Detokenize():
                backend = self._backend
                self._answer(message, lambda _: backend.detokenize(message.ids))

    @property
    def _backend(self) -> "Hosted[Any]":
        assert self._model is not None, "the server asks for nothing before it is told that we are ready"
        return self._model.backend

    def _answer(self, message: wire.Tokenize | wire.Detokenize, ask: Callable[[GoOn], Tokens | str]) -> None:
        def job(preparation: Preparation) -> None:
            try:
                reply = wire.MessageReply(message.id, ask(preparation.go_on))
            except BaseException as error:  # what Rust panics at is not an Exception
                reply = wire.MessageReply(message.id, error=_reported(error))
            self._reply(reply)

        self._prepare(message, job)

    def _prepare(
        self, message: wire.Submit | wire.Tokenize | wire.Detokenize, job: Callable[[Preparation], None]
    ) -> None:
        """Run `job` when it is its turn. A bug in it ends the process: a request that hangs is worse."""
        submitted = message.request if isinstance(message, wire.Submit) else None
        preparation = Preparation(None if submitted is None else submitted.deadline_s)
        self._preparations[message.id] = preparation

        def guarded() -> None:
            try:
                job(preparation)
            except BaseException:
                _die()

        if isinstance(message, wire.Tokenize):
            submitted = replace(message.request, tools=None, grammar=None)  # counting takes no grammar
        weight = "light" if submitted is None else self._preparers.weigh(submitted)
        self._preparers.submit(preparation, guarded, weight)

    def _reply(self, reply: wire.MessageReply) -> None:
        """The one reply to a message: its preparation is over, however it ended."""
        self._preparations.pop(reply.id, None)
        self._outbox.put(reply)

    def _submit(self, message: wire.Submit, preparation: Preparation) -> None:
        try:
            preparation.go_on()
            request = replace(message.request, deadline_s=preparation.left_s())
            stream = self._backend.submit(request, preparation.go_on)
        except BaseException as error:  # what Rust panics at is not an Exception
            self._streams.pop(message.id, None)
            self._reply(wire.MessageReply(message.id, error=_reported(error)))
            return
        self._preparers.remember(message.request)
        self._reply(wire.MessageReply(message.id, stream.prompt_tokens))
        with self._lock:
            wanted = message.id in self._streams
            if wanted:
                self._streams[message.id] = stream
        if wanted:
            self._forward(message.id, stream)
        else:
            stream.close()

    def _forward(self, request_id: int, stream: "ReceiverStream") -> None:
        def end(error: Exception | None) -> None:
            if self._streams.pop(request_id, None) is not None:
                self._outbox.put(wire.End(request_id, None if error is None else wire.portable(error)))

        stream.forward(lambda delta: self._outbox.put((request_id, delta)), end)

    def _live(self, load: Loader, start: wire.Start) -> None:
        """Load, then send snapshots for ever. A failure then ends the process, and the server restarts it."""
        ready = False
        try:
            model = load(start.choice, self._report)
            keep_freed_memory()  # from here on: what loading needed for a while goes back to the system
            self._report("warming up", 0.95)
            before = _warm_up(model.backend)
            self._model = model
            self._outbox.put(self._snapshot(model, before))
            mark("ready")
            ready = True
            self._outbox.put(wire.Ready(model.backend.capabilities, self._recorder.timeline))
            model.settled()
            cold = True  # whether something can be done before it is needed
            while True:
                time.sleep(start.snapshot_s)
                self._outbox.put(self._snapshot(model, before))
                if cold and not self._streams:  # a pause: no request waits for this
                    cold = self._warm_more(model.backend)
        except BaseException as error:
            if why := torn(error):  # which no other start would find whole
                error = EngineError(why)
            if ready or not isinstance(error, SnugvlError):
                _die()
            self._outbox.put(wire.Failed(wire.portable(error)))

    def _warm_more(self, backend: "Hosted[Any]") -> bool:
        """`Hosted.warm_up`, without which requests wait where they need it, and nothing ends."""
        self._asked_at = time.monotonic()  # the engine's thread does a part of it
        try:
            return backend.warm_up()
        except ENDINGS:
            raise
        except BaseException:
            logger.exception("what later requests need can't be done ahead; they do it themselves")
            return False
        finally:
            self._asked_at = None

    def _report(self, detail: str, progress: float) -> None:
        stage = detail.partition(" (")[0]
        if stage != self._stage:
            self._stage = stage
            mark(stage)
        self._outbox.put(wire.Loading(detail, progress))

    def _snapshot(self, model: HostedModel, before: Load) -> Snapshot:
        self._asked_at = time.monotonic()
        load = model.backend.stats()
        memory = model.backend.memory()
        self._asked_at = None
        since = {name: getattr(load, name) - getattr(before, name) for name in COUNTERS}
        return Snapshot(time.time(), model.meter.read(memory, load), replace(load, **since))


def _die(error: BaseException | None = None) -> NoReturn:
    """End on a bug, with its traceback on stderr, which the server reads."""
    if error is None:
        traceback.print_exc()
    else:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _warm_up(backend: "Hosted[Any]") -> Load:
    """Run the kernels that every request would wait for; returns the counters afterwards."""
    texts = ["hello"]
    if backend.capabilities.device != "CPU":  # which has no kernels to compile, and reads slowly
        texts.insert(0, "hello " * WARM_TOKENS)
    for text in texts:
        with suppress(RequestTooLarge):  # a context of a few tokens is legal
            with backend.submit(Request((user(Text(text)),), SamplingParams(max_tokens=1))) as stream:
                for _ in stream:
                    pass
            break
    return backend.stats()


def _reported(error: BaseException) -> SnugvlError:
    """The error as it is sent to the server; a bug is also printed on stderr."""
    if isinstance(error, ENDINGS):
        raise error
    if not isinstance(error, SnugvlError | GivenUp):
        traceback.print_exception(error)
    return wire.portable(error)


assert set(COUNTERS) <= {field.name for field in fields(Load)}

"""One life of the engine's process, seen from the server's event loop: the adapter of the wire."""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from itertools import count
from typing import Any, Final

from snugvl.backends.inbox import Inbox, RemoteStream
from snugvl.backends.process import wire
from snugvl.backends.process.launch import Launched
from snugvl.backends.process.wire import Arena
from snugvl.backends.spawned import LAST_LINES, LogForm, SpawnedProcess
from snugvl.backends.supervisor import Ending
from snugvl.core.messages import Delta, Request
from snugvl.core.resources import sweep
from snugvl.core.service import Snapshot, Tokens
from snugvl.errors import SnugvlError

logger = logging.getLogger("snugvl.engine")

STOP_S = 2.0  # for each of goodbye, SIGTERM and SIGKILL
_BIT_BYTES = 1 << 20  # of pixels that are given to the socket at once
BURY_S = 0.5  # until the system says how a process ended whose connection is gone
# All that it prints is trouble (see `child.Notes`), and none of it is a progress bar's.
FORM: Final = LogForm("", r"(?!)", (), kept=(0, LAST_LINES), max_line=500, ends="\n")

Notice = wire.Loading | wire.Ready | wire.Failed | wire.Pong | Snapshot


class EngineProcess(SpawnedProcess):
    """A child process with an engine. Everything here runs in one event loop."""

    def __init__(
        self, popen: "subprocess.Popen[bytes]", arena: Arena | None, notice: Callable[[Notice], None]
    ) -> None:
        """`notice` is called with its messages about itself."""
        super().__init__(popen, "the engine process", FORM)
        self._counts_by_size = False  # until it says so
        self._arena = arena
        self._notice = notice
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ids = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._one_with_pixels = asyncio.Lock()
        self._behind: list[bytes] | None = None  # messages that wait until the pixels of one are sent

    @classmethod
    async def meet(
        cls, launched: Launched, start: wire.Start, notice: Callable[[Notice], None]
    ) -> "EngineProcess":
        """Take over a process that was launched and tell it what to load."""
        popen, ours = launched.take()
        with ExitStack() as undo:
            undo.callback(ours.close)
            arena = None if launched.region is None else Arena(launched.region)
            process = cls(popen, arena, notice)
            undo.callback(process._abandon)
            ours.setblocking(False)
            process._reader, process._writer = await asyncio.open_unix_connection(sock=ours)
            undo.callback(process._writer.close)
            process._send(wire.encode(start))
            undo.pop_all()
        return process

    @property
    def running(self) -> int:
        """Requests under way, those among them that are given up while they are prepared."""
        return len(self._inboxes.keys() | self._calls.keys())

    async def run(self) -> Ending:
        """Deliver what the process says until it is gone."""
        return Ending(await self.why_gone())

    async def _gone(self) -> None:
        """Deliver until the process is gone; one whose words can't be taken is ended."""
        try:
            while (events := await wire.receive(self._reader)) is not None:
                for event in events:
                    self._deliver(event)
        except Exception as error:
            logger.exception("what the engine process says can't be taken")
            self.kill(f"what the engine process says can't be taken ({type(error).__name__}: {error})")
        with suppress(TimeoutError):
            await self._wait_for_exit(BURY_S)

    def fail(self, stream_error: Callable[[], SnugvlError], call_error: Callable[[], SnugvlError]) -> None:
        """End running streams with `stream_error`, and calls without a reply yet with `call_error`."""
        inboxes, self._inboxes = self._inboxes, {}
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(call_error())
        for inbox in inboxes.values():
            inbox.end(stream_error())

    async def stop(self) -> None:
        """End the process, politely first; nothing is left of it."""
        await super().stop()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(sweep)  # what it had on disk

    async def submit(self, request: Request) -> RemoteStream:
        """Start a request; raises the engine's error where it refuses."""
        request_id, inbox = next(self._ids), Inbox()
        self._inboxes[request_id] = inbox
        try:
            tokens = await self._call(wire.Submit(request_id, request), heavy=bool(request.messages))
        except BaseException:  # refused, or the caller was cancelled
            self.abort(request_id)
            raise
        assert isinstance(tokens, int)
        return RemoteStream(inbox, tokens, lambda: self.abort(request_id))

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; its reader, if there is one, comes to the end."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None:
            inbox.end()
            self._send(wire.encode(wire.Abort(request_id)))

    async def tokenize(self, request: Request) -> Tokens:
        """See `EngineService`."""
        message = wire.Tokenize(next(self._ids), request, pixels=not self._counts_by_size)
        result = await self._call(message, heavy=bool(request.messages))
        assert isinstance(result, Tokens)
        return result

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """See `EngineService`."""
        result = await self._call(wire.Detokenize(next(self._ids), ids))
        assert isinstance(result, str)
        return result

    def ping(self) -> None:
        """Ask the main thread for a `Pong`."""
        self._send(wire.encode(wire.Ping()))

    async def _call(
        self, message: wire.Submit | wire.Tokenize | wire.Detokenize, *, heavy: bool = False
    ) -> Any:
        """Send and wait for the reply. `heavy`: may hold pictures, whose pixels are copied in a thread.

        A caller that is cancelled ends the work, and waits until that has ended: so there are as many callers
        as requests that the engine's process works on.
        """
        answer = asyncio.get_running_loop().create_future()
        self._calls[message.id] = answer
        asked = asyncio.ensure_future(self._ask(message, heavy=heavy))
        try:
            await asyncio.shield(asked)
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await _wait_quietly(asked)
            if not answer.done() and not asked.cancelled() and asked.exception() is None:
                self._send(wire.encode(wire.Abort(message.id)))
                await _wait_quietly(answer)
            raise
        finally:
            self._calls.pop(message.id, None)

    async def _ask(self, message: wire.Submit | wire.Tokenize | wire.Detokenize, *, heavy: bool) -> None:
        try:
            data = (
                await asyncio.to_thread(wire.pieces, message, self._arena) if heavy else wire.pieces(message)
            )
        except BaseException:
            self._free(message.id)  # of some of its pictures, perhaps
            raise
        if message.id in self._calls and not self._calls[message.id].done():  # the process may have died
            await self._send_all(data)
        else:
            self._free(message.id)

    async def _send_all(self, pieces: "list[bytes | memoryview]") -> None:
        """A message, and the pixels that follow it bit by bit, so that no copy of them waits to be sent."""
        head, *pixels = pieces
        assert isinstance(head, bytes)
        async with self._one_with_pixels if pixels else nullcontext():
            self._send(head)
            await self._drain()
            if not pixels:
                return
            self._behind = []
            try:
                for piece in pixels:
                    view = memoryview(piece)
                    for start in range(0, len(view), _BIT_BYTES):
                        self._write(view[start : start + _BIT_BYTES])
                        await self._drain()
            finally:
                behind, self._behind = self._behind, None
                for data in behind:
                    self._send(data)

    def _free(self, message_id: int) -> None:
        if self._arena is not None:
            self._arena.free(message_id)

    def _abandon(self) -> None:
        """End a process that could not be connected."""
        self._popen.kill()
        self._popen.communicate()

    def _end(self) -> None:
        self._popen.kill()

    def _ways_to_end(self) -> Sequence[tuple[Callable[[], object], float | None]]:
        return [(end, STOP_S) for end in (self._say_goodbye, self._popen.terminate, self._popen.kill)]

    def _say_goodbye(self) -> None:
        self._send(wire.encode(wire.Bye()))

    async def _drain(self) -> None:
        with suppress(ConnectionError):  # `run` sees it too, and says why
            await self._writer.drain()

    def _send(self, data: bytes) -> None:
        if self._behind is not None:
            self._behind.append(data)
        else:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    def _deliver(self, event: wire.Event) -> None:
        match event:
            case (int(request_id), Delta() as delta):
                inbox = self._inboxes.get(request_id)
                if inbox is not None:
                    inbox.put(delta)
            case wire.End():
                inbox = self._inboxes.pop(event.id, None)
                if inbox is not None:
                    inbox.end(event.error)
            case wire.MessageReply():
                self._free(event.id)
                call = self._calls.get(event.id)
                if call is None or call.done():
                    return
                if event.error is None:
                    call.set_result(event.value)
                else:
                    call.set_exception(event.error)
            case wire.Note():
                logger.info("%s", event.text)
            case wire.Loading() | wire.Ready() | wire.Failed() | wire.Pong() | Snapshot():
                if isinstance(event, wire.Ready):
                    self._counts_by_size = event.capabilities.counts_by_size
                self._notice(event)

    def _heard(self, line: str) -> None:
        logger.warning("%s", line)


async def _wait_quietly(work: "asyncio.Future[Any]") -> None:
    """Wait for it, cancelled or not, and drop its result or its error."""
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()

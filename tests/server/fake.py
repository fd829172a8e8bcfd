"""A scripted engine: what it says, how fast, and what goes wrong are the test's choice."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities, Delta, Request, Usage
from snugvl.core.service import Health, Load, Snapshot, Tokens
from snugvl.errors import EngineUnavailable, RequestError

CAPABILITIES = Capabilities("fake", 512, images=True, video=False, max_pixels=65_536, min_pixels=1024)
LEDGER = Ledger(
    "a fake GPU",
    (
        LedgerRow("KV cache", 4096, 4096, 1024, kind=Kind.CACHE),
        LedgerRow("text weights", 8192, 8000, kind=Kind.TEXT),
    ),
    total_bytes=100_000,
    free_bytes=50_000,
    process_bytes=20_000,
)


@dataclass
class Script:
    """How one request goes.

    Attributes:
        words: pieces of the answer, one a delta.
        wait_s: before each piece; inf: it never comes.
        error: raised after the last piece instead of finishing.
        refusal: raised by `submit`.
        submit_s: how long `submit` takes.
        stop: the stop string that ended it.
        finish: why it ended.
    """

    words: Sequence[str] = ("Hello", " there")
    wait_s: float = 0.0
    error: Exception | None = None
    refusal: Exception | None = None
    submit_s: float = 0.0
    stop: str | None = None
    finish: Literal["stop", "length"] = "stop"

    def steps(self, choices: int) -> Iterator["Step"]:
        """Deltas of so many equal choices, and how they end."""
        for word in self.words:
            yield tuple(Delta(word, choice) for choice in range(choices))
        if self.error is not None:
            yield self.error
            return
        usage = Usage(7, len(self.words) * choices, 2)
        yield tuple(
            Delta("", choice, (), self.finish, usage if choice == choices - 1 else None, self.stop)
            for choice in range(choices)
        )


Step = tuple[Delta, ...] | Exception


class FakeStream:
    """The answer of one request, read by a thread or by an event loop; knows whether it was closed.

    Args:
        steps: what comes at once, or is raised in its place.
        wait_s: before each step with text, asked anew each time.
        left: called once, when it is closed.
        stopped: ends an answer that a thread reads.
        closes: whether it closes itself before its last step; else its reader has to.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        wait_s: Callable[[], float] = lambda: 0.0,
        left: Callable[["FakeStream"], None] = lambda stream: None,
        stopped: threading.Event | None = None,
        closes: bool = False,
    ) -> None:
        self._steps, self._wait_s, self._left, self._closes = steps, wait_s, left, closes
        self._stopped = stopped or threading.Event()
        self._ended: asyncio.Future[None] | None = None
        self._read: Iterator[Delta] | None = None
        self._heard: AsyncIterator[Delta] | None = None
        self.closed = False
        self.prompt_tokens = 7

    def __iter__(self) -> Iterator[Delta]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if _has_text(step) and (self._stopped.wait(self._wait_s()) or self.closed):
                yield Delta("", finish_reason="abort")
                return
            yield from step

    def __next__(self) -> Delta:
        self._read = self._read or iter(self)
        return next(self._read)

    async def __anext__(self) -> Delta:
        self._heard = self._heard or aiter(self)
        return await anext(self._heard)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for step in self._steps:
            last = isinstance(step, Exception) or step[-1].finish_reason is not None
            if last and self._closes:
                self.close()
            if isinstance(step, Exception):
                raise step
            if _has_text(step) and (seconds := self._wait_s()):
                self._ended = asyncio.get_running_loop().create_future()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended, min(seconds, 3600))
            for delta in step:
                yield delta

    def go_on(self) -> None:
        """Wait no longer for the next piece."""
        if self._ended is not None:
            waiting = self._ended
            loop = waiting.get_loop()
            loop.call_soon_threadsafe(lambda: waiting.done() or waiting.set_result(None))

    def end(self, error: Exception) -> None:
        """Fail now, as with an engine that dies."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._left(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_text(step: tuple[Delta, ...]) -> bool:
    return any(delta.text for delta in step)


@dataclass
class FakeService:
    """An `EngineService` for tests; everything may be changed while it runs."""

    script: Script | Callable[[Request], Script] = field(default_factory=Script)
    health: Health = field(default_factory=lambda: Health("ready", "fake is ready"))
    capabilities: Capabilities | None = CAPABILITIES
    requests: list[Request] = field(default_factory=list)
    counted: list[Request] = field(default_factory=list)
    running: set[FakeStream] = field(default_factory=set)
    closed: bool = False

    @property
    def snapshot(self) -> Snapshot | None:
        if self.capabilities is None:
            return None
        used = len(self.running)
        return Snapshot(time.time(), LEDGER, Load(used, 0, free_blocks=8 - used, num_blocks=8, block_size=16))

    async def start(self) -> None:
        """Nothing to load."""

    async def submit(self, request: Request) -> FakeStream:
        if not self.health.ready:
            raise EngineUnavailable(self.health.detail, retry_after_s=self.health.retry_after_s or 2.0)
        script = self.script(request) if callable(self.script) else self.script
        self.requests.append(request)
        if script.submit_s:
            await asyncio.sleep(script.submit_s)
        if script.refusal is not None:
            raise script.refusal
        stream = FakeStream(
            script.steps(request.sampling.n),
            wait_s=lambda: script.wait_s,
            left=self.running.discard,
            closes=True,
        )
        self.running.add(stream)
        return stream

    async def tokenize(self, request: Request) -> Tokens:
        text = request.prompt if isinstance(request.prompt, str) else "".join(map(str, request.messages))
        self.counted.append(request)
        return Tokens(tuple(text.encode()))

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:
            raise RequestError("a token id is not in the vocabulary", field="tokens") from None

    def go_on(self) -> None:
        """Answers that wait go on, and wait no more. Called by a signal's handler."""
        assert isinstance(self.script, Script)
        self.script.wait_s = 0.0
        for stream in tuple(self.running):
            stream.go_on()

    async def drain(self, timeout_s: float) -> bool:
        self.health = replace(self.health, state="draining", detail="shutting down")
        end = time.monotonic() + timeout_s
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self.running

    async def close(self) -> None:
        self.closed = True
        for stream in tuple(self.running):
            stream.end(EngineUnavailable("the server has shut down"))

"""Queues from an engine in this process to one reader, and what every answer has that is read once.

A `Mailbox` goes from the engine's thread to a reader in a thread or in an event loop. Answers of engines in
other processes come by `inbox.py`.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, then an end that may be an error. Unbounded: a request's own limits bound it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False
        self._error: Exception | None = None
        self._put: Callable[[T], None] | None = None  # where items go that nobody reads here
        self._end: Callable[[Exception | None], None] | None = None

    def put(self, item: T) -> None:
        """Add an item; ignored once closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._wake()

    def close(self, error: Exception | None = None) -> None:
        """No more items. The reader gets what is left, then `error` or the end. The first call counts."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
                self._wake()

    def get(self) -> T | None:
        """The next item, or None at the end. Waits. Raises the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return self._next()

    async def get_async(self) -> T | None:
        """`get` without blocking the event loop."""
        while True:
            with self._changed:
                if self._items or self._closed:
                    return self._next()
                loop = asyncio.get_running_loop()
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def forward(self, put: Callable[[T], None], end: Callable[[Exception | None], None]) -> None:
        """Hand what is here and what comes to `put`, and the end or its error to `end`, in order.

        Both are called where `put` and `close` are (or here, for what is there already), under a lock; they
        must not wait. Nobody else may read.
        """
        with self._changed:
            assert self._put is None, "a mailbox is forwarded once"
            self._put, self._end = put, end
            self._wake()

    def _next(self) -> T | None:
        if self._items:
            return self._items.popleft()
        if self._error is not None:
            raise own(self._error)
        return None

    def _wake(self) -> None:
        if self._put is not None:
            while self._items:
                self._put(self._items.popleft())
            if self._closed and self._end is not None:
                end, self._end = self._end, None
                end(self._error)
            return
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with suppress(RuntimeError):  # a loop that has closed, and with it whoever waited
                loop.call_soon_threadsafe(_finish, waiter)


def own(error: Exception) -> Exception:
    """A copy of an error, for one reader.

    One error may end many answers, and an answer may be read again after its end: each thread that raises the
    same exception would add its frames to what all others print.
    """
    try:
        mine = copy.copy(error)
    except Exception:  # a library's exception whose arguments don't make another
        return error
    mine.__cause__ = error.__cause__
    return mine.with_traceback(error.__traceback__)


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # the reader may have been cancelled meanwhile
        waiter.set_result(None)


class OneAnswer:
    """The answer to one request. Closing or dropping it aborts what is not finished.

    Whoever iterates it to its end says so by `_open`.
    """

    def __init__(self, prompt_tokens: int, abort: Callable[[], object]) -> None:
        self._prompt_tokens = prompt_tokens
        self._abort = abort
        self._open = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included."""
        return self._prompt_tokens

    def close(self) -> None:
        """Abort what is not finished. Safe to call twice, and in any thread."""
        if self._open:
            self._open = False
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

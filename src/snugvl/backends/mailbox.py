"""A queue from the engine's thread to one reader, and the base of answers that are read once.

The reader may wait in a thread or in an event loop.
"""

import asyncio
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
        self._put: Callable[[T], None] | None = None  # where items are forwarded, which aren't read here
        self._end: Callable[[Exception | None], None] | None = None

    def put(self, item: T) -> None:
        """Add an item; ignored once closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Take no more items. The reader gets those left, then `error` or the end. The first call counts."""
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
        """Hand all items, present and future ones, to `put`, and the end or its error to `end`, in order.

        Both are called in the threads of `put` and `close` (or here, for items already there), under a lock;
        they must not wait. There may be no other reader.
        """
        with self._changed:
            assert self._put is None, "a mailbox is forwarded once"
            self._put, self._end = put, end
            self._wake()

    def _next(self) -> T | None:
        if self._items:
            return self._items.popleft()
        if self._error is not None:
            raise self._error
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


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # the reader may have been cancelled meanwhile
        waiter.set_result(None)


class OneAnswer:
    """The answer to one request. Closing or dropping it aborts what is not finished.

    A subclass that was read to its end notes that in `_open`.
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

"""Answers that are read once, and queues of deltas from engines in other processes, merged while unread."""

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Self

from snugvl.core.messages import NO_MORE, Closing, Delta


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


class OneAnswer(Closing, ABC):
    """The deltas of one request, an iterator. Closing or dropping it aborts what is not finished."""

    def __init__(self, prompt_tokens: int, abort: Callable[[], object]) -> None:
        self._prompt_tokens = prompt_tokens
        self._abort = abort
        self._open = True

    @abstractmethod
    def _next(self) -> Delta | None:
        """The next delta, or None at the end; waits for it in a thread."""

    @abstractmethod
    async def _next_async(self) -> Delta | None:
        """The next delta, or None at the end; waits for it in an event loop."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included."""
        return self._prompt_tokens

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if (delta := self._next()) is None:
            self._open = False
            raise StopIteration(NO_MORE)
        return delta

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if (delta := await self._next_async()) is None:
            self._open = False
            raise StopAsyncIteration(NO_MORE)
        return delta

    def close(self) -> None:
        """Abort what is not finished. Safe to call twice, and in any thread."""
        if self._open:
            self._open = False
            self._abort()

    def __del__(self) -> None:
        self.close()


class Inbox:
    """Deltas of one request on their way to one reader. Lives in the server's event loop, without locks.

    What the reader has not taken is merged, choice by choice: a reader that is slow gets fewer and longer
    deltas, and one that never comes costs no more than the answer itself. Merged or not, the count of tokens
    never falls from one delta to the next, and the usage is on the last one.
    """

    def __init__(self) -> None:
        self._unread: dict[int, Delta] = {}  # by choice, oldest first; the one with the usage last
        self._counted = 0  # tokens that the reader was told of
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Add a delta; ignored once ended."""
        if self._ended:
            return
        earlier = self._unread.get(delta.choice)
        if delta.usage is not None:
            self._unread.pop(delta.choice, None)
        self._unread[delta.choice] = delta if earlier is None else _merged(earlier, delta)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more deltas. The reader gets what is left, then `error` or the end. The first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def get(self) -> Delta | None:
        """The next delta, or None at the end. Raises the error that ended it."""
        while not self._unread:
            if self._ended:
                if self._error is not None:
                    raise own(self._error)
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delta = self._unread.pop(next(iter(self._unread)))
        # A delta that was merged counts what came after those that are read next, too.
        self._counted = max(self._counted, delta.completion_tokens)
        return replace(delta, completion_tokens=self._counted)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():  # done: the reader may have been cancelled
            self._reader.set_result(None)


def _merged(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.text + second.text,
        second.choice,
        first.logprobs + second.logprobs,
        second.finish_reason,
        second.usage,
        second.stop,
        first.reasoning + second.reasoning,
        second.completion_tokens,
        first.prompt_logprobs + second.prompt_logprobs,
        second.cached_tokens,
        second.drafts,
        second.reasoning_tokens,
    )


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call it in the loop, unless that has closed, and with it what it would end."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class RemoteStream(OneAnswer):
    """Reads an inbox, in its event loop, in another one or in a thread."""

    def __init__(self, inbox: Inbox, prompt_tokens: int, abort: Callable[[], None]) -> None:
        self._inbox = inbox
        self._loop = loop = asyncio.get_running_loop()
        super().__init__(prompt_tokens, lambda: _soon(loop, abort))

    async def _next_async(self) -> Delta | None:
        ours = asyncio.get_running_loop() is self._loop
        return await (self._inbox.get() if ours else asyncio.wrap_future(self._elsewhere()))

    def _next(self) -> Delta | None:  # in a thread that is not the event loop's
        return self._elsewhere().result()

    def _elsewhere(self) -> "Future[Delta | None]":
        return asyncio.run_coroutine_threadsafe(self._inbox.get(), self._loop)

"""One request under way: opened, read as it streams, ended by its end, an error, its deadline or its reader.

It is read as fast as the engine sends it; what its reader hasn't taken yet is merged (`Inbox`).
Closing the stream closes the connections, on which the engine aborts the request.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import httpx

from snugvl.backends.child.http import ChildApi
from snugvl.backends.child.settings import Facts
from snugvl.backends.child.watch import Watchdog
from snugvl.backends.inbox import Inbox, RemoteStream
from snugvl.core.folders import json_object
from snugvl.core.messages import Delta, Logprob, Request, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import DeadlineExceeded, EngineError, RequestError, SnugvlError
from snugvl.inputs.reasoning import VARIABLE, ReasoningSplitter
from snugvl.inputs.tools.forms import opening


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How an answer marks reasoning. `opened`: it begins inside; `call`: text that begins a tool's call."""

    opened: bool
    call: str | None


def reasoning_of(request: Request, facts: Facts) -> ReasoningSyntax | None:
    """The form of reasoning in a request's answer; None with a grammar, or for a bare prompt."""
    if facts.reasoning is None or request.grammar is not None or request.prompt is not None:
        return None
    told = facts.thinking.template(request).get(VARIABLE)
    begun = facts.reasoning if told is None else bool(told and facts.reasoning_asked)
    return ReasoningSyntax(begun, None if request.tools is None else opening(facts.tool_form))


class Chunks:
    """Reads the chunks of one request, which an engine may answer in several streams.

    Greedy choices are all the same: one is asked for, and copied. The end of the choice that ends last waits
    for the usage of all.
    """

    engine: ClassVar[str]

    def __init__(self, sampling: SamplingParams, reasoning: ReasoningSyntax | None) -> None:
        """`reasoning`: None where none is to be told from the answer."""
        choices = range(1 if sampling.greedy else sampling.n)
        self._copies = sampling.n if sampling.greedy else 1
        self._unfinished = set(choices)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._alternatives = sampling.logprobs or 0
        self._splitters = {
            index: ReasoningSplitter(reasoning.opened, call=reasoning.call)
            for index in choices
            if reasoning is not None
        }
        self._generated = dict.fromkeys(choices, 0)  # tokens by choice
        self._thought = dict.fromkeys(choices, 0)  # tokens of reasoning by choice
        self._cached = 0
        self._last: Delta | None = None

    @property
    def usage(self) -> Usage:
        """Tokens of all choices, as far as known; a chunk with a choice has the prompt's."""
        raise NotImplementedError

    def ended(self, answer: int) -> bool:
        """Whether every choice of one of the streams has ended."""
        raise NotImplementedError

    def over(self, answer: int) -> bool:
        """Whether nothing that a stream still brings is wanted."""
        raise NotImplementedError

    def read(self, chunk: Mapping[str, Any], answer: int = 0) -> list[Delta]:
        """The deltas that a chunk of one of the streams adds.

        Raises:
            EngineError: it is of no form that is known.
        """
        try:
            return list(self._read(chunk, answer))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self.engine} sent a chunk that we don't understand ({error!r})") from None

    async def settle(self, api: ChildApi) -> None:
        """Ask the engine for what the last chunk left open."""
        raise NotImplementedError

    def end(self) -> list[Delta]:
        """The deltas that were held back: the end of the last choice, with the usage of all."""
        if self._last is None:
            return []
        ends = self._copied(self._last)
        thought = sum(self._thought.values()) * self._copies
        last = replace(ends[-1], usage=self.usage, cached_tokens=self._cached, reasoning_tokens=thought)
        return [*ends[:-1], last]

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        raise NotImplementedError

    def _parts(self, text: str, choice: int, *, last: bool) -> tuple[str, str]:
        """(text, reasoning) of a choice's new text."""
        splitter = self._splitters.get(choice)
        if splitter is None:
            return text, ""
        begun = splitter.thinking
        reasoning, said = splitter.push(text)
        if begun or splitter.thinking or reasoning:
            self._thought[choice] = self._generated[choice]
        thought, rest = splitter.flush() if last else ("", "")
        return said + rest, reasoning + thought

    def _logprob(self, item: Mapping[str, Any]) -> Logprob:
        """Log-probability of a token, with the alternatives asked for: an engine may list one more."""
        tops = (item.get("top_logprobs") or ())[: self._alternatives]
        return Logprob(*_token(item), tuple(TokenLogprob(*_token(top)) for top in tops))

    def _count(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(self._generated.values()) * self._copies

    def _copied(self, delta: Delta) -> list[Delta]:
        copy = replace(delta, prompt_logprobs=())
        return [delta, *(replace(copy, choice=choice) for choice in range(1, self._copies))]


def _token(item: Mapping[str, Any]) -> tuple[str, bytes, float]:
    raw = item.get("bytes")
    return item["token"], item["token"].encode() if raw is None else bytes(raw), float(item["logprob"])


DYING_S = 20.0  # until it is known why vLLM died; the supervisor ends the answer with that


class ChildStream:
    """The answer to one request. `watchdog` learns of every piece that comes, and is asked when none does."""

    def __init__(self, api: ChildApi, chunks: Chunks, watchdog: Watchdog) -> None:
        self._api = api
        self._chunks = chunks
        self._watchdog = watchdog
        self._inbox = Inbox()
        self._began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    async def open(
        self, path: str, bodies: Sequence[bytes], deadline_s: float | None, done: Callable[[], None]
    ) -> RemoteStream:
        """POST the request, once a body; returns the stream when its first piece is there.

        Raises:
            RequestError, EngineError: what the engine refuses or fails with.
        """
        self._task = asyncio.create_task(self._read(path, bodies))
        self._task.add_done_callback(lambda _: done())
        if deadline_s is not None:
            error = DeadlineExceeded(
                f"the deadline of {deadline_s:g} s passed before the answer was complete"
            )
            self._deadline = asyncio.get_running_loop().call_later(deadline_s, self.end, error)
        try:
            return RemoteStream(self._inbox, await asyncio.shield(self._began), self.end)
        except BaseException:
            self.end()
            raise

    @property
    def began(self) -> bool:
        """Whether a piece of it has come."""
        return self._began.done()

    def end(self, error: SnugvlError | None = None) -> None:
        """End it now, with an error or without."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._fail(error)
        if self._task is not None:
            self._task.cancel()

    def _fail(self, error: SnugvlError | None) -> None:
        self._inbox.end(error)
        if not self._began.done():
            if error is None:
                self._began.cancel()
            else:
                self._began.set_exception(error)

    async def _read(self, path: str, bodies: Sequence[bytes]) -> None:
        parts = [asyncio.create_task(self._part(path, body, index)) for index, body in enumerate(bodies)]
        try:
            await asyncio.gather(*parts)
            for delta in self._chunks.end():
                self._inbox.put(delta)
            self._fail(None)
        except RequestError as error:
            self._fail(error)
        except SnugvlError as error:
            await self._wait_for_death()
            self._fail(error)
        except httpx.HTTPError as error:
            await self._wait_for_death()
            self._fail(EngineError(f"the connection to {self._api.name} broke ({type(error).__name__})"))
        except Exception as error:  # a bug of ours: no reader may wait for ever
            self._fail(EngineError(f"the answer could not be read: {type(error).__name__}: {error}"))
            raise
        finally:
            for part in parts:
                part.cancel()
            if self._deadline is not None:
                self._deadline.cancel()

    async def _part(self, path: str, body: bytes, index: int) -> None:
        async with AsyncExitStack() as until:
            response = await self._api.open(path, body, until)
            await self._stream(response, index)

    async def _wait_for_death(self) -> None:
        """Return at once if the engine is well; else this answer is about to be ended with the reason."""
        if not await self._watchdog.confirm_alive():
            await asyncio.sleep(DYING_S)

    async def _stream(self, response: httpx.Response, index: int) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            self._watchdog.alive()
            data = line[5:].strip()
            if data == "[DONE]":
                break
            await self._take(_chunk(data, self._api.name), index)
            if self._chunks.over(index):
                return
        if not self._chunks.ended(index):
            raise httpx.RemoteProtocolError("the answer ended early")

    async def _take(self, chunk: dict[str, Any], index: int) -> None:
        if "error" in chunk:
            raise self._api.error_of(chunk, 500)
        deltas = self._chunks.read(chunk, index)
        await self._chunks.settle(self._api)
        if not self._began.done():
            self._began.set_result(self._chunks.usage.prompt_tokens)
        for delta in deltas:
            self._inbox.put(delta)


def _chunk(data: str, name: str) -> dict[str, Any]:
    if (value := json_object(data)) is None:
        raise EngineError(f"{name} sent a chunk that is not a JSON object: {data[:80]!r}")
    return value

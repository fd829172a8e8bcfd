"""One request under way: opened, read as it streams, ended by its end, an error, its deadline or its reader.

It is read as fast as vLLM sends it; what its reader hasn't taken yet is merged (`remote.Inbox`). Closing the
stream closes the connection, on which vLLM aborts the request. vLLM's chunks become deltas of ours:

    {"choices": [{"index": 0, "delta": {"content": …} or "text": …, "logprobs": …, "finish_reason": …,
                  "stop_reason": a stop string or a token id}], "usage": …}   … and last one with the usage

The usage comes after everything, and belongs to the last delta: the last end of a choice waits for it.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import httpx

from snugvl.backends.process.remote import Inbox, RemoteStream
from snugvl.backends.vllm.api import VllmApi, error_of
from snugvl.backends.vllm.settings import Facts
from snugvl.backends.vllm.watch import Watchdog
from snugvl.core.messages import Delta, Logprob, Request, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import DeadlineExceeded, EngineError, RequestError, SnugvlError
from snugvl.inputs.reasoning import VARIABLE, ReasoningSplitter
from snugvl.inputs.tools.forms import opening

_FINISH: Mapping[str, Any] = {"stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop"}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer thinks. `opened`: it begins inside the reasoning; `call`: what begins a tool's call."""

    opened: bool
    call: str | None


def reasoning_of(request: Request, facts: Facts) -> Reasoning | None:
    """How the answer to a request thinks: not at all where a grammar makes it, or to a bare prompt."""
    if facts.reasoning is None or request.grammar is not None or request.prompt is not None:
        return None
    told = facts.thinking.template(request).get(VARIABLE)
    begun = facts.reasoning if told is None else bool(told and facts.reasoning_asked)
    return Reasoning(begun, None if request.tools is None else opening(facts.tool_form))


class Chunks:
    """Reads the chunks of one request. `reasoning`: None where none is to be told from the answer."""

    def __init__(
        self, sampling: SamplingParams, reasoning: Reasoning | None = None, prompt: str = ""
    ) -> None:
        """`prompt`: what the answer begins with where log-probabilities of the prompt are wanted."""
        self._copies = sampling.n if sampling.greedy else 1  # of a greedy answer, which is asked for once
        self._unfinished = set(range(1 if sampling.greedy else sampling.n))
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._alternatives = sampling.logprobs or 0
        self._splitters = {
            index: ReasoningSplitter(reasoning.opened, call=reasoning.call)
            for index in self._unfinished
            if reasoning is not None
        }
        self._prompt = prompt
        self._judges, self._judged = sampling.prompt_logprobs, False  # wanted, and told
        # Choices whose piece with the prompt hasn't come yet.
        self._unechoed = set(self._unfinished) if sampling.prompt_logprobs else set()
        self._generated: dict[int, int] = {}  # tokens by choice
        self._last: Delta | None = None
        self._usage, self._cached = Usage(0, 0), 0
        self.stop_token: int | None = None  # ended the choice that was read last, and has no text yet

    @property
    def prompt_tokens(self) -> int:
        """As far as known; a chunk with a choice has it."""
        return self._usage.prompt_tokens

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    def read(self, chunk: Mapping[str, Any]) -> list[Delta]:
        """What a chunk adds.

        Raises:
            EngineError: it isn't of the form above.
        """
        try:
            self._count(chunk.get("usage"))
            for choice in chunk.get("choices", ()):
                told = chunk.get("usage") or {}
                self._generated[int(choice["index"])] = int(told.get("completion_tokens") or 0)
            return [delta for choice in chunk.get("choices", ()) for delta in self._choice(choice)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"vLLM sent a chunk that we don't understand ({error!r})") from None

    def end(self) -> list[Delta]:
        """What was held back: the end of the last choice, with the usage of all."""
        if self._last is None:
            return []
        usage = replace(self._usage, completion_tokens=self._usage.completion_tokens * self._copies)
        ends = self._copy_delta(self._last)
        return [*ends[:-1], replace(ends[-1], usage=usage, cached_tokens=self._cached)]

    def named(self, stop: str) -> None:
        """The text of `stop_token`, once it is known."""
        assert self._last is not None
        self._last = replace(self._last, stop=stop)
        self.stop_token = None

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        if usage is None:
            return
        details = usage.get("prompt_tokens_details") or {}
        pictures = details.get("multimodal_tokens") or {}
        prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
        # A chunk counts the tokens of its own choice; the last one those of all.
        images = sum(int(number) for number in pictures.values())
        self._cached = int(details.get("cached_tokens") or 0)
        self._usage = Usage(prompt, max(completion, self._usage.completion_tokens), images)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Delta]:
        index, finish = int(choice["index"]), choice.get("finish_reason")
        text, reasoning = self._parts(choice, last=finish is not None)
        logprobs = _logprobs(choice.get("logprobs"), self._alternatives)
        scored: tuple[Logprob, ...] = ()
        if index in self._unechoed:  # the first piece of a choice has the prompt before it
            self._unechoed.discard(index)
            text = text.removeprefix(self._prompt)
            scored, logprobs = logprobs[: self.prompt_tokens], logprobs[self.prompt_tokens :]
            scored, self._judged = () if self._judged else scored, True
        generated = sum(self._generated.values()) * self._copies
        reason = choice.get("stop_reason")
        if finish == "stop" and not isinstance(reason, str) and not self._judges:
            logprobs = logprobs[:-1]  # of the token that ended it, which is no text
        delta = Delta(
            text,
            index,
            logprobs,
            reasoning=reasoning,
            completion_tokens=generated,
            prompt_logprobs=scored,
        )
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copy_delta(delta)
            return
        self._unfinished.discard(index)
        stop = reason if isinstance(reason, str) else None
        delta = replace(delta, finish_reason=_FINISH[finish], stop=stop)
        if isinstance(reason, int) and reason in self._stop_ids:
            self.stop_token = reason
        if self._last is not None:
            yield self._last
        self._last = delta

    def _parts(self, choice: Mapping[str, Any], *, last: bool) -> tuple[str, str]:
        """Text and reasoning. A server with a parser of reasoning tells them apart itself."""
        if "text" in choice:
            return choice["text"] or "", ""
        delta = choice.get("delta") or {}
        text, told = (
            delta.get("content") or "",
            delta.get("reasoning") or delta.get("reasoning_content") or "",
        )
        index = int(choice["index"])
        if told:
            self._splitters.pop(index, None)
        splitter = self._splitters.get(index)
        if splitter is None:
            return text, told
        reasoning, text = splitter.push(text)
        thought, rest = splitter.flush() if last else ("", "")
        return text + rest, reasoning + thought

    def _copy_delta(self, delta: Delta) -> list[Delta]:
        copy = replace(delta, prompt_logprobs=())
        return [delta, *(replace(copy, choice=choice) for choice in range(1, self._copies))]


def _logprobs(value: Mapping[str, Any] | None, most: int) -> tuple[Logprob, ...]:
    """Those of a chat's chunk (`content`) or of a completion's (`tokens`, `token_logprobs`, …).

    Beside the `most` alternatives vLLM lists the token itself where it is none of them.
    """
    if not value:
        return ()
    if "tokens" not in value:
        return tuple(
            Logprob(*_token(item), tuple(TokenLogprob(*_token(top)) for top in item["top_logprobs"][:most]))
            for item in value.get("content") or ()
        )
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        Logprob(token, token.encode(), nan if logprob is None else float(logprob), _rank(top)[:most])
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _token(item: Mapping[str, Any]) -> tuple[str, bytes, float]:
    token = item["token"]
    raw = item.get("bytes")
    return token, token.encode() if raw is None else bytes(raw), float(item["logprob"])


def _rank(top: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    pairs = sorted((top or {}).items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(text, text.encode(), float(logprob)) for text, logprob in pairs)


DYING_S = 20.0  # until it is known why vLLM died; whoever watches it ends the answer with that


class VllmStream:
    """The answer to one request. `watchdog` is told of every piece that comes, and asked when none does.

    `reasoning`, `prompt`: see `Chunks`.
    """

    def __init__(
        self,
        api: VllmApi,
        sampling: SamplingParams,
        watchdog: Watchdog,
        reasoning: Reasoning | None = None,
        prompt: str = "",
    ) -> None:
        self._api = api
        self._chunks = Chunks(sampling, reasoning, prompt)
        self._watchdog = watchdog
        self._inbox = Inbox()
        self._began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    async def open(
        self, path: str, body: bytes, deadline_s: float | None, done: Callable[[], None]
    ) -> RemoteStream:
        """POST the request; the stream, once its first piece is there.

        Raises:
            RequestError, EngineError: what vLLM refuses or fails with.
        """
        self._task = asyncio.create_task(self._read(path, body))
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
        """Whether a piece of it came."""
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

    async def _read(self, path: str, body: bytes) -> None:
        try:
            async with AsyncExitStack() as until:
                response = await self._api.open(path, body, until)
                await self._stream(response)
        except RequestError as error:
            self._fail(error)
        except SnugvlError as error:
            await self._wait_for_death()
            self._fail(error)
        except httpx.HTTPError as error:
            await self._wait_for_death()
            self._fail(EngineError(f"the connection to vLLM broke ({type(error).__name__})"))
        except Exception as error:  # a bug of ours: no reader may wait for ever
            self._fail(EngineError(f"the answer could not be read: {type(error).__name__}: {error}"))
            raise
        finally:
            if self._deadline is not None:
                self._deadline.cancel()

    async def _wait_for_death(self) -> None:
        """Return at once if vLLM is well; otherwise this answer is about to be ended with the reason."""
        if not await self._watchdog.confirm_alive():
            await asyncio.sleep(DYING_S)

    async def _stream(self, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            self._watchdog.alive()
            data = line[5:].strip()
            if data == "[DONE]":
                break
            await self._take(_chunk(data))
        if not self._chunks.complete:
            raise httpx.RemoteProtocolError("the answer ended early")
        for delta in self._chunks.end():
            self._inbox.put(delta)
        self._fail(None)

    async def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise error_of(chunk, 500)
        deltas = self._chunks.read(chunk)
        if self._chunks.stop_token is not None:
            answer = await self._api.call("/detokenize", {"tokens": [self._chunks.stop_token]})
            self._chunks.named(str(answer.get("prompt", "")))
        if not self._began.done():
            self._began.set_result(self._chunks.prompt_tokens)
        for delta in deltas:
            self._inbox.put(delta)


def _chunk(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"vLLM sent a chunk that is no JSON object: {data[:80]!r}")
    return value

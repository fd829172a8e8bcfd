"""One generation from start to end, the same for every protocol: started, read, measured, given up."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Self

from snugvl.backends.protocol import (
    Delta,
    Logprob,
    Message,
    Request,
    Stream,
    Text,
    ToolUse,
    Usage,
    characters,
)
from snugvl.backends.service import Tokens
from snugvl.errors import EngineError, RequestTooLarge
from snugvl.server.context import Context
from snugvl.server.intake.intake import only_sizes
from snugvl.server.record import current

prompts = logging.getLogger("snugvl.prompts")  # silent unless --log-prompts


class Generation:
    """The answer to one request, read once: `async with await generate(...) as g: async for delta in g`.

    Leaving the `async with` early aborts the request and frees its KV cache.
    """

    def __init__(self, stream: Stream, context: Context, started: float) -> None:
        self._stream = stream
        self._metrics = context.metrics
        self._answer: list[str] | None = [] if context.settings.log_prompts else None
        self._started = started
        self._seen: dict[int, float] = {}  # per choice, when its last piece came
        self.usage: Usage | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included; known from the start."""
        return self._stream.prompt_tokens

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._stream:
            self._note(delta)
            yield delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if self._answer:
            prompts.info("%s answer: %r", current().id, "".join(self._answer))
            self._answer = None

    def _note(self, delta: Delta) -> None:
        now = time.monotonic()
        if not self._seen:
            self._metrics.first_token_seconds.observe(now - self._started)
        elif delta.choice in self._seen:
            self._metrics.token_seconds.observe(now - self._seen[delta.choice])
        self._seen[delta.choice] = now
        if self._answer is not None:
            self._answer.append(delta.text)
        if delta.finish_reason is not None:
            self._metrics.finished.labels(delta.finish_reason).inc()
        if delta.usage is not None:
            self.usage = delta.usage
            self._metrics.count(delta.usage)
            current().add(delta.usage)


def counting(context: Context) -> AbstractContextManager[None]:
    """Within it pictures are read for their sizes alone, where the engine counts their tokens by these."""
    known = context.service.capabilities
    return only_sizes(known is not None and known.engine == "native")


async def tokens_of(
    context: Context, prompt: str | tuple[Message, ...], tools: ToolUse | None = None
) -> Tokens:
    """A prompt as the model reads it, without an answer.

    Raises:
        SnugvlError: refused.
    """
    _check_length(context, prompt, tools)
    return await context.service.tokenize(prompt, tools)


def _check_length(
    context: Context, prompt: str | tuple[int, ...] | tuple[Message, ...], tools: ToolUse | None
) -> None:
    """Refuse more characters than the context can hold, before they go to the engine.

    Raises:
        RequestTooLarge: with the numbers.
    """
    known = context.service.capabilities
    messages = [] if isinstance(prompt, str) else [each for each in prompt if isinstance(each, Message)]
    count = len(prompt) if isinstance(prompt, str) else 0
    count += characters(messages, () if tools is None else tools.tools)
    if known is not None and 0 < known.most_characters < count:
        raise RequestTooLarge(
            f"the prompt has {count:,} characters; the context of {known.context_tokens:,} tokens holds "
            f"{known.most_characters:,} at most (white space counts); send less text",
            field="messages" if messages else "prompt",
        )


class Finished:
    """One choice that is complete."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.finish_reason = "abort"
        self.logprobs: list[Logprob] = []


async def generate(context: Context, request: Request) -> Generation:
    """Start a request, with the server's deadline where it has none of its own.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    started = time.monotonic()
    _check_length(context, request.messages if request.prompt is None else request.prompt, request.tools)
    limit_s = context.settings.deadline_s
    if limit_s is not None:
        left_s = max(limit_s - current().seconds, 0.0)  # of what the whole request may take
        own_s = left_s if request.deadline_s is None else request.deadline_s
        request = replace(request, deadline_s=min(own_s, left_s))
    if context.settings.log_prompts:
        prompts.info("%s prompt: %r", current().id, _words(request))
    return Generation(await context.service.submit(request), context, started)


async def complete(context: Context, request: Request) -> tuple[list[Finished], Usage]:
    """Every choice of a request, complete, and its tokens."""
    choices = [Finished() for _ in range(request.sampling.n)]
    async with await generate(context, request) as generation:
        async for delta in generation:
            choice = choices[delta.choice]
            choice.text += delta.text
            choice.reasoning += delta.reasoning
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
    if generation.usage is None or any(choice.finish_reason == "abort" for choice in choices):
        raise EngineError("the request was aborted before its answer was complete")
    return choices, generation.usage


def _words(request: Request) -> str | list[tuple[str, list[str]]]:
    """The text of a request; pictures only by their kind."""
    if request.prompt is not None:
        return str(request.prompt)
    return [
        (
            message.role,
            [part.text if isinstance(part, Text) else type(part).__name__ for part in message.content],
        )
        for message in request.messages
    ]

"""One generation from start to end, the same for every protocol: started, read, measured, aborted."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from snugvl.core.messages import (
    Delta,
    Logprob,
    Message,
    Request,
    Stream,
    Text,
    ToolCall,
    ToolUse,
    Usage,
    characters,
)
from snugvl.core.service import Tokens
from snugvl.core.training import Training
from snugvl.errors import EngineError, RequestTooLarge
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece, ToolEvent
from snugvl.server.context import Context
from snugvl.server.intake.intake import only_sizes
from snugvl.server.record import current
from snugvl.server.validation import AnswerCheck
from snugvl.tasks.parse import find_json

TOOLS_IN_TEXT = "described the tools in the system message, as this model's chat template shows none"
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
        self._last_piece_at: dict[int, float] = {}  # per choice, when its last piece came
        self._usage: Usage | None = None
        self.check: AnswerCheck | None = None  # of what the grammar leaves out

    @property
    def usage(self) -> Usage:
        """Tokens of the request, once the answer was read to its end."""
        assert self._usage is not None, "an answer that was read to its end has its tokens"
        return self._usage

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included; known from the start."""
        return self._stream.prompt_tokens

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The pieces of all choices.

        Raises:
            EngineError: the engine aborted the request, or the stream ended before the answer did.
        """
        async for delta in self._stream:
            self._note(delta)
            if self.check is not None:
                self.check.note(delta)
            if delta.finish_reason == "abort":
                raise EngineError("the request was aborted before its answer was complete")
            yield delta
        if self._usage is None:
            raise EngineError("the request ended before its answer was complete")
        if self.check is not None:
            await self.check.tell()

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
        if not self._last_piece_at:
            self._metrics.first_token_seconds.observe(now - self._started)
        elif delta.choice in self._last_piece_at:
            self._metrics.token_seconds.observe(now - self._last_piece_at[delta.choice])
        self._last_piece_at[delta.choice] = now
        if self._answer is not None:
            self._answer.append(delta.text)
        if delta.finish_reason is not None:
            self._metrics.finished.labels(delta.finish_reason).inc()
        if delta.usage is not None:
            self._usage = delta.usage
            self._metrics.count(delta.usage)
            current().add(delta.usage)
            current().cached_tokens += delta.cached_tokens
            current().reasoning_tokens += delta.reasoning_tokens
            current().accepted_tokens += delta.drafts[0]
            current().rejected_tokens += delta.drafts[1]


def counting(context: Context) -> AbstractContextManager[None]:
    """Within it pictures are read for their sizes alone, where the engine counts their tokens by these."""
    capabilities = context.service.capabilities
    return only_sizes(capabilities is not None and capabilities.counts_by_size)


async def tokens_of(
    context: Context, prompt: str | tuple[Message, ...], tools: ToolUse | None = None
) -> Tokens:
    """A prompt as the model reads it, without an answer.

    Raises:
        SnugvlError: refused.
    """
    _check_length(context, prompt, tools)
    try:
        return await context.service.tokenize(prompt, tools)
    except RequestTooLarge as error:
        raise _exceeded(context, str(error), error.field) from None


def _check_length(
    context: Context, prompt: str | tuple[int, ...] | tuple[Message, ...], tools: ToolUse | None
) -> None:
    """Refuse more characters than the context can hold, before they go to the engine.

    Raises:
        RequestTooLarge: with the numbers.
    """
    capabilities = context.service.capabilities
    messages = [] if isinstance(prompt, str) else [each for each in prompt if isinstance(each, Message)]
    count = len(prompt) if isinstance(prompt, str) else 0
    count += characters(messages, () if tools is None else tools.tools)
    if capabilities is not None and 0 < capabilities.most_characters < count:
        raise _exceeded(
            context,
            f"the prompt has {count:,} characters; the context of {capabilities.context_tokens:,} tokens "
            f"holds {capabilities.most_characters:,} at most (white space counts); send less text",
            "messages" if messages else "prompt",
        )


def _exceeded(context: Context, reason: str, field: str | None) -> RequestTooLarge:
    """More tokens than there are, in the words that clients look for; our numbers and the way out follow."""
    known = context.service.capabilities
    tokens = 0 if known is None else known.context_tokens
    return RequestTooLarge(f"This model's maximum context length is {tokens} tokens. {reason}", field=field)


@dataclass(slots=True)
class Finished:
    """One choice that is complete."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = "abort"
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob, ...] = ()


async def generate(context: Context, request: Request, *, ceiling: bool = False) -> Generation:
    """Start a request, with what is left of the server's deadline.

    `max_tokens` beyond what the context leaves, or beyond the whole context, is lowered to what is left:
    clients' defaults are made for large models. The answer's header tells it.

    Args:
        ceiling: whether nothing is told of that: Anthropic's clients must send a number, and Ollama's send
            large ones as a matter of course.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    started = time.monotonic()
    known = context.service.capabilities
    if known is not None and 0 < known.context_tokens < len(request.messages):
        reason = f"the conversation has {len(request.messages):,} messages, each of at least one; send fewer"
        raise _exceeded(context, reason, "messages")
    _check_length(context, request.messages if request.prompt is None else request.prompt, request.tools)
    limit_s = context.settings.deadline_s
    if limit_s is not None:
        # Of what the whole request may take, its preparation included.
        request = replace(request, deadline_s=max(limit_s - current().seconds, 0.0))
    if context.settings.log_prompts:
        prompts.info("%s prompt: %r", current().id, _words(request))
    for text in await _warnings(context, request):
        current().warn(text)
    stream = await _submit(context, request, ceiling)
    generation = Generation(stream, context, started)
    form = request.grammar
    if known is not None and not known.exact_forms and form is not None and form.kind == "json_schema":
        current().unenforced.setdefault(None, json.loads(form.source))
    if schemas := current().unenforced:
        generation.check = AnswerCheck(
            context.validation, schemas, lambda text: split_calls(text, context.call_parser(request.tools))
        )
    return generation


async def _submit(context: Context, request: Request, ceiling: bool) -> Stream:
    """Start a request; one whose answer would be longer than there is room, as long as there is."""
    asked, known = request.sampling.max_tokens, context.service.capabilities
    unlimited = replace(request, sampling=replace(request.sampling, max_tokens=None))
    lowered = asked is not None and known is not None and asked >= known.context_tokens
    try:
        stream = await context.service.submit(unlimited if lowered else request)
    except RequestTooLarge as error:
        # Where the refusal doesn't tell which of both is to blame: without a limit it is the prompt.
        vague = known is not None and known.vague_limits
        if asked is None or lowered or not (vague or error.field == "max_tokens"):
            raise _exceeded(context, str(error), error.field) from None
        lowered = True
        try:
            stream = await context.service.submit(unlimited)
        except RequestTooLarge as again:
            raise _exceeded(context, str(again), again.field) from None
    if lowered and not ceiling:
        current().warn(f"lowered max_tokens from {asked:,} to what the context leaves")
    return stream


async def _warnings(context: Context, request: Request) -> tuple[str, ...]:
    """What the client should know of the answer: what it lacks, what the model never learned."""
    known = context.service.capabilities
    ignored = known.ignores if known is not None else ()
    if said := [why for name, why in ignored if getattr(request.sampling, name)]:
        return (f"ignored {said[0]}",)
    if request.tools is not None and known is not None and not known.tools:
        return (TOOLS_IN_TEXT,)
    if known is None or known.training == Training():
        return ()
    from snugvl.tasks import training  # it brings numpy, which the server starts without

    return await asyncio.to_thread(training.warnings, known.training, request.messages)


async def complete(context: Context, request: Request) -> tuple[list[Finished], Usage]:
    """Every choice of a request, complete, and its tokens.

    Whoever holds the request meanwhile holds room for its pictures, which nobody needs once it has begun.
    """
    choices = [Finished() for _ in range(request.sampling.n)]
    begun = await generate(context, request)
    del request
    async with begun as generation:
        async for delta in generation:
            choice = choices[delta.choice]
            choice.text += delta.text
            choice.reasoning += delta.reasoning
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            for each in choices if delta.prompt_logprobs else ():
                each.prompt_logprobs = delta.prompt_logprobs
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


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """New text of what the model thinks before it answers."""

    text: str


AnswerEvent = ToolEvent | ReasoningPiece


class Reader:
    """The events of an answer with one choice, read once; afterwards, how it ended.

    Whoever reads it does so within `async with reader.generation`, which aborts what is not finished.

    Attributes:
        stop: the stop string that ended it, if one did.
    """

    def __init__(self, generation: Generation, parser: CallParser | None) -> None:
        """`parser`: finds the calls in the text; None where it can't hold any."""
        self.generation = generation
        self._parser = parser
        self.stop: str | None = None
        self._logprobs: list[Logprob] = []
        self._finish_reason: str | None = None

    @property
    def length(self) -> bool:
        """Whether it ended at its token limit."""
        return self._finish_reason == "length"

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._parser is None else self._parser.calls

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        async for delta in self.generation:
            self._logprobs += delta.logprobs
            self._finish_reason = delta.finish_reason or self._finish_reason
            self.stop = delta.stop
            if delta.reasoning:
                yield ReasoningPiece(delta.reasoning)
            for event in self._split(delta.text):
                yield event
        if self._parser is not None:
            for event in self._parser.flush():
                yield event

    def take_logprobs(self) -> list[Logprob]:
        """Log-probabilities that came since they were taken last."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _split(self, text: str) -> list[ToolEvent]:
        if self._parser is not None:
            return self._parser.push(text)
        return [TextPiece(text)] if text else []


async def read_answer(context: Context, request: Request) -> Reader:
    """Start a request of one choice whose `max_tokens` is a ceiling: its answer ends when the context does.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    parser = context.call_parser(request.tools)
    return Reader(await generate(context, request, ceiling=True), parser)


def split_calls(text: str, parser: CallParser | None) -> tuple[str, tuple[ToolCall, ...]]:
    """A complete answer as its text and its calls."""
    if parser is None:
        return text, ()
    shown = ""
    started: list[CallStarted] = []
    arguments: list[str] = []
    for event in (*parser.push(text), *parser.flush()):
        match event:
            case TextPiece(text=piece):
                shown += piece
            case CallStarted():
                started.append(event)
                arguments.append("")
            case CallArguments(index=index, fragment=fragment):
                arguments[index] += fragment
    calls = zip(started, arguments, strict=True)
    return shown, tuple(ToolCall(call.id, call.name, text) for call, text in calls)


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; of a text that was cut, as far as it goes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        found = find_json(text)
        value = found[0].value if found else {}
    return value if isinstance(value, dict) else {}

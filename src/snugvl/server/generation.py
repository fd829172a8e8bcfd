"""One answer from start to end, the same for every protocol: started, read, measured, aborted.

    Generation   the engine's deltas, counted and timed
    GeneratedAnswer   its steps: text, reasoning, calls and their arguments, the end of each choice
    AnswerChoice      fold of these steps: a whole answer is what its stream comes to

A protocol writes the steps of a stream, or the choices that they make, in its own form; the tokens of both
are one `AnswerUsage`.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Final, Literal, Self

from snugvl.core.messages import Delta, Logprob, Request, Stream, Text, ToolCall, Usage, characters
from snugvl.core.service import Tokens
from snugvl.core.training import Training
from snugvl.errors import EngineError, RequestTooLarge
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece, ToolEvent
from snugvl.server.context import Context, Validation
from snugvl.server.metrics import RequestRecord
from snugvl.tasks.parse import find_json

TOOLS_IN_TEXT = "described the tools in the system message, as this model's chat template shows none"
ANSWER: Final = "the answer"
log = logging.getLogger("snugvl.server")
prompts = logging.getLogger("snugvl.prompts")  # silent unless --log-prompts


@dataclass(frozen=True, slots=True)
class AnswerUsage(Usage):
    """Tokens of one answer, or of several, with what is among them.

    Attributes:
        cached_tokens: tokens of the prompts that the engine's prefix cache had.
        reasoning_tokens: tokens of the answers that are the model's reasoning.
        accepted_tokens, rejected_tokens: drafts that were right and wrong (`--speculation`).
    """

    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def __add__(self, other: Usage) -> "AnswerUsage":
        names = [each.name for each in fields(self)]
        return AnswerUsage(*(getattr(self, name) + getattr(other, name, 0) for name in names))


class Generation:
    """The deltas of one request, read once: `async with await generate(...) as g: async for delta in g`.

    Leaving the `async with` early aborts the request and frees its KV cache.
    """

    def __init__(self, stream: Stream, context: Context, record: RequestRecord, started: float) -> None:
        self._stream = stream
        self._record = record
        self._metrics = context.metrics
        self._answer: list[str] | None = [] if context.settings.log_prompts else None
        self._started = started
        self._last_piece_at: dict[int, float] = {}  # per choice, when its last piece came
        self._usage: AnswerUsage | None = None

    @property
    def usage(self) -> AnswerUsage:
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
            if delta.finish_reason == "abort":
                raise EngineError("the request was aborted before its answer was complete")
            yield delta
        if self._usage is None:
            raise EngineError("the request ended before its answer was complete")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if self._answer:
            prompts.info("%s answer: %r", self._record.id, "".join(self._answer))
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
        if (used := delta.usage) is not None:
            self._usage = AnswerUsage(
                *(used.prompt_tokens, used.completion_tokens, used.image_tokens),
                *(delta.cached_tokens, delta.reasoning_tokens, *delta.drafts),
            )
            self._metrics.count(used)
            self._record.add(used)


async def tokens_of(context: Context, request: Request) -> Tokens:
    """A request's prompt as the model reads it, without an answer.

    Raises:
        SnugvlError: refused.
    """
    _check_length(context, request)
    try:
        return await context.service.tokenize(request)
    except RequestTooLarge as error:
        raise _exceeded(context, str(error), error.field) from None


def _check_length(context: Context, request: Request) -> None:
    """Refuse more characters than the context can hold, before they go to the engine.

    Raises:
        RequestTooLarge: with the numbers.
    """
    capabilities = context.service.capabilities
    count = len(request.prompt) if isinstance(request.prompt, str) else 0
    count += characters(request.messages, () if request.tools is None else request.tools.tools)
    if capabilities is not None and 0 < capabilities.most_characters < count:
        raise _exceeded(
            context,
            f"the prompt has {count:,} characters; the context of {capabilities.context_tokens:,} tokens "
            f"holds {capabilities.most_characters:,} at most (white space counts); send less text",
            "messages" if request.messages else "prompt",
        )


def _exceeded(context: Context, reason: str, field: str | None) -> RequestTooLarge:
    """The error of too long a prompt: words that clients look for, then our numbers and the way out."""
    known = context.service.capabilities
    tokens = 0 if known is None else known.context_tokens
    return RequestTooLarge(f"This model's maximum context length is {tokens} tokens. {reason}", field=field)


async def generate(
    context: Context, record: RequestRecord, request: Request, *, ceiling: bool = False
) -> Generation:
    """Start a request, with what is left of the server's deadline.

    `max_tokens` beyond what the context leaves, or beyond the whole context, is lowered to what is left:
    clients' defaults are made for large models. A warning says so.

    Args:
        ceiling: whether the client isn't warned of that: Anthropic's clients must send a number, and Ollama's
            send large ones as a matter of course.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    started = time.monotonic()
    known = context.service.capabilities
    if known is not None and 0 < known.context_tokens < len(request.messages):
        reason = f"the conversation has {len(request.messages):,} messages, each of at least one; send fewer"
        raise _exceeded(context, reason, "messages")
    _check_length(context, request)
    limit_s = context.settings.deadline_s
    if limit_s is not None:
        # Of what the whole request may take, its preparation included.
        request = replace(request, deadline_s=max(limit_s - record.seconds, 0.0))
    if context.settings.log_prompts:
        prompts.info("%s prompt: %r", record.id, _words(request))
    for text in await _warnings(context, request):
        record.notes.warn(text)
    stream = await _submit(context, record, request, ceiling)
    return Generation(stream, context, record, started)


async def _submit(context: Context, record: RequestRecord, request: Request, ceiling: bool) -> Stream:
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
        record.notes.warn(f"lowered max_tokens from {asked:,} to what the context leaves")
    return stream


async def _warnings(context: Context, request: Request) -> tuple[str, ...]:
    """Warnings for the client about the answer: wishes without effect, inputs that the model never
    learned."""
    known = context.service.capabilities
    ignored = known.ignores if known is not None else ()
    if reasons := [why for name, why in ignored if getattr(request.sampling, name)]:
        return (f"ignored {reasons[0]}",)
    if request.tools is not None and known is not None and not known.tools:
        return (TOOLS_IN_TEXT,)
    if known is None or known.training == Training():
        return ()
    from snugvl.tasks import training  # it brings numpy, which the server starts without

    return await asyncio.to_thread(training.warnings, known.training, request.messages)


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
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class AnswerBlock:
    """A part of an answer: text, reasoning, or one call with the JSON text of its arguments.

    Attributes:
        first: the event that it began with.
        pieces: its text, as it came.
        logprobs: log-probabilities of its tokens of text.
    """

    first: AnswerEvent
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text so far."""
        return "".join(self.pieces)

    @property
    def call(self) -> ToolCall | None:
        """The call, where it is one."""
        first = self.first
        return ToolCall(first.id, first.name, self.text) if isinstance(first, CallStarted) else None


@dataclass(slots=True)
class Step:
    """Events that one delta of the engine adds to a choice.

    Attributes:
        choice: its index.
        events: (whether a block begins with it, event) of each event, in order.
        logprobs: log-probabilities of the tokens of these events, and of earlier tokens without text.
        finish_reason: why the choice has ended, where it ends with this delta.
        completion_tokens: number of tokens generated so far, for all choices.
    """

    choice: int
    events: list[tuple[bool, AnswerEvent]]
    logprobs: Sequence[Logprob]
    finish_reason: FinishReason | None
    completion_tokens: int


class AnswerChoice:
    """One choice of an answer, as far as it came: what its steps make together.

    Attributes:
        blocks: text after text is one block, every call is one.
        logprobs: log-probabilities of all its tokens; `prompt_logprobs`: those of the prompt's.
        stop: the stop string that ended it, if one did.
    """

    def __init__(self, parser: CallParser | None = None, *, reasoning: bool = True) -> None:
        """`parser`: finds the calls in the text; None where it can't hold any. `reasoning`: it is shown."""
        self._parser = parser
        self._reasoning = reasoning
        self._pending: list[Logprob] = []  # of text that the parser still holds back
        self._last: type[AnswerEvent] | None = None  # what the last block began with
        self._pieces: list[str] = []  # of the last block
        self.blocks: list[AnswerBlock] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: tuple[Logprob, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None

    @property
    def may_call(self) -> bool:
        """Whether it may hold calls."""
        return self._parser is not None

    @property
    def text(self) -> str:
        """All text outside of reasoning and calls."""
        return "".join(block.text for block in self.blocks if isinstance(block.first, TextPiece))

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(block.text for block in self.blocks if isinstance(block.first, ReasoningPiece))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls in order."""
        return [call for block in self.blocks if (call := block.call) is not None]

    def add(self, delta: Delta) -> Step:
        """Add the next delta; returns the events that it brings."""
        finish: FinishReason | None = None
        events = self._split(delta)
        marked = [(self._begins(event), event) for event in events]
        if delta.finish_reason is not None:
            length, calls = delta.finish_reason == "length", any(block.call for block in self.blocks)
            finish = self.finish_reason = "length" if length else "tool_calls" if calls else "stop"
            self.stop = delta.stop
        logprobs: Sequence[Logprob] = ()
        if delta.logprobs or self._pending:
            self.logprobs += delta.logprobs
            self._pending += delta.logprobs
            if marked or finish is not None:
                logprobs, self._pending = self._pending, []
        if logprobs and events and isinstance(events[0], TextPiece):
            first = len(self.blocks) - sum(begins for begins, _ in marked[1:]) - 1
            self.blocks[first].logprobs += logprobs
        return Step(delta.choice, marked, logprobs, finish, delta.completion_tokens)

    def _split(self, delta: Delta) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if delta.reasoning and self._reasoning:
            events.append(ReasoningPiece(delta.reasoning))
        if self._parser is not None:
            events += self._parser.push(delta.text)
            if delta.finish_reason is not None:
                cut = delta.finish_reason == "length" or delta.stop is not None
                events += self._parser.flush(cut=cut)
        elif delta.text:
            events.append(TextPiece(delta.text))
        return events

    def _begins(self, event: AnswerEvent) -> bool:
        """Add an event to its block; whether the block begins with it."""
        if isinstance(event, TextPiece | ReasoningPiece):
            text, begins = event.text, self._last is not type(event)
        elif isinstance(event, CallArguments):
            text, begins = event.fragment, False
        else:
            text, begins = "", True
        if begins:
            self._last = type(event)
            self._pieces = []
            self.blocks.append(AnswerBlock(event, self._pieces))
        self._pieces.append(text)
        return begins


class AnswerCheck:
    """The choices of one answer, validated against the schemas that its request's notes call unenforced."""

    def __init__(self, validation: Validation, record: RequestRecord) -> None:
        self._validation = validation
        self._record = record
        schemas = record.notes.unenforced
        self._schemas = {ANSWER if name is None else f"{name}()": schema for name, schema in schemas.items()}

    async def warn(self, choices: Sequence[tuple[str, Sequence[ToolCall]]]) -> None:
        """Warn of what doesn't hold. `choices`: the text and the calls of each, complete."""
        values: list[tuple[str, str]] = []
        for text, calls in choices:
            found = [(f"{call.name}()", call.arguments) for call in calls] or [(ANSWER, text)]
            values += [(name, value) for name, value in found if name in self._schemas]
        for line in await self._validation.broken(self._schemas, values) if values else ():
            log.info("%s %s", self._record.id, self._record.notes.warn(line))


class GeneratedAnswer:
    """The choices of an answer on their way, read once: `async with answer.generation`, which aborts what is
    not finished."""

    def __init__(
        self, generation: Generation, choices: list[AnswerChoice], check: AnswerCheck | None
    ) -> None:
        self.generation = generation
        self.choices = choices
        self._check = check

    async def __aiter__(self) -> AsyncIterator[Step]:
        async for delta in self.generation:
            for choice in self.choices if delta.prompt_logprobs else ():
                choice.prompt_logprobs = delta.prompt_logprobs
            yield self.choices[delta.choice].add(delta)
        if self._check is not None:
            await self._check.warn([(choice.text, choice.calls) for choice in self.choices])

    async def complete(self) -> AnswerUsage:
        """Read it to its end: all of it is in `choices`."""
        async with self.generation:
            async for _ in self:
                pass
        return self.generation.usage


async def read_answer(
    context: Context,
    record: RequestRecord,
    request: Request,
    *,
    ceiling: bool = False,
    reasoning: bool = True,
) -> GeneratedAnswer:
    """Start a request, for an answer that is still to be read.

    A caller that keeps the request meanwhile keeps its pictures in memory, which aren't needed once it has
    begun.

    Args:
        ceiling: as in `generate`.
        reasoning: whether what the model thinks is shown.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    choices = [
        AnswerChoice(context.call_parser(request.tools), reasoning=reasoning)
        for _ in range(request.sampling.n)
    ]
    known, form, unenforced = context.service.capabilities, request.grammar, record.notes.unenforced
    generation = await generate(context, record, request, ceiling=ceiling)
    if known is not None and not known.exact_forms and form is not None and form.kind == "json_schema":
        unenforced.setdefault(None, json.loads(form.source))
    check = AnswerCheck(context.validation, record) if unenforced else None
    return GeneratedAnswer(generation, choices, check)


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; of a text that was cut, as far as it goes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        found = find_json(text)
        value = found[0].value if found else {}
    return value if isinstance(value, dict) else {}

"""Anthropic's routes, POST /v1/messages and /v1/messages/count_tokens, and their answers."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece
from snugvl.server.anthropic.conversation import conversation_of, request_of, tools_of
from snugvl.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.generation import (
    AnswerEvent,
    AnswerUsage,
    GeneratedAnswer,
    ReasoningPiece,
    arguments_of,
    read_answer,
    tokens_of,
)
from snugvl.server.media.loading import RequestMedia
from snugvl.server.record import record_of
from snugvl.server.streaming import Event, compact, event_stream, events_document

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextOut(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingOut(BaseModel):
    """The model's reasoning. The signature says nothing: clients send the block back as it is."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseOut(BaseModel):
    """A call that the model made."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Block = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(BaseModel):
    """Tokens of a request, pictures included. `input_tokens`: of the whole prompt in `message_start`; at the
    end without those from the prefix cache, which are `cache_read_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class MessageOut(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[Block, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Tokens of a prompt, pictures included."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """One answer on its way. `max_tokens`: what the request asked for, which may be more than it got."""

    model: str
    answer: GeneratedAnswer
    max_tokens: int

    async def whole(self) -> MessageOut:
        """The message, complete."""
        usage, choice = await self.answer.complete(), self.answer.choices[0]
        content = [_block(block.first, block.text) for block in choice.blocks]
        return self._message(
            content,
            stop_reason=self._stop_reason(usage),
            stop_sequence=choice.stop,
            usage=_usage(usage),
        )

    async def events(self) -> AsyncGenerator[Event]:
        """The events of a stream, in Anthropic's order."""
        tokens = MessageUsage(input_tokens=self.answer.generation.prompt_tokens, output_tokens=0)
        start = self._message([], stop_reason=None, stop_sequence=None, usage=tokens)
        async with self.answer.generation:
            yield _event("message_start", message=start.model_dump())
            yield _event("ping")
            async for event in self._blocks():
                yield event
        usage = self.answer.generation.usage
        stop = {"stop_reason": self._stop_reason(usage), "stop_sequence": self.answer.choices[0].stop}
        yield _event("message_delta", delta=stop, usage=_usage(usage).model_dump())
        yield _event("message_stop")

    async def _blocks(self) -> AsyncIterator[Event]:
        """Each content block: its start, what it is made of, its end."""
        index, block = -1, ""
        async for step in self.answer:
            for begins, event in step.events:
                if begins:
                    for end in _block_end(index, block):
                        yield end
                    empty = _block(event, "").model_dump()
                    index, block = index + 1, empty["type"]
                    yield _event("content_block_start", index=index, content_block=empty)
                if not isinstance(event, CallStarted):
                    yield _event("content_block_delta", index=index, delta=_delta(event))
        for end in _block_end(index, block):
            yield end

    def _message(self, content: Sequence[Block], **fields: Any) -> MessageOut:
        return MessageOut(
            id=f"msg_{secrets.token_hex(12)}", model=self.model, content=list(content), **fields
        )

    def _stop_reason(self, usage: AnswerUsage) -> StopReason:
        choice = self.answer.choices[0]
        if choice.stop is not None:
            return "stop_sequence"
        if choice.finish_reason == "length":
            full = usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "tool_use" if choice.finish_reason == "tool_calls" else "end_turn"


def _usage(usage: AnswerUsage) -> MessageUsage:
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
    )


def _block(first: AnswerEvent, text: str) -> Block:
    """The block that begins with an event, with its text."""
    if isinstance(first, CallStarted):
        return ToolUseOut(id=first.id, name=first.name, input=arguments_of(text) if text else {})
    return ThinkingOut(thinking=text) if isinstance(first, ReasoningPiece) else TextOut(text=text)


def _block_end(index: int, block: str) -> Iterator[Event]:
    """The events that end a block of that type, if there is one."""
    if block == "thinking":
        yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
    if block:
        yield _event("content_block_stop", index=index)


def _delta(event: TextPiece | ReasoningPiece | CallArguments) -> dict[str, str]:
    match event:
        case CallArguments(fragment=fragment):
            return {"type": "input_json_delta", "partial_json": fragment}
        case ReasoningPiece(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case TextPiece(text=text):
            return {"type": "text_delta", "text": text}


def _event(kind: str, **fields: Any) -> Event:
    return Event(compact({"type": kind, **fields}), kind)


router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=JsonRoute)

EVENTS: Final = events_document(
    "message_start, ping, content_block_start, content_block_delta, content_block_stop, message_delta, "
    "message_stop, error"
)


@router.post("", response_model=MessageOut, responses={200: {"content": EVENTS}})
async def post_messages(http: Request, body: MessagesRequest) -> Any:
    """Continue a conversation, with pictures, tools and structured outputs."""
    context, record = context_of(http), record_of(http.scope)
    name = context.check_model(body.model)
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    request = request_of(RequestMedia(context.media, record), body)
    reading = await read_answer(context, record, await request, ceiling=True, reasoning=thinking)
    answer = MessageAnswer(name, reading, body.max_tokens)
    return event_stream(context, answer.events()) if body.stream else await answer.whole()


@router.post("/count_tokens", response_model=TokenCount)
async def post_count_tokens(http: Request, body: CountTokensRequest) -> Any:
    """Count the tokens of a conversation, without continuing it."""
    context = context_of(http)
    context.check_model(body.model)
    media = context.media_to_count(record_of(http.scope))
    tokens = await tokens_of(context, await conversation_of(media, body), tools_of(body, media.notes))
    return TokenCount(input_tokens=len(tokens.ids))

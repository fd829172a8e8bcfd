"""Anthropic's routes, POST /v1/messages and /v1/messages/count_tokens, and their answers."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from snugvl.core.messages import Usage
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece, ToolEvent
from snugvl.server.anthropic.conversation import conversation_of, request_of, tools_of
from snugvl.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.generation import Reader, arguments_of, counting, read_answer, tokens_of
from snugvl.server.record import current
from snugvl.server.streaming import Event, compact, event_stream, events_document

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextOut(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ToolUseOut(BaseModel):
    """A call that the model made."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Tokens of a request, pictures included; those of the prefix cache stand apart once they are known."""

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
    content: list[Annotated[TextOut | ToolUseOut, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Tokens of a prompt, pictures included."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """One answer on its way.

    Attributes:
        max_tokens: what the request asked for, which may be more than it got.
    """

    model: str
    reader: Reader
    max_tokens: int

    async def whole(self) -> MessageOut:
        """The message, complete."""
        blocks: list[tuple[CallStarted | None, list[str]]] = []
        async with self.reader.generation:
            async for begins, event in self._events():
                if begins:
                    blocks.append((event if isinstance(event, CallStarted) else None, []))
                if not isinstance(event, CallStarted):
                    blocks[-1][1].append(_text_of(event))
        content = [
            TextOut(text="".join(pieces))
            if call is None
            else ToolUseOut(id=call.id, name=call.name, input=arguments_of("".join(pieces)))
            for call, pieces in blocks
        ]
        usage = self.reader.generation.usage
        return self._message(
            content,
            stop_reason=self._stop_reason(usage),
            stop_sequence=self.reader.stop,
            usage=_usage(usage),
        )

    async def events(self) -> AsyncGenerator[Event]:
        """The events of a stream, in Anthropic's order."""
        tokens = MessageUsage(input_tokens=self.reader.generation.prompt_tokens, output_tokens=0)
        start = self._message([], stop_reason=None, stop_sequence=None, usage=tokens)
        async with self.reader.generation:
            yield _event("message_start", message=start.model_dump())
            yield _event("ping")
            async for event in self._blocks():
                yield event
        usage = self.reader.generation.usage
        yield _event(
            "message_delta",
            delta={"stop_reason": self._stop_reason(usage), "stop_sequence": self.reader.stop},
            usage=_usage(usage).model_dump(),
        )
        yield _event("message_stop")

    async def _blocks(self) -> AsyncIterator[Event]:
        """Each content block: its start, what it is made of, its end."""
        index = -1
        async for begins, event in self._events():
            if begins:
                if index >= 0:
                    yield _event("content_block_stop", index=index)
                index += 1
                yield _event("content_block_start", index=index, content_block=_empty_block(event))
            if not isinstance(event, CallStarted):
                yield _event("content_block_delta", index=index, delta=_delta(event))
        if index >= 0:
            yield _event("content_block_stop", index=index)

    async def _events(self) -> AsyncIterator[tuple[bool, ToolEvent]]:
        """What comes, and whether a content block begins: text after text is one block, every call is one."""
        in_text = False
        async for event in self.reader:
            is_text = isinstance(event, TextPiece)
            yield isinstance(event, CallStarted) or (is_text and not in_text), event
            in_text = is_text

    def _message(self, content: Sequence[TextOut | ToolUseOut], **fields: Any) -> MessageOut:
        return MessageOut(
            id=f"msg_{secrets.token_hex(12)}", model=self.model, content=list(content), **fields
        )

    def _stop_reason(self, usage: Usage) -> StopReason:
        if self.reader.stop is not None:
            return "stop_sequence"
        if self.reader.length:
            full = usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "tool_use" if self.reader.calls else "end_turn"


def _usage(usage: Usage) -> MessageUsage:
    cached = min(current().cached_tokens, usage.prompt_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
    )


def _empty_block(event: ToolEvent) -> dict[str, Any]:
    """The block that begins with `event`, empty."""
    if isinstance(event, CallStarted):
        return ToolUseOut(id=event.id, name=event.name, input={}).model_dump()
    return TextOut(text="").model_dump()


def _delta(event: TextPiece | CallArguments) -> dict[str, str]:
    if isinstance(event, CallArguments):
        return {"type": "input_json_delta", "partial_json": event.fragment}
    return {"type": "text_delta", "text": event.text}


def _text_of(event: TextPiece | CallArguments) -> str:
    return event.text if isinstance(event, TextPiece) else event.fragment


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
    context = context_of(http)
    name = context.check_model(body.model)
    request = await request_of(context, body)
    answer = MessageAnswer(name, await read_answer(context, request), body.max_tokens)
    return event_stream(http, context, answer.events()) if body.stream else await answer.whole()


@router.post("/count_tokens", response_model=TokenCount)
async def post_count_tokens(http: Request, body: CountTokensRequest) -> Any:
    """Count the tokens of a conversation, without continuing it."""
    context = context_of(http)
    context.check_model(body.model)
    with counting(context):
        conversation = await conversation_of(context, body)
    tokens = await tokens_of(context, conversation, tools_of(body))
    return TokenCount(input_tokens=len(tokens.ids))

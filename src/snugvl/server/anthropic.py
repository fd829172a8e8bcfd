"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens, from their JSON to a request and back."""

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest

from snugvl.core.messages import Grammar, Message, Part, Picture, Request, Text, ToolCall, ToolUse, Video
from snugvl.core.sampling import MAX_STOP
from snugvl.errors import RequestError
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece
from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.fields import WHOLE, Body, StringOrArray, in_turns
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import (
    MAX_TOOLS,
    Mode,
    ToolName,
    TopK,
    TopP,
    either,
    offered_tool,
    sampling_of,
    schema_grammar,
    stops_of,
    tool_use,
)
from snugvl.server.generation import (
    AnswerEvent,
    AnswerUsage,
    GeneratedAnswer,
    ReasoningPiece,
    arguments_of,
    read_answer,
    tokens_of,
)
from snugvl.server.media.loading import MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes, record_of
from snugvl.server.streaming import Event, compact, event_stream, events_document
from snugvl.server.unsupported import CLIENT_TOOL, MESSAGES, MESSAGES_PROMPT, PICTURE_BLOCK, UnsupportedFields

MAX_BLOCKS = 1024
BlockT = TypeVar("BlockT")
Blocks = StringOrArray[Annotated[list[BlockT], Field(max_length=MAX_BLOCKS)]]


def only(what: str, *types: str) -> BeforeValidator:
    """Refuses, by name, an object whose `type` is another than `types`. `what`: such objects, in words."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types:
            raise PydanticCustomError(
                "unsupported_type",
                "{what} of type '{kind}' is not supported here; supported: {types}",
                {"what": what, "kind": kind[:40], "types": ", ".join(types)},
            )
        return value

    return BeforeValidator(check)


class CacheControl(RequestPart):
    """Accepted without effect: the beginnings of prompts are cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestPart):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(RequestPart):
    """A picture itself. Its content decides what it is, not `media_type`."""

    type: Literal["base64"]
    media_type: str | None = None
    data: str


class UrlSource(RequestPart):
    """A picture behind a public http(s) URL, or in a data URL."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestPart):
    """A picture."""

    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource, Field(discriminator="type"), only("a source", "base64", "url")
    ]
    cache_control: CacheControl | None = None


class ToolUseBlock(RequestPart):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ThinkingBlock(RequestPart):
    """The model's reasoning before its answer; the chat template shows it to the model or doesn't."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(RequestPart):
    """Thoughts of a model, encrypted by another server."""

    type: Literal["redacted_thinking"]


class TextSource(RequestPart):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(RequestPart):
    """A document in pieces."""

    type: Literal["content"]
    content: Blocks[
        Annotated[TextBlock | ImageBlock, Field(discriminator="type"), only("a block", "text", "image")]
    ]


class Citations(RequestPart):
    """Whether the answer is to cite a document; the models served here don't."""

    enabled: bool | None = None


class DocumentBlock(RequestPart):
    """A document of text, with pictures; no PDF."""

    type: Literal["document"]
    source: Annotated[
        TextSource | ContentSource,
        Field(discriminator="type"),
        only("a document's source", "text", "content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(RequestPart):
    """A text that a search of the client's found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]
    citations: Citations | None = None
    cache_control: CacheControl | None = None


VendorKind = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
]


class VendorBlock(RequestPart):
    """A call that Anthropic's servers ran, or its result; taken, and not shown to the model."""

    type: VendorKind


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock,
    Field(discriminator="type"),
    only("a block", "text", "image", "document", "search_result"),
]


class ToolResultBlock(RequestPart):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Blocks[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


OnlyText = Annotated[TextBlock, only("a block", "text")]
UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock,
    Field(discriminator="type"),
    only("a block", "text", "image", "document", "search_result", "tool_result"),
]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock | VendorBlock,
    Field(discriminator="type"),
    only("a block", "text", "tool_use", "thinking", "redacted_thinking", *get_args(VendorKind)),
]


MAX_MESSAGES = 10_000


class UserTurn(RequestPart):
    """A turn of the user, with results of tools."""

    unsupported: ClassVar[UnsupportedFields] = PICTURE_BLOCK

    role: Literal["user"]
    content: Blocks[UserBlock]


class AssistantTurn(RequestPart):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: Blocks[AssistantBlock]


class SystemTurn(RequestPart):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Blocks[OnlyText]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(RequestPart):
    """A tool that the client runs. Arguments always follow `input_schema`, so `strict` changes nothing."""

    unsupported: ClassVar[UnsupportedFields] = CLIENT_TOOL

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(RequestPart):
    """Text, calls, or both; with "any" at least one call."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(RequestPart):
    """A call of this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestPart):
    """No call."""

    type: Literal["none"]


class Thinking(RequestPart):
    """Whether a model that can think does so, where its chat template can be told, and shows its thoughts."""

    type: Literal["disabled", "adaptive", "enabled"]


class JsonFormat(RequestPart):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


Format = Annotated[JsonFormat, only("a format", "json_schema")]


class OutputConfig(RequestPart):
    """The form of the answer."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "output_config."

    format: Format | None = None


class MessagesPrompt(Body):
    """A request's conversation, and how it may be answered."""

    unsupported: ClassVar[UnsupportedFields] = MESSAGES_PROMPT

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks[OnlyText] | None = None
    tools: (
        Annotated[list[Annotated[ClientTool, only("a tool", "custom")]], Field(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: Annotated[AutoChoice | OneToolChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[Thinking, only("thinking", "disabled", "adaptive", "enabled")] | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = Field(default=None, description="what output_config.format was before")
    cache_control: CacheControl | None = None


class CountTokensRequest(MessagesPrompt):
    """A prompt to count."""


class Metadata(RequestPart):
    """Accepted without effect: requests are neither counted nor stored by user."""

    user_id: str | None = None


class MessagesRequest(MessagesPrompt):
    """A conversation to continue."""

    unsupported: ClassVar[UnsupportedFields] = MESSAGES

    max_tokens: Annotated[
        int,
        Field(ge=1, lt=2**31, description="a ceiling: where the context leaves less, the answer ends there"),
        WHOLE,
    ]
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1, description="0, the default, is greedy")] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | VendorBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)

Found = Picture | Video


async def request_of(media: RequestMedia, body: MessagesRequest) -> Request:
    """The request behind /v1/messages, its pictures decoded. It raises what `prompt_of` raises."""
    names = ("max_tokens", "temperature", "top_p", "top_k")
    sampling = sampling_of(body, *names, stop=stops_of(body.stop_sequences))
    return replace(await prompt_of(media, body), sampling=sampling)


async def prompt_of(media: RequestMedia, body: MessagesPrompt) -> Request:
    """The request that has the prompt of /v1/messages, with sampling as it is by default.

    Raises:
        RequestError, ImageError: a field is wrong, or several can't be combined.
    """
    grammar, tools = either(_grammar(body, media.notes), tools_of(body, media.notes), "output_config.format")
    template = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    messages = await conversation_of(media, body)
    return Request(messages, tools=tools, grammar=grammar, template=template)


def tools_of(body: MessagesPrompt, notes: RequestNotes) -> ToolUse | None:
    """The tools that the model sees, and how it may use them.

    Raises:
        RequestError: a name twice, or a choice that the tools don't have.
    """
    choice = body.tool_choice
    tools = [
        offered_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools or ()
    ]
    named = choice.name if isinstance(choice, OneToolChoice) else None
    if choice is None or isinstance(choice, NoChoice):
        return tool_use(tools, notes, None if choice is None else "none", words=False)
    if choice.type == "any" and not tools:
        raise RequestError("tool_choice is any, but the request has no tools", field="tool_choice")
    mode: Mode = "required" if choice.type == "any" else "auto"
    return tool_use(
        tools, notes, mode, named=named, parallel=not choice.disable_parallel_tool_use, words=False
    )


async def conversation_of(media: RequestMedia, body: MessagesPrompt) -> tuple[Message, ...]:
    """The conversation with its system prompt first; neighbours of one role become one turn.

    Raises:
        RequestError, ImageError: a picture can't be loaded, or the turns make no conversation.
    """
    if body.messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's: prefill is not supported; end with the user's",
            field="messages",
        )
    wanted = {
        path: _ref(block, path)
        async for index, each in in_turns(enumerate(body.messages))
        for path, block in _pictures(each.content, f"messages[{index}].content")
    }
    found = await media.load(wanted)
    system = _join_texts(body.system)
    turns = [Message("system", (Text(system),))] if system else []
    async for index, each in in_turns(enumerate(body.messages)):
        turns += _messages(each, f"messages[{index}].content", found, media.notes)
    await _check_results(turns)
    return tuple(_merged(turns))


def _merged(turns: list[Message]) -> Iterator[Message]:
    """The turns, those of one role after one another as one; answers of tools stay apart."""
    for role, group in groupby(turns, key=lambda turn: turn.role):
        several = list(group)
        if role == "tool" or len(several) == 1:
            yield from several
        else:
            yield Message(
                role,
                tuple(part for turn in several for part in turn.content),
                tuple(call for turn in several for call in turn.tool_calls),
                reasoning="\n".join(turn.reasoning for turn in several if turn.reasoning),
            )


def _grammar(body: MessagesPrompt, notes: RequestNotes) -> Grammar | None:
    newer = body.output_config.format if body.output_config else None
    if newer and body.output_format:
        raise RequestError("send output_config.format or output_format, not both", field="output_format")
    selected = newer or body.output_format
    return None if selected is None else schema_grammar(selected.schema_, "output_config.format", notes)


def _join_texts(system: str | list[TextBlock] | None) -> str:
    if isinstance(system, list):
        return "\n\n".join(block.text for block in system if block.text)
    return system or ""


async def _check_results(conversation: list[Message]) -> None:
    """Raises RequestError where a tool answers a call that is not in the conversation."""
    call_ids: set[str | None] = set()
    async for message in in_turns(conversation):
        call_ids |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in call_ids:
            raise RequestError(
                f"a tool_result answers {message.tool_call_id!r}, but no tool_use before it has this id",
                field="messages",
            )


def _pictures(content: str | Sequence[Block] | None, field: str) -> Iterator[tuple[str, ImageBlock]]:
    """Pictures of a content, and of documents and results of tools in it, with their paths."""
    for index, block in enumerate(() if content is None or isinstance(content, str) else content):
        path = f"{field}[{index}]"
        if isinstance(block, ImageBlock):
            yield path, block
        elif isinstance(block, ToolResultBlock):
            yield from _pictures(block.content, f"{path}.content")
        elif isinstance(block, DocumentBlock) and not isinstance(block.source, TextSource):
            yield from _pictures(block.source.content, f"{path}.source.content")


def _ref(block: ImageBlock, field: str) -> MediaRef:
    match block.source:
        case Base64Source(data=data):
            return MediaRef(f"data:;base64,{data}", f"{field}.source.data")
        case UrlSource(url=url):
            return MediaRef(url, f"{field}.source.url")


def _messages(message: Turn, field: str, found: Mapping[str, Found], notes: RequestNotes) -> list[Message]:
    """The turns in one message: results of tools are turns of their own. `found`: pictures by path."""
    if isinstance(message.content, str):
        return [Message(message.role, _text(message.content))]
    turns: list[Message] = []
    parts: list[Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        content = _content(block, f"{field}[{index}]", found, notes)
        if isinstance(block, ToolUseBlock):
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input)))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResultBlock):
            turns += _turn(parts)
            parts = []
            turns.append(Message("tool", content, tool_call_id=block.tool_use_id))
        else:
            parts += content
    if message.role == "user":
        return turns + _turn(parts) or [Message("user")]
    return [Message(message.role, tuple(parts), tuple(calls), reasoning="\n".join(filter(None, thoughts)))]


def _turn(parts: list[Part]) -> list[Message]:
    return [Message("user", tuple(parts))] if parts else []


def _content(block: Block, field: str, found: Mapping[str, Found], notes: RequestNotes) -> tuple[Part, ...]:
    """Content that a block shows to the model; none for a call."""
    match block:
        case TextBlock(text=text):
            return _text(text)
        case ImageBlock():
            return (found[field],)
        case DocumentBlock():
            return _document(block, field, found, notes)
        case SearchResultBlock(source=source, title=title, content=texts):
            _note_citations(block, field, notes)
            inside = tuple(part for each in texts for part in _text(each.text))
            return _framed("search_result", {"source": source, "title": title}, inside)
        case VendorBlock(type=kind):
            notes.warn(f"left out {field}: no server but its vendor's runs {kind}")
            return ()
        case ToolResultBlock():
            return _result(block, f"{field}.content", found, notes)
        case _:
            return ()


def _document(
    block: DocumentBlock, field: str, found: Mapping[str, Found], notes: RequestNotes
) -> tuple[Part, ...]:
    """A document between tags, as Anthropic advises to write them, with its title and what is said of it."""
    _note_citations(block, field, notes)
    source, place = block.source, f"{field}.source.content"
    inside: tuple[Part, ...]
    if isinstance(source, TextSource):
        inside = _text(source.data)
    elif isinstance(source.content, str):
        inside = _text(source.content)
    else:
        pieces = enumerate(source.content)
        inside = tuple(part for i, each in pieces for part in _content(each, f"{place}[{i}]", found, notes))
    return _framed("document", {"title": block.title, "context": block.context}, inside)


def _framed(tag: str, about: Mapping[str, str | None], inside: tuple[Part, ...]) -> tuple[Part, ...]:
    """Content between tags, and before it what is said of it, between tags, too."""
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in about.items() if text)
    return (Text(f"<{tag}>\n{head}"), *inside, Text(f"\n</{tag}>"))


def _note_citations(block: DocumentBlock | SearchResultBlock, field: str, notes: RequestNotes) -> None:
    if block.citations is not None and block.citations.enabled:
        notes.warn(f"ignored {field}.citations: the models served here don't cite")


def _result(
    block: ToolResultBlock, field: str, found: Mapping[str, Found], notes: RequestNotes
) -> tuple[Part, ...]:
    """A tool's answer. That the tool failed, the model can only see in the text."""
    failed = _text("Error: " if block.is_error else "")
    if isinstance(block.content, str):
        return (*failed, *_text(block.content))
    inner = enumerate(block.content or ())
    return (*failed, *(part for i, each in inner for part in _content(each, f"{field}[{i}]", found, notes)))


def _text(text: str) -> tuple[Part, ...]:
    return (Text(text),) if text else ()


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


BlockOut = TextOut | ThinkingOut | ToolUseOut


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
    content: list[Annotated[BlockOut, Field(discriminator="type")]]
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
            content, stop_reason=self._stop_reason(usage), stop_sequence=choice.stop, usage=_usage(usage)
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

    def _message(self, content: Sequence[BlockOut], **fields: Any) -> MessageOut:
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


def _block(first: AnswerEvent, text: str) -> BlockOut:
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
async def post_messages(http: HttpRequest, body: MessagesRequest) -> Any:
    """Continue a conversation, with pictures, tools and structured outputs."""
    context, record = context_of(http), record_of(http.scope)
    name = context.check_model(body.model)
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    request = request_of(RequestMedia(context.media, record), body)
    reading = await read_answer(context, record, await request, ceiling=True, reasoning=thinking)
    answer = MessageAnswer(name, reading, body.max_tokens)
    return event_stream(context, answer.events()) if body.stream else await answer.whole()


@router.post("/count_tokens", response_model=TokenCount)
async def post_count_tokens(http: HttpRequest, body: CountTokensRequest) -> Any:
    """Count the tokens of a conversation, without continuing it."""
    context = context_of(http)
    context.check_model(body.model)
    media = context.media_to_count(record_of(http.scope))
    return TokenCount(input_tokens=len((await tokens_of(context, await prompt_of(media, body))).ids))

"""From Anthropic's requests to the engine's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from snugvl.core.messages import Grammar, Message, Part, Picture, Request, Text, ToolCall, ToolUse, Video
from snugvl.errors import RequestError
from snugvl.server.anthropic.schemas import (
    AnyChoice,
    Base64Source,
    DocumentBlock,
    ImageBlock,
    MessagesPrompt,
    MessagesRequest,
    NoChoice,
    OneToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)
from snugvl.server.forms import Mode, either, offered_tool, sampling_of, schema_grammar, stops_of, tool_use
from snugvl.server.media.loading import MediaRef, RequestMedia
from snugvl.server.record import Notes
from snugvl.server.together import in_turns

Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)

Found = Picture | Video


async def request_of(media: RequestMedia, body: MessagesRequest) -> Request:
    """The request behind /v1/messages, its pictures decoded.

    Raises:
        RequestError, ImageError: a field is wrong, or several can't be combined.
    """
    grammar, tools = either(_grammar(body, media.notes), tools_of(body, media.notes), "output_config.format")
    names = ("max_tokens", "temperature", "top_p", "top_k")
    sampling = sampling_of(body, *names, stop=stops_of(body.stop_sequences))
    template = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    messages = await conversation_of(media, body)
    return Request(messages, sampling, tools=tools, grammar=grammar, template=template)


def tools_of(body: MessagesPrompt, notes: Notes) -> ToolUse | None:
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
    if isinstance(choice, AnyChoice) and not tools:
        raise RequestError("tool_choice is any, but the request has no tools", field="tool_choice")
    mode: Mode = "required" if isinstance(choice, AnyChoice) else "auto"
    return tool_use(
        tools, notes, mode, named=named, parallel=not choice.disable_parallel_tool_use, words=False
    )


async def conversation_of(media: RequestMedia, body: MessagesPrompt) -> tuple[Message, ...]:
    """The conversation with its system prompt first; neighbours of one role become one turn.

    Raises:
        RequestError, ImageError: a picture can't be had, or the turns make no conversation.
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


def _grammar(body: MessagesRequest, notes: Notes) -> Grammar | None:
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
    """Raise RequestError where a tool's result belongs to no call of the conversation."""
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
        case Base64Source(media_type=kind, data=data):
            return MediaRef(f"data:{kind};base64,{data}", f"{field}.source.data")
        case UrlSource(url=url):
            return MediaRef(url, f"{field}.source.url")


def _messages(message: Turn, field: str, found: Mapping[str, Found], notes: Notes) -> list[Message]:
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
        return turns + _turn(parts)
    return [Message(message.role, tuple(parts), tuple(calls), reasoning="\n".join(filter(None, thoughts)))]


def _turn(parts: list[Part]) -> list[Message]:
    return [Message("user", tuple(parts))] if parts else []


def _content(block: Block, field: str, found: Mapping[str, Found], notes: Notes) -> tuple[Part, ...]:
    """What a block shows to the model; a call shows nothing of this kind."""
    match block:
        case TextBlock(text=text):
            return _text(text)
        case ImageBlock():
            return (found[field],)
        case DocumentBlock():
            return _document(block, field, found, notes)
        case ToolResultBlock():
            return _result(block, f"{field}.content", found, notes)
        case _:
            return ()


def _document(block: DocumentBlock, field: str, found: Mapping[str, Found], notes: Notes) -> tuple[Part, ...]:
    """A document between tags, as Anthropic advises to write them, with its title and what is said of it."""
    if block.citations is not None and block.citations.enabled:
        notes.warn(f"ignored {field}.citations: the models served here don't cite")
    source, place = block.source, f"{field}.source.content"
    inside: tuple[Part, ...]
    if isinstance(source, TextSource):
        inside = _text(source.data)
    elif isinstance(source.content, str):
        inside = _text(source.content)
    else:
        pieces = enumerate(source.content)
        inside = tuple(part for i, each in pieces for part in _content(each, f"{place}[{i}]", found, notes))
    about = {"title": block.title, "context": block.context}
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in about.items() if text)
    return (Text(f"<document>\n{head}"), *inside, Text("\n</document>"))


def _result(block: ToolResultBlock, field: str, found: Mapping[str, Found], notes: Notes) -> tuple[Part, ...]:
    """A tool's answer. That the tool failed, the model can only see in the text."""
    failed = _text("Error: " if block.is_error else "")
    if isinstance(block.content, str):
        return (*failed, *_text(block.content))
    inner = enumerate(block.content or ())
    return (*failed, *(part for i, each in inner for part in _content(each, f"{field}[{i}]", found, notes)))


def _text(text: str) -> tuple[Part, ...]:
    return (Text(text),) if text else ()

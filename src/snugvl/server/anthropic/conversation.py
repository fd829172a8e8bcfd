"""From Anthropic's requests to the engine's."""

import json

from snugvl.core.messages import Grammar, Message, Part, Request, Text, ToolCall, ToolUse
from snugvl.core.sampling import SamplingParams
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
from snugvl.server.context import Context
from snugvl.server.forms import either, offered_tool, refuse_twice, schema_grammar, tell_unenforced
from snugvl.server.record import current
from snugvl.server.together import together

Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


async def request_of(context: Context, body: MessagesRequest) -> Request:
    """The request behind /v1/messages, its pictures decoded.

    Raises:
        RequestError, ImageError: a field is wrong, or several can't be combined.
    """
    grammar, tools = either(_grammar(body), tools_of(body), "output_config.format")
    sampling = SamplingParams(
        max_tokens=body.max_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
    )
    template = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    messages = await conversation_of(context, body)
    return Request(messages, sampling, tools=tools, grammar=grammar, template=template)


def tools_of(body: MessagesPrompt) -> ToolUse | None:
    """The tools that the model sees, and how it may use them.

    Raises:
        RequestError: a name twice, or a choice that the tools don't have.
    """
    choice = body.tool_choice
    tools = tuple(
        offered_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools or ()
    )
    names = [tool.name for tool in tools]
    refuse_twice(names)
    if isinstance(choice, OneToolChoice) and choice.name not in names:
        offered = ", ".join(map(repr, names)) or "no tools"
        raise RequestError(
            f"tool_choice names {choice.name!r}, which tools doesn't have ({offered})",
            field="tool_choice.name",
        )
    if isinstance(choice, AnyChoice) and not tools:
        raise RequestError("tool_choice is any, but the request has no tools", field="tool_choice")
    if not tools or isinstance(choice, NoChoice):
        return None
    selected = "required" if isinstance(choice, AnyChoice) else "auto"
    if isinstance(choice, OneToolChoice):
        selected = choice.name
    return ToolUse(
        tell_unenforced(tools), selected, parallel=not (choice and choice.disable_parallel_tool_use)
    )


async def conversation_of(context: Context, body: MessagesPrompt) -> tuple[Message, ...]:
    """The conversation with its system prompt first; neighbours of one role become one turn.

    Raises:
        RequestError, ImageError: a picture can't be had, or the turns make no conversation.
    """
    if body.messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's: prefill is not supported; end with the user's",
            field="messages",
        )
    turns = await together(
        _messages(context, each, f"messages[{index}]") for index, each in enumerate(body.messages)
    )
    system = _join_texts(body.system)
    conversation = [Message("system", (Text(system),))] if system else []
    for message in (message for turn in turns for message in turn):
        if conversation and message.role == conversation[-1].role != "tool":
            last = conversation.pop()
            message = Message(
                last.role, (*last.content, *message.content), (*last.tool_calls, *message.tool_calls)
            )
        conversation.append(message)
    _check_results(conversation)
    return tuple(conversation)


def _grammar(body: MessagesRequest) -> Grammar | None:
    newer = body.output_config.format if body.output_config else None
    if newer and body.output_format:
        raise RequestError("send output_config.format or output_format, not both", field="output_format")
    selected = newer or body.output_format
    return None if selected is None else schema_grammar(selected.schema_, field="output_config.format")


def _join_texts(system: str | list[TextBlock] | None) -> str:
    if isinstance(system, list):
        return "\n\n".join(block.text for block in system if block.text)
    return system or ""


def _check_results(conversation: list[Message]) -> None:
    """Raises RequestError where a tool answers a call that nobody made."""
    call_ids: set[str | None] = set()
    for message in conversation:
        call_ids |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in call_ids:
            raise RequestError(
                f"a tool_result answers {message.tool_call_id!r}, but no tool_use before it has this id",
                field="messages",
            )


async def _messages(context: Context, message: Turn, field: str) -> list[Message]:
    """The turns in one message: results of tools are turns of their own."""
    if isinstance(message.content, str):
        return [Message(message.role, _text(message.content))]
    contents = await together(
        _content(context, block, f"{field}.content[{index}]") for index, block in enumerate(message.content)
    )
    turns: list[Message] = []
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for block, content in zip(message.content, contents, strict=True):
        if isinstance(block, ToolUseBlock):
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input)))
        elif isinstance(block, ToolResultBlock):
            turns += _turn(parts)
            parts = []
            turns.append(Message("tool", content, tool_call_id=block.tool_use_id))
        else:
            parts += content
    if message.role == "user":
        return turns + _turn(parts)
    return [Message(message.role, tuple(parts), tuple(calls))]


def _turn(parts: list[Part]) -> list[Message]:
    return [Message("user", tuple(parts))] if parts else []


async def _content(context: Context, block: Block, field: str) -> tuple[Part, ...]:
    """What a block shows to the model; a call shows nothing of this kind."""
    match block:
        case TextBlock(text=text):
            return _text(text)
        case ImageBlock(source=Base64Source(media_type=kind, data=data)):
            name = f"{field}.source.data"
            return (await context.intake.picture(f"data:{kind};base64,{data}", field=name, video=False),)
        case ImageBlock(source=UrlSource(url=url)):
            return (await context.intake.picture(url, field=f"{field}.source.url", video=False),)
        case DocumentBlock():
            return await _document(context, block, field)
        case ToolResultBlock():
            return await _result(context, block, field)
        case _:
            return ()


async def _document(context: Context, block: DocumentBlock, field: str) -> tuple[Part, ...]:
    """A document between tags, as Anthropic advises to write them, with its title and what is said of it."""
    if block.citations is not None and block.citations.enabled:
        current().warn(f"ignored {field}.citations: the models served here don't cite")
    source, place = block.source, f"{field}.source.content"
    inside: tuple[Part, ...]
    if isinstance(source, TextSource):
        inside = _text(source.data)
    elif isinstance(source.content, str):
        inside = _text(source.content)
    else:
        pieces = (_content(context, each, f"{place}[{index}]") for index, each in enumerate(source.content))
        inside = tuple(part for piece in await together(pieces) for part in piece)
    about = {"title": block.title, "context": block.context}
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in about.items() if text)
    return (Text(f"<document>\n{head}"), *inside, Text("\n</document>"))


async def _result(context: Context, block: ToolResultBlock, field: str) -> tuple[Part, ...]:
    """A tool's answer. That the tool failed, the model can only see in the text."""
    failed = _text("Error: " if block.is_error else "")
    if isinstance(block.content, str):
        return (*failed, *_text(block.content))
    contents = await together(
        _content(context, inner, f"{field}.content[{index}]")
        for index, inner in enumerate(block.content or ())
    )
    return (*failed, *(part for content in contents for part in content))


def _text(text: str) -> tuple[Part, ...]:
    return (Text(text),) if text else ()

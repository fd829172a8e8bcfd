"""Chat templates: a conversation to the text the model was trained on.

A template is code of the checkpoint's publisher, so it runs in a sandbox (`sandbox.py`) and sees nothing but
plain JSON values.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from snugvl.checkpoint.section import read_json
from snugvl.core.folders import read_small
from snugvl.core.messages import Message, Picture, Text, Tool, ToolCall, ToolForm, Video, user
from snugvl.errors import CheckpointError, RequestError
from snugvl.inputs import sandbox
from snugvl.inputs.reasoning import thinks
from snugvl.inputs.tools.forms import tool_form
from snugvl.inputs.tools.in_text import ANSWER_MARKS, call_arguments, with_calls, with_tools

_OWN = ("self", "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # as templates call what was thought before
MAX_TEMPLATE = 200_000  # characters, seven seconds of compiling; the longest of models have a tenth of it
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A checkpoint's chat template. `variables` (bos_token, …) are visible to it.

    `parts`: whether it wants every content as a list of parts, even mere text.

    Attributes:
        shows_tools, shows_calls: whether it does; what it doesn't show is written as text (`tools.in_text`).
        tool_form: how the model writes calls.
        answer_marks: what stands around a tool's answer: who writes it speaks as the tool.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "the chat template",
        variables: Mapping[str, str] | None = None,
        parts: bool = False,
    ) -> None:
        self._where = where
        self._parts = parts
        self.source = source
        self._variables = dict(variables or {})
        environment = sandbox.Environment()
        if len(source) > MAX_TEMPLATE:
            raise CheckpointError(
                f"{where} has {len(source):,} characters, at most {MAX_TEMPLATE:,} are read"
            )
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{where} is not a valid template: line {error.lineno}: {error}") from None
        except RecursionError:
            raise CheckpointError(f"{where} is not a valid template: it is nested too deeply") from None
        self.shows_tools = "tools" in used
        self.shows_calls = "tool_calls" in source
        self.tool_form = tool_form(source) if self.shows_tools else ToolForm()
        self.answer_marks = tuple(
            mark for mark in ANSWER_MARKS if mark in source or not (self.shows_tools and self.shows_calls)
        )
        self.thinks = thinks(source)

    @classmethod
    def from_folder(cls, folder: Path, variables: Mapping[str, str] | None = None) -> "ChatTemplate":
        """Read chat_template.jinja, else chat_template.json, else tokenizer_config.json.

        Raises:
            CheckpointError: there is none, or it isn't a template.
        """
        path = folder / "chat_template.jinja"
        if path.exists():
            try:
                text = read_small(path, 4 * MAX_TEMPLATE).decode()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise CheckpointError(f"{path} can't be read: {reason}") from None
            return cls(text, where=str(path), variables=variables)
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = folder / name
            source = _default(read_json(path).get("chat_template")) if path.exists() else None
            if source is not None:
                return cls(source, where=str(path), variables=variables)
        raise CheckpointError(f"{folder} has no chat template (chat_template.jinja); is it a chat model?")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's prompt, with one placeholder per image and video.

        `extra`: variables of the request's own, such as `enable_thinking`.

        Raises:
            RequestError: no messages, an unknown role, or the template refuses or fails on this conversation.
            CheckpointError: the template fails on any conversation.
        """
        if not messages:
            raise RequestError("the conversation is empty; send at least one message", field="messages")
        if not self.shows_calls:
            messages = with_calls(messages)
        if tools and not self.shows_tools:
            messages, tools = with_tools(messages, tools), None
        variables = {
            "messages": [_plain(message, index, self._parts) for index, message in enumerate(messages)],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return sandbox.rendered(self._template, {**variables, **(extra or {}), **self._variables})
        except sandbox.ConversationRefused as error:
            raise RequestError(f"the chat template refuses this: {error}", field="messages") from None
        except Exception as error:  # templates can fail in any way Python can
            fault = _fault(error)
        variables |= {"messages": [_plain(user("?"), 0, self._parts)], "tools": None}
        try:
            sandbox.rendered(self._template, {**variables, **self._variables})
        except sandbox.ConversationRefused:
            pass
        except Exception as error:  # so the request isn't to blame
            why = f"{self._where} {_fault(error)}, even on a simple question; use another checkpoint"
            raise CheckpointError(why) from None
        raise RequestError(
            f"the chat template {fault} on this conversation, though not on a simple question; "
            "change messages, tools or chat_template_kwargs",
            field="messages",
        )


def _fault(error: Exception) -> str:
    """How rendering failed, as a predicate of the template."""
    if isinstance(error, sandbox.TooMuch):
        return f"asks for {error}"
    return f"fails with {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"


def texts(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> Iterator[tuple[str, str]]:
    """Every text that a user brings to the prompt, and its field: none may become a control token.

    Neither alone nor where a template joins two parts.

    Raises:
        RequestError: the arguments of a call are not a JSON object.
    """
    for index, message in enumerate(messages):
        parts = [part.unmarked for part in message.content if isinstance(part, Text)]
        yield f"messages[{index}].content", "".join(parts)
        if len(parts) > 1:
            yield f"messages[{index}].content", "".join(text.strip() for text in parts)
        for number, call in enumerate(message.tool_calls):
            field = f"messages[{index}].tool_calls[{number}]"
            arguments = json.dumps(call_arguments(call, f"{field}.arguments"), ensure_ascii=False)
            for text in (call.name, arguments, call.id):
                yield field, text
        yield f"messages[{index}].tool_call_id", message.tool_call_id or ""
        yield f"messages[{index}].reasoning_content", message.reasoning
    for index, tool in enumerate(tools):
        yield f"tools[{index}].name", tool.name
        yield f"tools[{index}].description", tool.description
        yield f"tools[{index}].parameters", json.dumps(dict(tool.parameters), ensure_ascii=False)


def template_texts(extra: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts in the variables that a request gives to the template, with their field: see `texts`.

    Raises:
        RequestError: a variable that is made of the request's own fields.
    """
    for name in extra:
        if name in _OWN:
            raise RequestError(
                f"chat_template_kwargs can't set {name!r}; it is made of the request's own fields",
                field="chat_template_kwargs",
            )
    yield "chat_template_kwargs", json.dumps(dict(extra), ensure_ascii=False)


def refuse_marks(text: str, marks: Sequence[str], kind: str, field: str) -> None:
    """Raise RequestError if `text` holds one of `marks`. `kind`: what they are for the model, as a clause."""
    found = next((mark for mark in marks if mark in text), None)
    if found is not None:
        raise RequestError(f"text contains {found!r}, {kind}; remove it or break it up", field=field)


def _plain(message: Message, index: int, parts: bool) -> dict[str, Any]:
    """A message as templates expect it: content is a string, or a list of parts (when it has pictures)."""
    if message.role not in ROLES:
        raise RequestError(
            f"role {message.role!r} is unknown; use one of {', '.join(ROLES)}", field="messages"
        )
    texts = [part.text for part in message.content if isinstance(part, Text)]
    plain = len(texts) == len(message.content) and not parts
    content = "".join(texts) if plain else [_part(part) for part in message.content]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(
                f"only the assistant calls tools, not the role {message.role!r}", field=f"messages[{index}]"
            )
        fields["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields |= dict.fromkeys(_REASONING, message.reasoning)
    return fields


def _call(call: ToolCall, field: str) -> dict[str, Any]:
    """Arguments go in as an object: a template that meets a string may quote it once more."""
    arguments = call_arguments(call, f"{field}.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _part(part: Text | Picture | Video) -> dict[str, str]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Picture():
            return {"type": "image"}
        case Video():
            return {"type": "video"}


def _default(value: object) -> str | None:
    """A template, or the one named "default" of several."""
    if isinstance(value, list):
        named = {v.get("name"): v.get("template") for v in value if isinstance(v, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None

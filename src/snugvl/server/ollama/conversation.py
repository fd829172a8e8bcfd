"""From Ollama's requests to the engine's."""

import json
from collections import defaultdict, deque
from itertools import product
from typing import Any, Final

from snugvl.core.messages import (
    Capabilities,
    Grammar,
    Message,
    Part,
    Picture,
    Request,
    Text,
    ToolCall,
    ToolUse,
    Video,
)
from snugvl.errors import RequestError
from snugvl.server.forms import (
    call_arguments,
    either,
    offered_tool,
    schema_grammar,
    tool_use,
)
from snugvl.server.media.loading import MediaRef, RequestMedia
from snugvl.server.ollama import schemas
from snugvl.server.ollama.schemas import sampling_of
from snugvl.server.record import Notes
from snugvl.server.together import in_turns

MARKER: Final = "[img]"  # of Ollama, in a message's text: the next of its pictures stands here


async def chat_request(media: RequestMedia, capabilities: Capabilities, chat: schemas.ChatRequest) -> Request:
    """The request behind /api/chat, its pictures decoded.

    Raises:
        RequestError, ImageError: a field is wrong, or several can't be combined.
    """
    grammar, tools = either(_grammar(chat.format, media.notes), _tools(chat.tools, media.notes), "format")
    messages = chat.messages or []
    if messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's: continuing it is not supported; end with the user's",
            field="messages",
        )
    sampling = sampling_of(chat.options, _logprobs(chat), capabilities, media.notes)
    async for index, message in in_turns(enumerate(messages)):
        _check(message, f"messages[{index}]")
    conversation = await _conversation(media, messages)
    return Request(conversation, sampling, tools=tools, grammar=grammar, template=_template(chat))


async def generate_request(
    media: RequestMedia, capabilities: Capabilities, body: schemas.GenerateRequest
) -> Request:
    """The request behind /api/generate, its pictures decoded.

    Raises:
        RequestError, ImageError: a field is wrong, or several can't be combined.
    """
    sampling = sampling_of(body.options, _logprobs(body), capabilities, media.notes)
    grammar, prompt = _grammar(body.format, media.notes), body.prompt or ""
    if body.raw:
        for field in ("system", "images"):
            if getattr(body, field):
                raise RequestError(
                    f"{field} can't be combined with raw: it needs the chat template", field=field
                )
        return Request(prompt=prompt, sampling=sampling, grammar=grammar)
    system = (Message("system", (Text(body.system),)),) if body.system else ()
    pictures = await media.load(_refs(body.images, "images"))
    user = Message("user", _placed(body.prompt, list(pictures.values())))
    return Request((*system, user), sampling, grammar=grammar, template=_template(body))


def _logprobs(body: schemas.Generating) -> int | None:
    """Number of alternatives to report; None for no log-probabilities.

    Raises:
        RequestError: alternatives without log-probabilities.
    """
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return None


def _template(body: schemas.Generating) -> dict[str, Any]:
    """Whether a model that can think does so, where its chat template can be told."""
    return {} if body.think is None else {"enable_thinking": bool(body.think)}


def _grammar(form: str | dict[str, Any] | None, notes: Notes) -> Grammar | None:
    if isinstance(form, dict):
        return schema_grammar(form, "format", notes)
    return Grammar("json_schema", '{"type": "object"}') if form == "json" else None


def _tools(tools: list[schemas.OllamaTool] | None, notes: Notes) -> ToolUse | None:
    functions = [tool.function for tool in tools or ()]
    offered = [offered_tool(each.name, each.description, each.parameters, None) for each in functions]
    return tool_use(offered, notes, words=False)


async def _conversation(media: RequestMedia, messages: list[schemas.ChatMessage]) -> tuple[Message, ...]:
    """The messages, each answer of a tool with the id of the call that it answers.

    Chat templates show pictures of users and tools alone: those of others begin the next such turn.
    """
    refs = [_refs(each.images, f"messages[{index}].images") for index, each in enumerate(messages)]
    found = await media.load({path: ref for each in refs for path, ref in each.items()})
    conversation: list[Message] = []
    waiting, images = _Waiting(), list[Picture | Video]()
    async for index, message in in_turns(enumerate(messages)):
        own = [found[path] for path in refs[index]]
        if message.role in ("user", "tool"):
            content, images = (*images, *_placed(message.content, own)), []
        else:
            content, images = _text(message.content), [*images, *own]
            if own:
                media.notes.warn(
                    f"showed messages[{index}].images with the next turn of the user or of a tool"
                )
        calls = tuple(
            ToolCall(
                call.id or f"call_{index}_{number}",
                call.function.name,
                _arguments(call, f"messages[{index}].tool_calls[{number}].function.arguments", media.notes),
            )
            for number, call in enumerate(message.tool_calls or ())
        )
        for each in calls:
            waiting.add(each)
        answers = waiting.answered_by(message) if message.role == "tool" else None
        thought = (message.thinking or "") if message.role == "assistant" else ""
        conversation.append(Message(message.role, content, calls, answers, thought))
    return (*conversation, *([Message("user", tuple(images))] if images else ()))


def _arguments(call: schemas.PastCall, field: str, notes: Notes) -> str:
    """As JSON text; Ollama has an object there, and some clients OpenAI's text."""
    value = call.function.arguments
    return call_arguments(value, field, notes) if isinstance(value, str) else json.dumps(value)


def _check(message: schemas.ChatMessage, field: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{field}: only the assistant makes calls", field=f"{field}.tool_calls")


class _Waiting:
    """Calls that no tool has answered yet, in order: all of them, by id, by name, and by both.

    A call stands in four queues and leaves the others when they come to it, so matching is linear.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str | None, str | None], deque[tuple[int, str]]] = defaultdict(deque)
        self._answered: list[bool] = []

    def add(self, call: ToolCall) -> None:
        """One more call."""
        for key in product((None, call.id), (None, call.name)):
            self._queues[key].append((len(self._answered), call.id))
        self._answered.append(False)

    def answered_by(self, message: schemas.ChatMessage) -> str | None:
        """Id of the first call left that a tool's message may answer, by the id and the name that it has.

        The message's own id, or None, where the conversation no longer has the call.
        """
        queue = self._queues.get((message.tool_call_id, message.tool_name), deque())
        while queue:
            number, call_id = queue.popleft()
            if not self._answered[number]:
                self._answered[number] = True
                return call_id
        return message.tool_call_id


def _placed(text: str | None, images: list[Picture | Video]) -> tuple[Part, ...]:
    """A message's pictures and text: pictures where markers in the text stand for them, the others first."""
    first, *rest = (text or "").split(MARKER, len(images))
    parts: list[Part] = [*images[len(rest) :], *_text(first)]
    for image, after in zip(images, rest, strict=False):
        parts += [image, *_text(after)]
    return tuple(parts)


def _text(text: str | None) -> tuple[Text, ...]:
    return (Text(text),) if text else ()


def _refs(images: list[str] | None, field: str) -> dict[str, MediaRef]:
    """Pictures by their paths in the request.

    Raises:
        RequestError: one is a URL.
    """
    found: dict[str, MediaRef] = {}
    for index, image in enumerate(images or ()):
        place = f"{field}[{index}]"
        if ":" in image[:16]:
            raise RequestError(f"{place} is a URL; send the picture itself, in base64", field=place)
        found[place] = MediaRef(f"data:;base64,{image}", place)
    return found

"""Ollama's requests: /api/chat, /api/generate, /api/show, and their `options`."""

import json
from collections import defaultdict, deque
from itertools import product
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from snugvl.core.messages import (
    Capabilities,
    Grammar,
    Message,
    Picture,
    Request,
    Text,
    ToolCall,
    ToolUse,
    Video,
)
from snugvl.core.messages import Part as Content
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.server import forms
from snugvl.server.fields import WHOLE, Body, Part, in_turns
from snugvl.server.forms import (
    MAX_TOOLS,
    MinP,
    Penalty,
    RepetitionPenalty,
    Stop,
    Temperature,
    ToolName,
    TopK,
    TopLogprobs,
    TopP,
    call_arguments,
    either,
    offered_tool,
    schema_grammar,
    stops_of,
    tool_use,
)
from snugvl.server.media.loading import MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes
from snugvl.server.unsupported import OLLAMA, OLLAMA_OPTIONS, OLLAMA_PICTURES, UnsupportedFields, thinks

UNLIMITED = (-1, -2)  # of num_predict: without end, and until the context is full


class OllamaOptions(Body):
    """Ollama's options of an answer. Options that tune llama.cpp are ignored."""

    unsupported: ClassVar[UnsupportedFields] = OLLAMA_OPTIONS
    place: ClassVar[str] = "options."

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    num_predict: (
        Annotated[int, Field(ge=-2, lt=2**31, description="new tokens at most; -1 and -2: what fits"), WHOLE]
        | None
    ) = None
    num_ctx: (
        Annotated[int, Field(ge=1, lt=2**63, description="a ceiling: the context is what is served"), WHOLE]
        | None
    ) = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: (
        Annotated[int, Field(ge=-1, description="with a penalty -1 or 64: it looks at all tokens"), WHOLE]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


def sampling_of(
    options: OllamaOptions | None, logprobs: int | None, capabilities: Capabilities, notes: RequestNotes
) -> SamplingParams:
    """The sampling parameters behind `options`; `logprobs` as in `SamplingParams`.

    Raises:
        RequestError: an answer of no tokens, or penalties for the last tokens alone.
    """
    options = options or OllamaOptions()
    if options.num_ctx is not None and options.num_ctx > capabilities.context_tokens:
        notes.warn(f"lowered options.num_ctx to {capabilities.context_tokens}, the context that is served")
    if options.num_predict == 0:
        raise RequestError(
            "options.num_predict is 0, which leaves no answer; -1 is what fits", field="options.num_predict"
        )
    others = options.presence_penalty or options.frequency_penalty
    penalties = others or options.repeat_penalty not in (None, 1)
    if penalties and options.repeat_last_n not in (None, -1, 64):
        raise RequestError(
            f"options.repeat_last_n is {options.repeat_last_n}, but penalties look at all tokens; send -1 or "
            "leave it out",
            field="options.repeat_last_n",
        )
    return forms.sampling_of(
        options,
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        max_tokens=None if options.num_predict in UNLIMITED else options.num_predict,
        repetition_penalty=options.repeat_penalty,
        stop=stops_of(options.stop),
        seed=None if options.seed == -1 else options.seed,
        logprobs=logprobs,
    )


Base64Images = Annotated[
    Annotated[list[str], Field(max_length=64)] | None,
    Field(description="pictures, base64 without the head of a data URL"),
]
Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None, Field(description='"json" for any object, or a JSON schema')
]
KeepAlive = Annotated[Any, Field(description="accepted; the model stays loaded as long as the server runs")]
Name = Annotated[str, Field(min_length=1, description='with or without ":latest"')]


class CallFunction(Part):
    """A function with its arguments."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class PastCall(Part):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class ChatMessage(Part):
    """One turn. `images`: shown before the text; `tool_name`, `tool_call_id`: which call a tool answers."""

    unsupported: ClassVar[UnsupportedFields] = OLLAMA_PICTURES

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Base64Images = None
    thinking: str | None = Field(default=None, description="what the assistant thought before it")
    tool_calls: Annotated[list[PastCall], Field(max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(Part):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Part):
    """A tool."""

    type: Literal["function"] = "function"
    function: OllamaFunction


class Generating(Body):
    """Fields that chat and generate have in common."""

    unsupported: ClassVar[UnsupportedFields] = OLLAMA

    model: Name
    stream: bool | None = Field(default=None, description="a line of JSON for each piece; true without")
    format: Format = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    think: bool | str | None = Field(
        None, description="whether a model that can think does so, where its chat template takes it"
    )


class ChatRequest(Generating):
    """A conversation to continue. Without messages it only asks whether the model is there."""

    messages: Annotated[list[ChatMessage], Field(max_length=10_000)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class GenerateRequest(Generating):
    """A prompt to answer. Without one it only asks whether the model is there."""

    prompt: str | None = None
    system: str | None = None
    images: Base64Images = None
    raw: bool | None = Field(default=None, description="the prompt as it is, without the chat template")


class ShowRequest(Body):
    """A model to describe."""

    model: Name | None = None
    name: Name | None = Field(default=None, description="what `model` was called before")
    verbose: bool | None = Field(default=None, description="accepted; everything is shown anyway")


class PullRequest(Body):
    """A model to have."""

    model: Name | None = None
    name: Name | None = Field(default=None, description="what `model` was called before")
    stream: bool | None = None
    insecure: bool | None = None


MARKER: Final = "[img]"  # of Ollama, in a message's text: the next of its pictures stands here


async def chat_request(media: RequestMedia, capabilities: Capabilities, chat: ChatRequest) -> Request:
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


async def generate_request(media: RequestMedia, capabilities: Capabilities, body: GenerateRequest) -> Request:
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


def _logprobs(body: Generating) -> int | None:
    """How many alternatives to tell; None for no log-probabilities.

    Raises:
        RequestError: alternatives without log-probabilities.
    """
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return None


def _template(body: Generating) -> dict[str, Any]:
    """Whether a model that can think does so, where its chat template can be told."""
    return {} if body.think is None else {"enable_thinking": thinks(body.think)}


def _grammar(form: str | dict[str, Any] | None, notes: RequestNotes) -> Grammar | None:
    if isinstance(form, dict):
        return schema_grammar(form, "format", notes)
    return Grammar("json_schema", '{"type": "object"}') if form == "json" else None


def _tools(tools: list[OllamaTool] | None, notes: RequestNotes) -> ToolUse | None:
    functions = [tool.function for tool in tools or ()]
    offered = [offered_tool(each.name, each.description, each.parameters, None) for each in functions]
    return tool_use(offered, notes, words=False)


async def _conversation(media: RequestMedia, messages: list[ChatMessage]) -> tuple[Message, ...]:
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


def _arguments(call: PastCall, field: str, notes: RequestNotes) -> str:
    """A past call's arguments as JSON text: Ollama sends an object, some clients OpenAI's text."""
    value = call.function.arguments
    return call_arguments(value, field, notes) if isinstance(value, str) else json.dumps(value)


def _check(message: ChatMessage, field: str) -> None:
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

    def answered_by(self, message: ChatMessage) -> str | None:
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


def _placed(text: str | None, images: list[Picture | Video]) -> tuple[Content, ...]:
    """A message's pictures and text: pictures where markers in the text stand for them, the others first."""
    first, *rest = (text or "").split(MARKER, len(images))
    parts: list[Content] = [*images[len(rest) :], *_text(first)]
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

"""Ollama's requests: /api/chat, /api/generate, /api/show, and their `options`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from snugvl.core.messages import Capabilities
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.server import forms
from snugvl.server.fields import WHOLE, Body, Part
from snugvl.server.forms import MAX_TOOLS, Stop, ToolName, stops_of
from snugvl.server.record import Notes
from snugvl.server.unsupported import OLLAMA, OLLAMA_OPTIONS, OLLAMA_PICTURES, UnsupportedFields

UNLIMITED = (-1, -2)  # of num_predict: without end, and until the context is full


class OllamaOptions(Body):
    """Ollama's options, as they are read here. Those that tune llama.cpp are ignored."""

    unsupported: ClassVar[UnsupportedFields] = OLLAMA_OPTIONS
    place: ClassVar[str] = "options."

    temperature: Annotated[float, Field(ge=0, le=2, description="0, the default, is greedy")] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, description="0 is off"), WHOLE] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, description="0 is greedy")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
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
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None


def sampling_of(
    options: OllamaOptions | None, logprobs: int | None, capabilities: Capabilities, notes: Notes
) -> SamplingParams:
    """The sampling parameters behind `options`; `logprobs` as in `SamplingParams`.

    Raises:
        RequestError: an answer of no tokens.
    """
    options = options or OllamaOptions()
    if options.num_ctx is not None and options.num_ctx > capabilities.context_tokens:
        notes.warn(f"lowered options.num_ctx to {capabilities.context_tokens}, the context that is served")
    if options.num_predict == 0:
        raise RequestError(
            "options.num_predict is 0, which leaves no answer; -1 is what fits", field="options.num_predict"
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
KeepAlive = Annotated[
    Any,
    Field(description="accepted; the model stays loaded as long as the server runs"),
]
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
    """The common part of chat and generate."""

    unsupported: ClassVar[UnsupportedFields] = OLLAMA

    model: Name
    stream: bool | None = Field(default=None, description="a line of JSON for each piece; true without")
    format: Format = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    think: bool | str | None = Field(None, description="for a template that can be told; never shown")


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
    verbose: bool | None = Field(default=None, description="accepted; everything is told anyway")


class PullRequest(Body):
    """A model to have."""

    model: Name | None = None
    name: Name | None = Field(default=None, description="what `model` was called before")
    stream: bool | None = None
    insecure: bool | None = None

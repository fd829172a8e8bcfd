"""Ollama's requests: /api/chat, /api/generate, /api/show."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from snugvl.server.fields import WHOLE, Exact, Harmless
from snugvl.server.ollama.options import Options

Base64Images = Annotated[
    Annotated[list[str], Field(max_length=64)] | None,
    Field(description="pictures, base64 without the head of a data URL"),
]
Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None, Field(description='"json" for any object, or a JSON schema')
]
KeepAlive = Annotated[
    Annotated[str, Field(pattern=r"^-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h)?)+$")] | float | None,
    Field(description="accepted; the model stays loaded as long as the server runs"),
]
Name = Annotated[str, Field(min_length=1, description='with or without ":latest"')]


class CallFunction(Exact):
    """A function with its arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Annotated[int, Field(ge=0), WHOLE] | None = None


class Call(Exact):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class ChatMessage(Exact):
    """One turn. `images` belong to users; `tool_name` or `tool_call_id` say which call a tool answers."""

    harmless: ClassVar[Harmless] = {"thinking": ("",)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Base64Images = None
    tool_calls: Annotated[list[Call], Field(max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Exact):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Exact):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class Generating(Exact):
    """What chat and generate have in common."""

    model: Name
    stream: bool | None = Field(default=None, description="a line of JSON for each piece; true without")
    format: Format = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None


class ChatRequest(Generating):
    """A conversation to continue. Without messages it only asks whether the model is there."""

    harmless: ClassVar[Harmless] = {"think": (False,), "truncate": (False,), "shift": (False,)}

    messages: Annotated[list[ChatMessage], Field(max_length=10_000)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None


class GenerateRequest(Generating):
    """A prompt to answer. Without one it only asks whether the model is there."""

    harmless: ClassVar[Harmless] = {
        "think": (False,),
        "truncate": (False,),
        "shift": (False,),
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
    }

    prompt: str | None = None
    system: str | None = None
    images: Base64Images = None
    raw: bool | None = Field(default=None, description="the prompt as it is, without the chat template")


class ShowRequest(Exact):
    """A model to describe."""

    harmless: ClassVar[Harmless] = {"system": ("",), "template": ("",), "options": ({},)}

    model: Name | None = None
    name: Name | None = Field(default=None, description="what `model` was called before")
    verbose: bool | None = Field(default=None, description="accepted; everything is told anyway")

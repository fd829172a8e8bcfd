"""What every backend gives the tasks and the server: messages in, text out.

`submit` starts a request and returns at once; the stream it returns is read either as an ordinary
iterator or as an async one. Reading is optional: a stream that is closed, or dropped, aborts its request.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from PIL.Image import Image

from snugvl.sampling import SamplingParams

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Text:
    """Text in a message."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image in a message: decoded, upright, RGB (see `inputs.image.open_image`)."""

    image: Image
    max_pixels: int | None = None  # lowers the checkpoint's own limit for this image


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames in a message, sampled already, with the time of each in seconds."""

    frames: tuple[Image, ...]
    timestamps: tuple[float, ...]


Part = Text | Picture | Video


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation to continue. `deadline_s`: seconds from now after which it fails."""

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text, bytes and log-probability."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob(TokenLogprob):
    """A generated token, with the most likely alternatives (most likely first)."""

    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; image tokens are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: new text; may be empty (a token that ends in the middle of a character, or the end).
        choice: index below `sampling.n`.
        logprobs: of the tokens behind this text, when asked for.
        finish_reason: on the last delta of a choice.
        usage: on the last delta of the request.
    """

    text: str
    choice: int = 0
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: Literal["stop", "length", "abort"] | None = None
    usage: Usage | None = None


class Stream(Protocol):
    """The answer as it is generated. Errors of the request are raised by the iteration."""

    def __iter__(self) -> Iterator[Delta]: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def close(self) -> None:
        """Abort what is not finished. Safe to call twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do. `max_pixels`: largest image before it is scaled down."""

    model: str
    context_tokens: int
    images: bool
    video: bool
    max_pixels: int
    min_pixels: int


class Backend(Protocol):
    """A loaded model behind one interface, safe to use from several threads."""

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, request: Request) -> Stream:
        """Start a request.

        Raises:
            RequestError: it is wrong, or too large for the context; nothing was started.
        """
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        ...

    def close(self) -> None:
        """Abort everything and free the model."""
        ...


def user(*parts: Part | str | Image) -> Message:
    """A user message from strings, images and parts."""
    return Message("user", tuple(_part(part) for part in parts))


def _part(value: Part | str | Image) -> Part:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Text | Picture | Video):
        return value
    return Picture(value)


def messages_of(values: Message | Sequence[Message]) -> tuple[Message, ...]:
    """One message or several, as a tuple."""
    return (values,) if isinstance(values, Message) else tuple(values)

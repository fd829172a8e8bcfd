"""The interface of every backend to the tasks and the server: messages in, text out.

`submit` starts a request and returns at once; the stream it returns is read either as an ordinary
iterator or as an async one. Reading is optional: a stream that is closed, or dropped, aborts its request.
"""

import dataclasses
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, Self

from PIL.Image import Image

from snugvl.core.ledger import RunningPlan
from snugvl.core.sampling import SamplingParams
from snugvl.core.training import Training
from snugvl.errors import ImageError

_UNNAMED: Final = re.compile(r"^the (?:image|video)(?= (?!at ))")

GoOn = Callable[[], None]
"""Called between two parts of some work; it raises where the rest is no longer wanted."""

BESIDE_CONTENT: Final = (
    "image", "images", "image_url", "image_urls", "image_data", "video", "videos", "video_url",
)  # fmt: skip
"""Where pictures stand in other programs' messages: ignored, an answer would be given without them."""

Role = Literal["system", "user", "assistant", "tool"]


def going_on() -> None:
    """The default of `GoOn`: never raises, so the work goes on."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text in a message.

    Attributes:
        marks: control tokens of the model that a task of ours wrote into it, such as InternVL's `<ref>`.
            Any other control token in it is refused; what a user sends never has marks.
    """

    text: str
    marks: tuple[str, ...] = ()

    @property
    def unmarked(self) -> str:
        """The text without the marks: what must hold no control token."""
        text = self.text
        for mark in self.marks:
            text = text.replace(mark, " ")
        return text


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in pixels, in place of an image where only tokens are counted."""

    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), as `PIL.Image.Image.size` has it."""
        return self.width, self.height


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image in a message: decoded, upright, RGB (see `inputs.image.open_image`).

    Attributes:
        max_pixels: lowers the checkpoint's own limit for this image.
        file: hash of the file that it was decoded from; pictures of one file are the same picture.
        pixels: the image's bytes, row by row, where they are at hand: they are sent on without another copy.
        data: the file that it was decoded from, where it is at hand: a client sends it as it is.
        name: how errors call it; "" where only its place among others tells it.
        field: of the request that it came with, for errors; "" where it came with none.
    """

    image: Image
    max_pixels: int | None = None
    file: bytes | None = None
    pixels: memoryview | None = None
    data: bytes | None = dataclasses.field(default=None, repr=False)
    name: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames in a message, sampled already, with the time of each in seconds.

    Attributes:
        file: that they were decoded from, where it is at hand: a client sends it as it is.
        name: how errors call it; "" where only its place among others tells it.
        field: of the request that it came with, for errors; "" where it came with none.
    """

    frames: tuple[Image, ...]
    timestamps: tuple[float, ...]
    file: bytes | None = dataclasses.field(default=None, repr=False)
    name: str = ""
    field: str = ""


Part = Text | Picture | Video


@contextmanager
def named_in_errors(part: Picture | Video) -> Iterator[None]:
    """Errors about "the image" or "the video" within the block call it by its name, and have its field of the
    request, where it has them."""
    try:
        yield
    except ImageError as error:
        error.field = error.field or part.field or None
        if part.name:
            error.args = (_UNNAMED.sub(lambda _: part.name, str(error)),)
        raise


def with_names(messages: Sequence["Message"]) -> tuple["Message", ...]:
    """The messages; where there are several pictures and videos, nameless ones are named by their place."""
    count = sum(not isinstance(part, Text) for message in messages for part in message.content)
    places = itertools.count(1)
    return tuple(
        replace(message, content=tuple(_placed(part, places, count) for part in message.content))
        for message in messages
    )


def _placed(part: Part, places: Iterator[int], count: int) -> Part:
    if isinstance(part, Text):
        return part
    place, kind = next(places), "video" if isinstance(part, Video) else "image"
    return part if part.name or count == 1 else replace(part, name=f"{kind} {place} of {count}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        content: may be given as a string, or as a list of strings, images and parts.
        tool_calls: calls that the assistant made.
        tool_call_id: id of the call that a message of role "tool" answers.
        reasoning: the assistant's reasoning before the content; the chat template shows it or doesn't.
    """

    role: Role
    content: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def __post_init__(self) -> None:
        content: Any = self.content
        given = (content,) if isinstance(content, str) else content
        object.__setattr__(self, "content", tuple(_part(part) for part in given))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters`: JSON schema of its arguments; `strict`: whether a keyword
    of it that can't be enforced refuses the request; else it is left out."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    strict: bool = dataclasses.field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools a request offers, and how.

    Attributes:
        choice: "auto" (text, calls, or both), "required" (at least one call), or the name of a tool that
            must be called. A request without tools has no `ToolUse`.
        parallel: whether one answer may hold several calls.
        form: JSON schema, as text, of an answer that calls nothing; None: any text.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True
    form: str | None = None


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls of tools: see `inputs.tools`. `single`: whether its chat template shows one
    call a message at most; several couldn't be continued."""

    name: Literal["hermes", "llama", "mistral", "mistral-args", "qwen-xml"] = "hermes"
    single: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form that every token of the answer is constrained to.

    `source` is a JSON schema as text ("json_schema"; `{"type": "object"}` for any object), a regular
    expression, or a grammar in llguidance's dialect of Lark.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation, or a bare prompt, to continue.

    Attributes:
        messages: the conversation; empty when `prompt` is given.
        prompt: text or token ids to continue as they are, without chat template and without pictures.
        tools: makes the prompt show tools, and constrains calls to their schemas.
        grammar: constrains the whole answer; not together with `tools`, which have a form of their own.
        template: variables of the chat template, such as `enable_thinking`, by name.
        deadline_s: seconds from now after which it fails with `DeadlineExceeded`.
    """

    messages: tuple[Message, ...] = ()
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    deadline_s: float | None = None
    prompt: str | tuple[int, ...] | None = None
    tools: ToolUse | None = None
    grammar: Grammar | None = None
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def formed(self) -> bool:
        """Whether the answer's text follows a grammar or a schema, so no reasoning comes before it."""
        return self.grammar is not None or (self.tools is not None and self.tools.form is not None)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text, bytes and log-probability."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob(TokenLogprob):
    """A token, with the likeliest alternatives, best first. `logprob` is nan for a prompt's first token."""

    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; image tokens are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Usage of both together."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.image_tokens + other.image_tokens,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: new text; may be empty (a token that ends in the middle of a character, or the end).
        choice: index below `sampling.n`.
        logprobs: log-probabilities of the tokens of this text, when asked for.
        finish_reason: why the choice ended; on its last delta, else None.
        usage: tokens of the request; on its last delta, else None.
        stop: on the last delta of a choice: the stop string that ended it, or the text of the token among
            `sampling.stop_token_ids` that did.
        reasoning: new text of what the model thinks before its answer; none of `text`.
        completion_tokens: tokens generated so far, of all choices.
        prompt_logprobs: log-probabilities of every prompt token, on the first delta, where asked for.
        cached_tokens: tokens of the prompt that the prefix cache had; on the last delta of the request.
        drafts: numbers of drafts, (accepted, rejected); on the last delta of the request.
        reasoning_tokens: tokens of all choices that are `reasoning`; on the last delta of the request.
    """

    text: str
    choice: int = 0
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: Literal["stop", "length", "abort"] | None = None
    usage: Usage | None = None
    stop: str | None = None
    reasoning: str = ""
    completion_tokens: int = 0
    prompt_logprobs: tuple[Logprob, ...] = ()
    cached_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)
    reasoning_tokens: int = 0

    def __str__(self) -> str:
        return self.text


NO_MORE: Final = "the answer has ended, or its stream was closed"  # of `next` on a stream


class Closing:
    """Leaving its `with` closes it."""

    def close(self) -> None:
        """Stop, and give back what is held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClosing:
    """Leaving its `async with` closes it."""

    async def close(self) -> None:
        """Stop, and give back what is held. Safe to call twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Deltas(Protocol):
    """A stream of an answer's pieces; closing it stops the work."""

    def __iter__(self) -> Iterator[Delta]: ...

    def __next__(self) -> Delta: ...

    def close(self) -> None:
        """Abort what is not finished. Safe to call twice."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class Stream(Deltas, Protocol):
    """The answer as it is generated: an iterator, for a thread or for an event loop, that is read once.
    It raises the errors of the request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included; known before the first delta."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities and limits of a loaded model.

    Attributes:
        max_pixels: largest image before it is scaled down.
        engine: which backend runs it ("native", "transformers", "vllm", "llamacpp").
        device: where, as people know it ("NVIDIA GeForce RTX 5060", "CPU").
        dtype: type of activations and cache, such as "bfloat16".
        weights: format in memory, such as "int4 (embedding and lm_head in int8)".
        most_characters: most that the whole context can hold, white space included; 0: unknown.
        kv_cache: format of keys and values, such as "fp8"; empty where unknown.
        architecture: the network's name in the checkpoint; empty where unknown.
        parameters: number of weights; 0 where unknown.
        tools: whether the chat template shows tools; else the system message describes them.
        thinks: whether the chat template knows of reasoning before an answer.
        exact_forms: whether an answer can't break its JSON schema; else it is validated when it is complete.
        tool_form: how the model writes calls of tools.
        language_only: whether the model could see, and was loaded without its vision tower.
        most_images: most pictures and videos of a request (`--images`); None: no such limit was set.
        training: limits of what the checkpoint was trained on.
        plan: what the engine was started with, where it was planned.
        counts_by_size: whether the tokens of a picture follow from its size alone.
        ignores: fields of `SamplingParams` without effect here, each with the text of the answer's warning.
        vague_limits: whether a refusal as too long doesn't say if prompt or `max_tokens` is to blame.
        replaced: a sentence for each kernel that isn't used on this GPU, as a check found it wrong.
    """

    model: str
    context_tokens: int
    images: bool
    video: bool
    max_pixels: int
    min_pixels: int
    engine: str = "native"
    device: str = ""
    dtype: str = ""
    weights: str = ""
    architecture: str = ""
    parameters: int = 0
    tools: bool = True
    tool_form: ToolForm = ToolForm()
    thinks: bool = False
    language_only: bool = False
    kv_cache: str = ""
    most_characters: int = 0
    most_images: int | None = None
    exact_forms: bool = True
    training: Training = dataclasses.field(default_factory=Training)
    plan: RunningPlan | None = None
    counts_by_size: bool = True
    ignores: tuple[tuple[str, str], ...] = ()
    vague_limits: bool = False
    replaced: tuple[str, ...] = ()


class Backend(Protocol):
    """A loaded model behind one interface, safe to use from several threads."""

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, request: Request, go_on: GoOn = going_on) -> Stream:
        """Start a request. `go_on`: called while its prompt is prepared, which it may end by raising.

        Raises:
            RequestError: it is wrong, or too large for the context; nothing was started.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes that the model holds, by component."""

    def close(self) -> None:
        """Abort everything and free the model."""


def user(*parts: Part | str | Image) -> Message:
    """A user message from strings, images and parts."""
    return Message("user", tuple(_part(part) for part in parts))


def _part(value: Part | str | Image) -> Part:
    if isinstance(value, str):
        return Text(value)
    return value if isinstance(value, Text | Picture | Video) else Picture(value)


def characters(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> int:
    """Number of characters that a conversation and its tools bring to the prompt."""
    count = 0
    for message in messages:
        count += sum(len(part.text) for part in message.content if isinstance(part, Text))
        count += sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
        count += len(message.tool_call_id or "") + len(message.reasoning)
    return count + sum(len(tool.name) + len(tool.description) + _size(tool.parameters) for tool in tools)


def pieces(messages: Iterable[Message]) -> int:
    """Number of messages, their parts and their calls together."""
    return sum(1 + len(message.content) + len(message.tool_calls) for message in messages)


def _size(value: Any) -> int:
    """Number of characters of all strings in a JSON value."""
    count, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
    return count

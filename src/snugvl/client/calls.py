"""Every request a client makes, as data: no I/O but the reading of picture files."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from snugvl.client import answers
from snugvl.client.connection import DEFAULT_URL, address_of, reads_environment, sdk_options
from snugvl.client.pictures import is_shown_as_video, url_of
from snugvl.core.messages import Delta, Part, Picture, Text, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.inputs.given import ImageSource, VisualSource, as_list, numbered
from snugvl.inputs.talk import Spoken, Turn, Unseen, turns
from snugvl.tasks.detect import check_names
from snugvl.tasks.prompts import CAPTION, Detail
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene
from snugvl.tasks.surface import Asked, check_question

T = TypeVar("T")
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request with one answer: path and body. `read` makes the result of the answer's JSON."""

    path: str
    body: Body
    read: Callable[[Any], T]


StreamCall = Call[tuple[Delta, ...]]
"""One request whose answer is streamed. `read` makes deltas of an event's JSON."""


class Requester:
    """The server that requests go to, the model that they name, and how each task is one of them.

    Both clients say how a request is sent; of which types the results are, `Surface` says.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        given: Any = {"api_key": api_key, "model": model, "timeout": timeout, "max_retries": max_retries}
        self._given = partial(type(self), base_url, **given)
        self._address, self._model = address_of(base_url), model
        options = sdk_options(self._address, api_key, timeout, max_retries)
        self._connect(options, {"timeout": options["timeout"], "trust_env": reads_environment(self._address)})

    def __reduce__(self) -> tuple[Callable[[], "Requester"], tuple[()]]:
        """Pickled and copied as its arguments: connections stay in their process, and their client's."""
        return self._given, ()

    @abstractmethod
    def _connect(self, options: dict[str, Any], http: dict[str, Any]) -> None:
        """Make the SDK's client of `options`, on an HTTP client of `http`."""

    @abstractmethod
    def _send(self, make: Callable[[], Call[Any]]) -> Any:
        """The result of a request. `make` may read files."""

    @abstractmethod
    def _open(self, make: Callable[[], StreamCall]) -> Any:
        """The stream of a request."""

    def _caption(self, image: VisualSource, detail: Detail, asked: Asked) -> Any:
        return self._send(lambda: caption(image, detail, self._options(asked)))

    def _ask(self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked) -> Any:
        return self._send(lambda: ask(images, question, self._options(asked)))

    def _scene(self, image: VisualSource, asked: Asked) -> Any:
        return self._send(lambda: scene(image, self._options(asked)))

    def _detect(self, image: ImageSource, objects: str | Sequence[str], asked: Asked) -> Any:
        return self._send(lambda: detect(image, objects, self._options(asked)))

    def _chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> Any:
        return self._send(lambda: chat(messages, asked, self._model))

    def _stream_caption(self, image: VisualSource, detail: Detail, asked: Asked) -> Any:
        return self._open(lambda: streamed_task(caption(image, detail, self._options(asked))))

    def _stream_ask(self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked) -> Any:
        return self._open(lambda: streamed_task(ask(images, question, self._options(asked))))

    def _stream_chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> Any:
        return self._open(lambda: streamed_chat(chat(messages, asked, self._model)))

    def _options(self, asked: Asked) -> Body:
        """Fields that all tasks' requests have: model, sampling, pixels."""
        sampling = asked.sampling or SamplingParams()
        if sampling.n != 1:
            raise RequestError(f"a task gives one result: n must be 1, not {sampling.n}", field="n")
        named = {"model": self._model, "max_pixels": asked.max_pixels}
        return {key: value for key, value in named.items() if value is not None} | _chosen(sampling)

    def __repr__(self) -> str:
        model = f", {self._model}" if self._model else ""
        return f"<snugvl.{type(self).__name__} {self._address.root}{model}>"


def caption(image: VisualSource, detail: Detail, options: Body) -> Call[Caption]:
    """The request to `/v1/vision/caption`."""
    if detail not in CAPTION:
        raise RequestError(f"detail must be one of {', '.join(CAPTION)}, not {detail!r}", field="detail")
    body = _shown(image) | {"detail": detail} | options
    return Call("/v1/vision/caption", body, answers.result_reader(Caption))


def ask(images: VisualSource | Sequence[VisualSource], question: str, options: Body) -> Call[Answer]:
    """The request to `/v1/vision/ask`. Raises RequestError without an image or a question."""
    check_question(images, question)
    shown = as_list(images)
    urls = [url_of(image, what) for image, what in numbered(images)]
    if not urls:
        raise RequestError("a question needs at least one image; `chat` works without", field="images")
    if not question.strip():
        raise RequestError("the question is empty", field="question")
    body = {"images": urls, "question": question.strip()} | _video(shown) | options
    return Call("/v1/vision/ask", body, answers.result_reader(Answer))


def scene(image: VisualSource, options: Body) -> Call[Scene]:
    """The request to `/v1/vision/scene`."""
    body = _shown(image) | options
    return Call("/v1/vision/scene", body, answers.result_reader(Scene))


def detect(image: ImageSource, objects: str | Sequence[str], options: Body) -> Call[Detections]:
    """The request to `/v1/vision/detect`."""
    body = {"image": url_of(image), "objects": list(check_names(objects))} | options
    return Call("/v1/vision/detect", body, answers.result_reader(Detections))


def chat(messages: Spoken | Sequence[Spoken], asked: Asked, model: str | None) -> Call[Reply]:
    """The request to `/v1/chat/completions`."""
    chosen = asked.sampling or SamplingParams()  # words in its place are told first
    body = {"messages": [message_of(turn) for turn in turns(messages, asked.system)]}
    sampling = _chosen(chosen)
    if chosen.logprobs is not None:
        sampling |= {"logprobs": True, "top_logprobs": chosen.logprobs}
    named = {"model": model} if model is not None else {}
    return Call("/v1/chat/completions", body | named | sampling, answers.reply)


def streamed_task(call: Call[Caption] | Call[Answer]) -> StreamCall:
    """Call of a task, streamed."""
    return Call(call.path, call.body | {"stream": True}, answers.task_deltas)


def streamed_chat(call: Call[Reply]) -> StreamCall:
    """Call of a conversation, streamed."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return Call(call.path, call.body | options, answers.chat_deltas)


def _chosen(sampling: SamplingParams) -> Body:
    """Fields that differ from the defaults, and the temperature, whose default a server may set otherwise."""
    default = SamplingParams()
    body: Body = {"temperature": sampling.temperature}
    for item in fields(sampling):
        value = getattr(sampling, item.name)
        if value != getattr(default, item.name):
            body[item.name] = _plain(value)
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _shown(image: VisualSource) -> Body:
    return {"image": url_of(image)} | _video([image])


def _video(sources: Sequence[object]) -> Body:
    return {"video": True} if is_shown_as_video(sources) else {}


def message_of(message: Turn) -> Body:
    """The JSON of a turn for `/v1/chat/completions`, its pictures within it.

    Raises:
        ImageError: a picture can't be read.
    """
    body: Body = {"role": message.role}
    if message.role == "user":
        body["content"] = [_part(part) for part in message.parts]
    elif message.parts or message.role != "assistant":
        body["content"] = "".join(_text(part, message.role) for part in message.parts)
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    return body


def _text(part: Part | Unseen, role: Literal["system", "user", "assistant", "tool"]) -> str:
    if not isinstance(part, Text):
        raise RequestError(f"a {role} message holds text only; show pictures as the user", field="messages")
    return part.text


def _part(part: Part | Unseen) -> Body:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    shown: Any = part.source if isinstance(part, Unseen) else part
    what = part.what if isinstance(part, Unseen) else ""
    if isinstance(shown, Video) or (isinstance(part, Unseen) and part.video):
        return {"type": "video_url", "video_url": {"url": url_of(shown, what)}}
    if isinstance(shown, Picture):
        _check_size(shown)
    url = url_of(shown, what)
    detail = {"detail": part.detail} if isinstance(part, Unseen) and part.detail else {}
    kind = "video_url" if url.startswith("data:video/") else "image_url"
    return {"type": kind, kind: {"url": url, **(detail if kind == "image_url" else {})}}


def _check_size(picture: Picture) -> None:
    if picture.max_pixels is not None:
        raise RequestError(
            "a chat request can't carry max_pixels of a picture; scale it down before, or start the "
            "server with --max-pixels",
            field="max_pixels",
        )

"""Names that people of other libraries type, and what to type instead: of methods, results and arguments."""

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from snugvl.errors import WrongType

F = TypeVar("F", bound=Callable[..., Any])
_LOAD: Final = "snugvl.load(name) loads a model"
_MESSAGES: Final = "chat(messages) continues a conversation, ask(images, question) answers a question"
_OPENAI: Final = "chat(messages) takes OpenAI's messages; client.openai is the official SDK's client"
_DEVICE: Final = "snugvl.load(name, device='cuda') chooses the device"
_TEXT: Final = "the words are its text; print() shows them"
_SCORE: Final = "the model gives no scores"
_PIECES: Final = "stream_caption, stream_ask and stream_chat give pieces as they are generated"
_LONGEST: Final = "max_tokens is the longest answer"
_CHOICE: Final = "temperature=0, the default, is greedy; sampling=snugvl.SamplingParams(…) says the rest"
_DTYPE: Final = "dtype='bfloat16' chooses the type"
_WEIGHTS: Final = "weights='int4' (int5, int6, int8, fp8) chooses the format"
_ATTRIBUTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("generate", "generate_content"), _MESSAGES),
    **dict.fromkeys(("completions", "responses"), _OPENAI),
    **dict.fromkeys(("to", "cuda"), _DEVICE),
    **dict.fromkeys(
        ("from_pretrained", "load_model", "AutoModel", "AutoProcessor", "pipeline", "LLM"), _LOAD
    ),
    **dict.fromkeys(("content", "message", "choices", "output_text", "response", "answer", "outputs"), _TEXT),
    **dict.fromkeys(("score", "scores", "confidence", "conf", "probability"), _SCORE),
    "predict": "caption, ask, scene and detect are the tasks",
    "describe": "caption(image) describes an image",
    "query": "ask(images, question) answers a question",
    "half": "snugvl.load(name, dtype='float16') chooses the type",
    "eval": "a loaded model is ready; nothing is to be switched",
    "stream": _PIECES,
    "history": "messages has what was said so far",
    "xyxy": "tuple(box) is x1, y1, x2, y2",
    "xywh": "x1, y1, width and height are its numbers",
    "bbox": "box is where it is",
    "boxes": "objects has each with its label and box",
    "labels": "objects has each with its label and box",
    "detections": "objects has each with its label and box",
    "name": "label is what it is",
}
_ARGUMENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_completion_tokens", "max_output_tokens"), _LONGEST),
    **dict.fromkeys(("do_sample", "top_p", "top_k", "seed", "num_beams", "stop"), _CHOICE),
    **dict.fromkeys(("prompt", "text", "query"), "ask(images, question) asks, caption(image) takes no words"),
    **dict.fromkeys(("device_map", "gpu"), "device='cuda', or 'cpu', chooses the device"),
    **dict.fromkeys(("torch_dtype", "precision"), _DTYPE),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"), _WEIGHTS),
    **dict.fromkeys(("max_model_len", "n_ctx", "num_ctx"), "context=8192 is what one conversation may have"),
    **dict.fromkeys(("image_path", "img", "picture"), "the picture is the first argument, without a name"),
    "stream": _PIECES,
    "labels": "detect(image, ['cup', 'plate']) looks for objects",
    "history": "chat([…]) takes all messages, chat() begins a conversation that remembers",
    "attn_implementation": "every engine has its own; leave it out",
    "gpu_memory_utilization": "memory='7200MiB' is the most that is taken",
}


def unknown(kind: str, name: str) -> str:
    """Error for an attribute that isn't there: with what to type instead, where it is known."""
    return f"{kind!r} object has no attribute {name!r}{hint(name)}"


def hint(name: str) -> str:
    """End of an error about an attribute: what to type instead, where it is known; else nothing."""
    return f"; {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else ""


def arguments_hinted(function: F) -> F:
    """`function`, wrapped: an argument that another library would take is refused with what to type instead.

    Raises:
        WrongType: such an argument was given; a `TypeError`, as Python's own is.
    """
    known = inspect.signature(function).parameters

    def checked(values: Mapping[str, Any]) -> None:
        for name in values:
            if name not in known and name in _ARGUMENTS:
                raise WrongType(f"{function.__name__} takes no {name}; {_ARGUMENTS[name]}", field=name)

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        checked(values)
        return function(*args, **values)

    @functools.wraps(function)
    async def call_async(*args: Any, **values: Any) -> Any:
        checked(values)
        return await function(*args, **values)

    return cast("F", call_async if inspect.iscoroutinefunction(function) else call)


class HintedClass(ABCMeta):
    """Metaclass: an attribute that other libraries have (`Model.from_pretrained`) raises with a hint."""

    if not TYPE_CHECKING:  # or every attribute would be taken to exist

        def __getattr__(cls, name: str) -> NoReturn:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}{hint(name)}")


def hint_arguments(kind: type, names: frozenset[str]) -> None:
    """Let these methods of a class refuse other libraries' arguments with a hint."""
    for name in vars(kind).keys() & names:
        setattr(kind, name, arguments_hinted(vars(kind)[name]))

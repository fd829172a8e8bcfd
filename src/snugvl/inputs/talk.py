"""Turns of a conversation in the forms that people guess: words, pictures, replies, OpenAI's dicts.

    str, Path, image, array, dict of OpenAI's or transformers', Reply ─► Turn ─► Message   for a model here
                                                                              └► JSON      for a server

A string that names a picture is that picture, wherever a person's own words are expected: as text it would be
answered with confidence, and without the picture.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from PIL.Image import Image

from snugvl.core.messages import BESIDE_CONTENT, Message, Part, Picture, Role, Text, ToolCall, Video
from snugvl.errors import ImageError, RequestError, WrongType, warn
from snugvl.inputs.given import VisualSource, described, look
from snugvl.inputs.looks_like import PICTURES, VIDEOS

LOW_DETAIL_PIXELS: Final = 512 * 512  # of a picture whose `detail` is "low", as OpenAI's
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_REASONING: Final = ("reasoning_content", "reasoning")  # as vLLM and others write it, the first that is there
_TURN: Final = frozenset({"role", "content", "tool_calls", "tool_call_id", *_REASONING})
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
_URLS: Final = ("http://", "https://", "data:")
_LONGEST_NAME: Final = 4096


@runtime_checkable
class Said(Protocol):
    """Something that a model has said: a `Reply`, `Caption` or `Answer`."""

    @property
    def text(self) -> str: ...

    @property
    def truncated(self) -> bool: ...


Spoken = Message | Said | str | Mapping[str, Any]
"""One turn of a conversation: a message, words of the user, an answer of the model, or OpenAI's dict."""

Shown = Part | VisualSource
"""Content of a message: words, and pictures in every form that tasks take."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A picture or a video that is still to be read.

    Attributes:
        video: whether it was said to be one; else its content decides.
        detail: "low", "high" or "auto", as of OpenAI's `image_url`.
        what: how errors call it where it has no name of its own.
    """

    source: Any
    video: bool = False
    detail: str | None = None
    what: str = "the image"


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of which pictures may still have to be read."""

    role: Role
    parts: tuple[Part | Unseen, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def message(self, read: Callable[[Unseen], Picture | Video]) -> Message:
        """The turn as a message, with its pictures read.

        Raises:
            ImageError: a picture can't be read.
        """
        parts = tuple(read(part) if isinstance(part, Unseen) else part for part in self.parts)
        return Message(self.role, parts, self.tool_calls, self.tool_call_id, self.reasoning)


def user(*parts: Shown) -> Message:
    """A message of the user, of words and pictures, in the order in which the model sees them.

    Args:
        parts: strings, pictures in every form that tasks take, and `snugvl.Video`s. A string that names a
            picture is that picture; `snugvl.Text` makes words of it.

    Returns:
        What `chat` takes, alone or in a list with others.

    Raises:
        ImageError: a picture can't be read, or a string looks like the name of one that isn't there.
        WrongType: something that is neither words nor a picture.

    Example:
        model.chat(snugvl.user("before.png", "after.png", "What has changed?"))
    """
    return of_user(parts).message(seen)


def of_user(parts: Iterable[Any]) -> Turn:
    """The turn of a user who says and shows that.

    Raises:
        ImageError, WrongType: as `user`.
    """
    found = [_part(part, f"the image at parts[{place}]") for place, part in enumerate(parts)]
    if not found:
        raise RequestError("a message needs words or a picture", field="messages")
    if sum(not isinstance(part, Text) for part in found) == 1:
        found = [replace(part, what="the image") if isinstance(part, Unseen) else part for part in found]
    return Turn("user", tuple(found))


def seen(unseen: Unseen) -> Picture | Video:
    """A picture, or a video, read here.

    Raises:
        ImageError: it can't be.
    """
    from snugvl.inputs.given import video

    what = unseen.what.replace("the image", "the video") if unseen.video else unseen.what
    shown: Picture | Video
    if unseen.video:
        shown = unseen.source if isinstance(unseen.source, Video) else video(unseen.source, what)
    else:
        shown = look(unseen.source, what)
    if isinstance(shown, Picture) and unseen.detail == "low":
        shown = replace(shown, max_pixels=LOW_DETAIL_PIXELS)
    # A place within a message tells nothing in a conversation: see `with_names`.
    return replace(shown, name="") if shown.name == what else shown


def turns(said: Spoken | Sequence[Spoken], system: str | None = None) -> list[Turn]:
    """The turns of a conversation, one or several, after the system message.

    Raises:
        RequestError, ImageError, WrongType: one of them can't be understood; says which, and what can.
    """
    if isinstance(said, list | tuple):
        if not said:
            raise RequestError("the conversation is empty; say something", field="messages")
        found = [_turn(one, f"messages[{index}]") for index, one in enumerate(said)]
    else:
        found = [_turn(said, "the message")]
    return [*system_turn(system), *found]


def system_turn(system: str | None) -> tuple[Turn, ...]:
    """System prompt as a turn of its own; no turn where there is none.

    Raises:
        WrongType: it isn't words.
    """
    if system is None:
        return ()
    if not isinstance(system, str):
        raise WrongType(f"system takes words, not {described(system)}", field="system")
    return (Turn("system", (Text(system),)),)


def _turn(said: Any, what: str) -> Turn:
    if isinstance(said, Turn):
        return said
    if isinstance(said, Message):
        return Turn(said.role, said.content, said.tool_calls, said.tool_call_id, said.reasoning)
    if isinstance(said, str):
        return of_user([said])
    if isinstance(said, Mapping):
        return _of_dict(said, what)
    if isinstance(said, Said) and isinstance(said.text, str):
        return Turn("assistant", (Text(said.text),))
    raise WrongType(
        f"{what} is {described(said)}; give words, snugvl.user(picture, 'words'), a reply, or a dict with "
        "role and content",
        field="messages",
    )


def _part(value: Any, what: str) -> Part | Unseen:
    if isinstance(value, Text | Picture | Video | Unseen):
        return value
    if isinstance(value, str):
        return Unseen(value, what=what) if _names_a_picture(value) else Text(value)
    if isinstance(value, os.PathLike | bytes | bytearray | memoryview | Image) or (
        hasattr(value, "shape") or callable(getattr(value, "read", None))
    ):
        return Unseen(value, what=what)
    if isinstance(value, Message | Mapping | Said):
        raise WrongType(
            f"{described(value)} is a message of its own; give chat a list of messages", field="messages"
        )
    raise WrongType(
        f"a message holds words and pictures, not {described(value)}; pictures are paths, bytes, open files, "
        "Pillow images and arrays",
        field="messages",
    )


def _names_a_picture(text: str) -> bool:
    """Whether a string is the name of a picture, or of a video.

    Raises:
        ImageError: it looks like one, and there is no such file; or it names a file of another kind.
    """
    if len(text) > _LONGEST_NAME and not text.startswith("data:"):
        return False
    suffix = Path(text.partition("?")[0]).suffix.lower()
    picture = suffix in PICTURES or suffix in VIDEOS
    if text.startswith(_URLS):
        return text.startswith("data:image/") or (picture and not any(map(str.isspace, text)))
    try:
        there = bool(suffix or os.sep in text) and Path(text).is_file()
    except (OSError, ValueError):  # no file could have that name
        return False
    if there and not picture:
        raise ImageError(
            f"{text} is a file, and not named like a picture; for a picture give pathlib.Path({text!r}), "
            f"for these words snugvl.Text({text!r})"
        )
    if picture and not there and not any(map(str.isspace, text.strip())):
        raise ImageError(
            f"{text} doesn't exist; check the path, or for these words give snugvl.Text({text!r})"
        )
    return there


def _of_dict(said: Mapping[str, Any], what: str) -> Turn:
    role = _ROLES.get(said["role"]) if isinstance(said.get("role"), str) else None
    if role is None:
        raise RequestError(
            f"{what} has the role {said.get('role')!r}; roles are {', '.join(_ROLES)}", field=f"{what}.role"
        )
    for name in BESIDE_CONTENT:
        if said.get(name) not in (None, "", [], ()):
            raise RequestError(
                f"{what} has {name} beside its content; put it there: "
                "{'role': 'user', 'content': [{'type': 'image', 'image': …}, {'type': 'text', 'text': …}]}",
                field=f"{what}.{name}",
            )
    for name in said.keys() - _TURN - {*BESIDE_CONTENT}:
        if said[name] is not None:
            warn(f"ignored {name} of {what}")
    content = said.get("content")
    if content is None and role != "assistant":
        raise RequestError(
            f"{what} has no content; give a text, or a list of parts: "
            f"{{'role': {said['role']!r}, 'content': …}}",
            field=f"{what}.content",
        )
    if content is None or isinstance(content, str):
        parts: tuple[Part | Unseen, ...] = (Text(content),) if content else ()
    elif isinstance(content, list | tuple):
        parts = tuple(_part_of(part, f"{what}.content[{n}]") for n, part in enumerate(content))
    else:
        raise WrongType(
            f"{what}.content is {described(content)}; give a text, or a list of parts", field=what
        )
    calls = tuple(
        _call(call, f"{what}.tool_calls[{n}]") for n, call in enumerate(said.get("tool_calls") or ())
    )
    reasoning = next((text for key in _REASONING if isinstance(text := said.get(key), str)), "")
    return Turn(role, parts, calls, said.get("tool_call_id"), reasoning)


def _part_of(part: Any, what: str) -> Part | Unseen:
    """A part as OpenAI's chat completions and responses, or transformers' chat templates have it."""
    if not isinstance(part, Mapping):
        return _part(part, f"the image at {what}")
    kind = part.get("type")
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return Text(part["text"])
    if kind in ("image_url", "input_image", "video_url"):
        value = part.get("video_url" if kind == "video_url" else "image_url")
        value = value if isinstance(value, Mapping) else {"url": value, "detail": part.get("detail")}
        if value.get("url") is not None:
            return Unseen(value["url"], kind == "video_url", value.get("detail"), f"the image at {what}")
    if kind in ("image", "video"):
        found = [part[key] for key in (kind, "url", "path", "base64") if part.get(key) is not None]
        if len(found) == 1:
            base64 = part.get("base64") is not None
            source = f"data:;base64,{found[0]}" if base64 else found[0]
            return Unseen(source, kind == "video", what=f"the image at {what}")
    raise RequestError(
        f"{what} is not a known part: {described(dict(part))}; use {{'type': 'text', 'text': …}}, "
        "{'type': 'image_url', 'image_url': {'url': …}} or {'type': 'image', 'image': …}",
        field=what,
    )


def _call(call: Any, what: str) -> ToolCall:
    try:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCall(str(call.get("id", "")), str(function["name"]), text)
    except (KeyError, TypeError, AttributeError):
        raise RequestError(
            f"{what} is not a call: {described(call)}; use "
            "{'id': …, 'function': {'name': …, 'arguments': …}}",
            field=what,
        ) from None

"""Detect: objects and their boxes in pixels of the original image.

Qwen3-VL writes `{"bbox_2d": [x1, y1, x2, y2], "label": "..."}` with coordinates in thousandths of the
image, whatever size the model saw, so the original's pixels need no knowledge of the resizing. Models stray
from this; read as well are:

- the keys `bbox`, `box`, `bounding_box`, `coordinates`, in the same order; corners as x1, y1, x2, y2;
- `box_2d`: Gemini's and Gemma's key, which by their documentation is [y1, x1, y2, x2]. A Qwen model uses
  `bbox_2d`, so whoever writes `box_2d` is taken to mean its documented order;
- two corners as [[x1, y1], [x2, y2]], several boxes under one label, boxes keyed by label, bare boxes;
- fractions of 1 where all four are at most 1 and not all are whole.

Boxes are ordered and clamped to the image; one without area there is dropped, as is an exact repetition
(a model caught in a loop). Absolute pixels, which Qwen2.5-VL writes, look the same and are not guessed at.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from PIL.Image import Image

from snugvl.backends.protocol import Capabilities, Request
from snugvl.errors import OutputError, RequestError
from snugvl.sampling import SamplingParams
from snugvl.tasks import grammar, prompts
from snugvl.tasks.parse import answer_text, find_json
from snugvl.tasks.request import about
from snugvl.tasks.results import Box, Detection, Detections, Reply

MAX_TOKENS: Final = 2048
_X_FIRST: Final = ("bbox_2d", "bbox", "box", "bounding_box", "coordinates")
_Y_FIRST: Final = ("box_2d",)
_CORNERS: Final = (
    ("x1", "y1", "x2", "y2"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("left", "top", "right", "bottom"),
)
_LABELS: Final = ("label", "name", "category", "class", "object")
_WRAPPERS: Final = frozenset({"objects", "detections", "results", "boxes", "bboxes", "bbox_2ds", "items"})
_NOTHING: Final = re.compile(
    r"(none\W*$|nothing\W*$|there (is|are) no\b|no\b.{0,200}\b(found|visible|present|detected|located)\b)",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")

Four = tuple[float, float, float, float]


def request(
    image: Image,
    objects: Sequence[str],
    capabilities: Capabilities,
    *,
    sampling: SamplingParams | None = None,
    max_pixels: int | None = None,
) -> Request:
    """Ask where `objects` are, or where everything is when none are named.

    Raises:
        RequestError: a name the prompt can't carry.
    """
    return about(
        [image],
        prompts.detect(check_names(objects)),
        sampling=sampling,
        max_tokens=MAX_TOKENS,
        capabilities=capabilities,
        max_pixels=max_pixels,
        grammar=grammar.BOXES,
    )


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names of objects as the prompt can list them, without repetitions.

    Raises:
        RequestError: an empty name, or one with a comma, a quote or a line break.
    """
    if isinstance(names, str):
        raise RequestError(f"objects is a list of names: [{names!r}], not {names!r}", field="objects")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise RequestError(f"an object needs a name, not {name!r}", field="objects")
        if "," in name:
            raise RequestError(f"give each object its own name instead of {name!r}", field="objects")
        if '"' in name or not name.isprintable():
            raise RequestError(f"an object's name is plain text on one line, not {name!r}", field="objects")
    return tuple(dict.fromkeys(" ".join(name.split()) for name in names))


def result(reply: Reply, size: tuple[int, int], objects: Sequence[str] = ()) -> Detections:
    """The detections in `reply`, for an image of `size` (width, height) that was asked about `objects`.

    Raises:
        OutputError: the answer holds neither boxes nor the word that there is nothing; it holds the text.
    """
    answer = answer_text(reply.text)
    found = find_json(answer)
    boxes = [pair for each in found for pair in _labelled(each.value, None)]
    cut = reply.truncated or any(not each.complete for each in found)
    empty = (
        any(each.complete and _is_empty(each.value) for each in found) or _NOTHING.match(answer) is not None
    )
    if not boxes and not empty:
        why = "its answer was cut before the first one; allow more tokens" if cut else "not as JSON"
        raise OutputError(f"no boxes from the model: {why}", text=reply.text)
    names = {name.casefold(): name for name in check_names(objects)}
    detections = [
        Detection(label=_label(label, names), box=box)
        for label, four in boxes
        if (box := to_pixels(four, size)) is not None
    ]
    return Detections(
        width=size[0],
        height=size[1],
        objects=tuple(dict.fromkeys(detections)),
        truncated=cut,
        usage=reply.usage,
    )


def to_pixels(four: Four, size: tuple[int, int]) -> Box | None:
    """Thousandths (or fractions) of an image as a box in its pixels; None where nothing is left of it."""
    scale = 1.0 if max(four) <= 1 and any(value != int(value) for value in four) else 1000.0
    x1, x2 = sorted(_clamped(value / scale * size[0], size[0]) for value in (four[0], four[2]))
    y1, y2 = sorted(_clamped(value / scale * size[1], size[1]) for value in (four[1], four[3]))
    return Box(x1=x1, y1=y1, x2=x2, y2=y2) if x1 < x2 and y1 < y2 else None


def _clamped(value: float, limit: int) -> float:
    return round(min(max(value, 0.0), float(limit)), 2)


def _labelled(value: Any, label: str | None) -> Iterator[tuple[str | None, Four]]:
    """Every box below `value` with the nearest label above it."""
    if isinstance(value, list):
        if four := _four(value):
            yield label, four
            return
        for item in value:
            yield from _labelled(item, label)
    elif isinstance(value, dict):
        yield from _of_object(value, label)


def _of_object(fields: dict[str, Any], label: str | None) -> Iterator[tuple[str | None, Four]]:
    own = next((str(fields[key]) for key in _LABELS if isinstance(fields.get(key), str | int)), label)
    for corners in _CORNERS:
        if four := _four([fields.get(key) for key in corners]):
            yield own, four
            return
    for key, value in fields.items():
        if key in _X_FIRST:
            yield from ((own, four) for four in _fours(value))
        elif key in _Y_FIRST:
            yield from ((own, (x1, y1, x2, y2)) for y1, x1, y2, x2 in _fours(value))
        elif key not in _LABELS:
            yield from _labelled(value, own if own or key in _WRAPPERS else key)


def _fours(value: Any) -> Iterator[Four]:
    """One box or several, as numbers or as the text of them."""
    if isinstance(value, str):
        value = [float(number) for number in _NUMBER.findall(value[:200])]
    if isinstance(value, dict):
        yield from (four for _, four in _labelled(value, None))
    elif four := _four(value):
        yield four
    elif isinstance(value, list):
        yield from (four for item in value if (four := _four(item)))


def _four(value: Any) -> Four | None:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(corner, list) for corner in value):
        value = [*value[0], *value[1]]
    if not isinstance(value, list) or len(value) != 4:
        return None
    x1, y1, x2, y2 = map(_number, value)
    return None if x1 is None or y1 is None or x2 is None or y2 is None else (x1, y1, x2, y2)


def _number(value: Any) -> float | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
    return float(value) if usable else None


def _is_empty(value: Any) -> bool:
    """`[]`, `{}`, `{"objects": []}`: the JSON way to say that there is nothing."""
    if isinstance(value, dict):
        return all(isinstance(item, list | dict) and _is_empty(item) for item in value.values())
    return isinstance(value, list) and not value


def _label(label: str | None, names: dict[str, str]) -> str:
    """The model's word in the user's spelling; the only name asked for, or "object", without one."""
    words = " ".join((label or "").split())[:200]
    text = "".join(character for character in words if character.isprintable())
    if not text:
        return next(iter(names.values())) if len(names) == 1 else "object"
    return names.get(text.casefold(), text)

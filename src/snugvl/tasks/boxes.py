"""Reads boxes from a model's text, in the numbers that it wrote: JSON, InternVL's tags, PaliGemma's tokens.

The unit of the numbers is known to `conventions` alone. Every reader keeps the complete boxes of an answer
that breaks off, and says so.

JSON is read tolerantly, because models stray from their own form:

- the keys `bbox_2d`, `bbox`, `box`, `bounding_box`, `coordinates`, as x1, y1, x2, y2; corners by name;
- `box_2d`: Gemini's and Gemma's key, which by their documentation is [y1, x1, y2, x2]. A Qwen model uses
  `bbox_2d`, so `box_2d` is taken in its documented order;
- two corners as [[x1, y1], [x2, y2]], several boxes under one label, boxes keyed by label, bare boxes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from snugvl.tasks.parse import answer_text, find_json

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
_QUAD: Final = re.compile(r"\[\s*" + r"\s*,\s*".join([rf"({_NUMBER.pattern})"] * 4) + r"\s*\]")
_UNFINISHED: Final = re.compile(r"\[[^\[\]]*$")
_MARKS: Final = re.compile(r"</?(?:ref|box)>|[\[\],`]")
_LOCATIONS: Final = re.compile(r"((?:<loc\d{4}>){4})([^<;]*)(;|\Z)?")
_LOCATION: Final = re.compile(r"<loc(\d{4})>")

Four = tuple[float, float, float, float]
"""x1, y1, x2, y2 as the model counts them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Boxes with their labels, in the order of the answer. `cut`: whether the answer broke off; `nothing`:
    whether it says that there is no object."""

    boxes: tuple[tuple[str | None, Four], ...]
    cut: bool = False
    nothing: bool = False


def from_json(text: str) -> Reading:
    """Boxes in any JSON of `text`.

    Raises:
        OutputError: there is no answer.
    """
    answer = answer_text(text)
    found = find_json(answer)
    return Reading(
        boxes=tuple(pair for each in found for pair in _labelled(each.value, None)),
        cut=any(not each.complete for each in found),
        nothing=_says_nothing(answer) or any(each.complete and _is_empty(each.value) for each in found),
    )


def from_tags(text: str) -> Reading:
    """Boxes as `<ref>cup</ref><box>[[x1, y1, x2, y2], …]</box>`; JSON where the model writes that.

    The tags are special tokens of InternVL's tokenizer, so a backend may have left them out: `cup[[…]]`.

    Raises:
        OutputError: there is no answer.
    """
    answer = answer_text(text)
    if "{" in answer:
        return from_json(answer)
    boxes: list[tuple[str | None, Four]] = []
    label, position = None, 0
    for quad in _QUAD.finditer(answer):
        words = _MARKS.sub(" ", answer[position : quad.start()]).strip()
        label = words.splitlines()[-1].strip() if words else label
        x1, y1, x2, y2 = map(float, quad.groups())
        boxes.append((label, (x1, y1, x2, y2)))
        position = quad.end()
    cut = _UNFINISHED.search(answer, position) is not None
    return Reading(tuple(boxes), cut=cut, nothing=_says_nothing(answer) or "[]" in answer[position:])


def from_locations(text: str) -> Reading:
    """Boxes as `<loc0012><loc0034><loc0567><loc0890> cup ; …`: y1, x1, y2, x2. No text at all: nothing."""
    boxes: list[tuple[str | None, Four]] = []
    position = 0
    for found in _LOCATIONS.finditer(text):
        y1, x1, y2, x2 = (float(number) for number in _LOCATION.findall(found[1]))
        boxes.append((found[2].strip() or None, (x1, y1, x2, y2)))
        position = found.end()
    return Reading(tuple(boxes), cut="<loc" in text[position:], nothing=not text.strip())


def _says_nothing(answer: str) -> bool:
    return _NOTHING.match(answer) is not None


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
    """Whether JSON says that there is nothing: `[]`, `{}`, `{"objects": []}`."""
    if isinstance(value, dict):
        return all(isinstance(item, list | dict) and _is_empty(item) for item in value.values())
    return isinstance(value, list) and not value

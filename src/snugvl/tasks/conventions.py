"""Conventions: how models are asked about pictures, and how they write boxes. Each family's module names its
convention (`Prompting` in `checkpoint/families/`).

    convention    boxes                                        counted in                      first
    thousandths   {"bbox_2d": […], "label": "…"}               thousandths of the image        x
    pixels        {"bbox_2d": […], "label": "…"}               pixels of the resized image     x
    y first       {"box_2d": […], "label": "…"}                thousandths                     y
    tags          <ref>…</ref><box>[[…], …]</box>              thousandths                     x
    locations     <loc0000><loc0000><loc0000><loc0000> … ; …   1024ths                         y
    no boxes                                                   none are given

An architecture that no family names is taken for "thousandths", unless its answer uses `box_2d`: the
commonest form today, and an assumption.

Grammars of the answers of scene and detect: the JSON that a family is asked for, in a fence or not. Models
write JSON in one of a few styles, and keep to it: on one line, each value on a line, or each outermost one.
An answer may be in any of them, but in one only: its first white space decides the rest, which is then forced
and costs no step of the network (`engine/sampling/masks.py`).

    [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, …     [\n\t{"bbox_2d": [1, 2, 3, 4], "label": "cat"},\n\t…
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from snugvl.checkpoint.families import PROMPTING
from snugvl.checkpoint.families.traits import ConventionName, Resized
from snugvl.checkpoint.image_rules import smart_resize
from snugvl.core.messages import Capabilities, Grammar
from snugvl.errors import RequestError
from snugvl.tasks import boxes, prompts

# Keys of a box in an answer that wasn't asked for boxes, and the axis that comes first in each; `boxes` reads
# more, where they were asked for.
KEYS: Final[Mapping[str, Literal["x", "y"]]] = {"bbox_2d": "x", "bbox": "x", "box_2d": "y"}


@dataclass(frozen=True, slots=True)
class _JsonStyle:
    """A style of writing JSON.

    Attributes:
        lines: number of levels, from the outermost, whose values are on a line each.
        indent: indentation of such a line, for each level.
        space: white space after commas and colons on a line.
    """

    lines: int
    indent: str = ""
    space: str = " "

    def before(self, level: int) -> str:
        """White space before the first value of a level; with one level less, that before its end."""
        return "\n" + self.indent * level if level <= self.lines else ""

    def between(self, level: int) -> str:
        """Separator between two values of a level."""
        return "," + (self.before(level) or self.space)


_DEEP: Final = 9  # more levels than there are
# Two styles that begin alike would let white space without end come before a value.
_NO_MORE_SPACE: Final = {"x-guidance": {"whitespace_flexible": False}}
_STYLES: Final = (
    _JsonStyle(0),
    _JsonStyle(0, space=""),
    *(_JsonStyle(lines, indent) for lines in (1, _DEEP) for indent in ("\t", "  ", "    ")),
)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Mapping[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _fenced(schema: dict[str, Any]) -> Grammar:
    """JSON of `schema` in any of the styles, alone or in a ```json fence."""
    leaves: dict[str, str] = {}  # rules, by their bodies
    values = [_written(schema, style, 1, leaves) for style in _STYLES]
    rules = [f"start: value | {_literal('```json' + chr(10))} value {_literal(chr(10) + '```')}"]
    rules.append("value: " + " | ".join(f"style_{index}" for index in range(len(values))))
    rules += [f"style_{index}: {value}" for index, value in enumerate(values)]
    rules += [f"{name}: {body}" for body, name in leaves.items()]
    return Grammar("lark", "\n".join(rules))


def _written(schema: Mapping[str, Any], style: _JsonStyle, level: int, leaves: dict[str, str]) -> str:
    """A value whose parts are at `level`, as an expression of Lark."""
    first, between, last = style.before(level), style.between(level), style.before(level - 1)
    if level > style.lines:
        last = ""
    if schema["type"] == "object":
        expression: list[str] = []
        for name, value in schema["properties"].items():
            opening = between if expression else "{" + first
            expression.append(_literal(f"{opening}{json.dumps(name)}:{style.space}"))
            expression.append(_written(value, style, level + 1, leaves))
        return " ".join([*expression, _literal(last + "}")])
    if schema["type"] != "array":
        return leaves.setdefault(f"%json {json.dumps({**schema, **_NO_MORE_SPACE})}", f"leaf_{len(leaves)}")
    item = _written(schema["items"], style, level + 1, leaves)
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    assert fewest == (most or 0), "any number of items, or exactly so many"
    more = f"({_literal(between)} {item})" + (f"{{{most - 1}}}" if most else "*")
    filled = f"{_literal('[' + first)} {item} {more} {_literal(last + ']')}"
    ways = [filled] if fewest else [filled, _literal("[]")]
    if first and schema["items"]["type"] not in ("object", "array"):  # which many leave on one line
        ways.append(_written(schema, _JsonStyle(0), 1, leaves))
    return f"({' | '.join(ways)})"


def _literal(text: str) -> str:
    return json.dumps(text)


_TEXT: Final = {"type": "string"}
MAX_PIXEL: Final = 99_999  # along one side of an image
_COUNT: Final = {"type": "integer", "minimum": 1, "maximum": 9999}

SCENE: Final = _fenced(
    _object(
        summary=_TEXT,
        setting=_TEXT,
        objects=_list(_object(name=_TEXT, count=_COUNT, positions=_list(_TEXT))),
        text=_list(_TEXT),
        relations=_list(_TEXT),
    )
)


def _boxes(key: str, maximum: int) -> Grammar:
    number = {"type": "integer", "minimum": 0, "maximum": maximum}
    return _fenced(_list(_object(**{key: _list(number, minItems=4, maxItems=4)}, label=_TEXT)))


BOXES: Final = _boxes("bbox_2d", 1000)
PIXEL_BOXES: Final = _boxes("bbox_2d", MAX_PIXEL)
Y_FIRST_BOXES: Final = _boxes("box_2d", 1000)


@dataclass(frozen=True, slots=True)
class Grounding:
    """How to read the boxes that a loaded model writes into any answer, for programs that draw them.

    Attributes:
        keys: keys of JSON objects that hold a box, each with the axis that comes first.
        scale: the number for the far side of the picture, along both sides; None: pixels of `resized`.
        resized: without a scale, the picture's size as the model reads it, in whose pixels boxes are.
    """

    keys: Mapping[str, Literal["x", "y"]]
    scale: int | None
    resized: Resized | None = None


@dataclass(frozen=True, slots=True)
class Convention:
    """A convention: the words of prompts, and the form of boxes.

    Attributes:
        family: name, for people, of the family whose models are asked so.
        architectures: these models' architectures, as checkpoints name them.
        resized: limits of the picture as these models read it, where boxes are in its pixels.
        named: the prompt that asks for boxes of named objects; None: the family gives no boxes.
        everything: the prompt that asks for boxes of every object; None: it finds named ones only.
        marks: control tokens of the model in its prompts.
        reserved: characters that a name can't hold, because the prompt or the answer would be misread.
        grammar: the form of the answer; None where its marks are special tokens, which a grammar of text
            can't spell.
        read: function that finds the boxes in an answer.
        scale: the boxes' number for the far side, along each side; None: pixels of the resized picture.
        captions, question: prompts of other tasks that this family words otherwise.
        scenes: whether it follows the instruction to answer with a scene as JSON.
    """

    family: str = ""
    architectures: tuple[str, ...] = ()
    resized: Resized | None = None
    named: Callable[[Sequence[str]], str] | None = None
    everything: str | None = None
    marks: tuple[str, ...] = ()
    reserved: str = ""
    grammar: Grammar | None = None
    read: Callable[[str], boxes.Reading] = boxes.from_json
    scale: int | None = 1000
    captions: Mapping[prompts.Detail, str] = field(default_factory=lambda: prompts.CAPTION)
    question: str = "{}"
    scenes: bool = True

    def detection(self, names: Sequence[str], model: str) -> str:
        """The prompt that asks where the objects in `names` are, or where everything is.

        Raises:
            RequestError: the family gives no boxes, or needs names; or a name that it can't be given.
        """
        if self.named is None:
            raise RequestError(
                f"{model} is a {self.family} model, which does not give boxes; "
                f"models that do: {', '.join(grounding())}",
                field="model",
            )
        for name in names:
            if wrong := sorted(set(name) & set(self.reserved)):
                raise RequestError(
                    f"{self.family} can't be asked for {name!r}: {' and '.join(wrong)} separate its boxes",
                    field="objects",
                )
        if names:
            return self.named(names)
        if self.everything is None:
            raise RequestError(f"{self.family} finds only objects that are named; name some", field="objects")
        return self.everything

    def grid(
        self, size: tuple[int, int], capabilities: Capabilities, max_pixels: int | None
    ) -> tuple[float, float]:
        """(width, height) of an image in the boxes' units: the numbers at its right and lower edge.

        `size`: (width, height) of the image in pixels; `max_pixels`: the request's limit."""
        if self.scale is not None:
            return float(self.scale), float(self.scale)
        resized = self.read_as(capabilities)
        most = resized.max_pixels if max_pixels is None else min(resized.max_pixels, max_pixels)
        least = min(resized.min_pixels, most)
        width, height = size
        rows, columns = smart_resize(height, width, factor=resized.factor, min_pixels=least, max_pixels=most)
        return float(columns), float(rows)

    def read_as(self, capabilities: Capabilities) -> Resized:
        """Limits of a picture as a loaded model reads it; the family's where its engine tells none."""
        assert self.resized is not None, "a family that counts pixels says of which picture"
        return Resized(
            self.resized.factor,
            capabilities.min_pixels or self.resized.min_pixels,
            capabilities.max_pixels or self.resized.max_pixels,
        )


def convention_of(capabilities: Capabilities) -> Convention:
    """The convention of a loaded model."""
    return _BY_ARCHITECTURE.get(capabilities.architecture, UNKNOWN)


def tasks_of(capabilities: Capabilities) -> tuple[str, ...]:
    """Names of our tasks that a loaded model can do; empty for a model of text alone."""
    if not capabilities.images:
        return ()
    convention = convention_of(capabilities)
    can = {"ask": True, "caption": True, "scene": convention.scenes, "detect": convention.named is not None}
    return tuple(task for task, able in can.items() if able)


def grounding() -> tuple[str, ...]:
    """Names of the families that give boxes."""
    return tuple(convention.family for convention in CONVENTIONS if convention.named is not None)


def grounding_of(capabilities: Capabilities) -> Grounding | None:
    """How to read boxes in any answer of a loaded model; None where it gives none."""
    convention = convention_of(capabilities)
    if not capabilities.images or convention.named is None:
        return None
    resized = None if convention.scale else convention.read_as(capabilities)
    return Grounding(KEYS, convention.scale, resized)


def _tags(names: Sequence[str]) -> str:
    """InternVL's documented prompts: for one object, or for several, which is detection with tags."""
    refs = ", ".join(f"<ref>{name}</ref>" for name in names)
    if len(names) == 1:
        return f"Please provide the bounding box coordinate of the region this sentence describes: {refs}"
    return f"Please detect and label all of these in the following image and mark their positions: {refs}"


def _y_first(names: Sequence[str]) -> str:
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"detect {listed}, output only ```json"


def _pixels(names: Sequence[str]) -> str:
    return (
        f"Locate every instance of the following categories: {', '.join(names)}. "
        "Output their bbox_2d coordinates and labels using JSON format."
    )


_CONVENTIONS: Final[Mapping[ConventionName, Convention]] = {
    "thousandths": Convention(named=prompts.detect, everything=prompts.DETECT_ALL, grammar=BOXES),
    "pixels": Convention(
        named=_pixels,
        everything="Locate every object. Output their bbox_2d coordinates and labels using JSON format.",
        grammar=PIXEL_BOXES,
        scale=None,
    ),
    "y first": Convention(
        named=_y_first, everything="detect all objects, output only ```json", grammar=Y_FIRST_BOXES
    ),
    "tags": Convention(
        named=_tags,
        everything="Please detect and label all objects in the following image and mark their positions.",
        marks=("<ref>", "</ref>"),
        reserved="<>[]",
        read=boxes.from_tags,
    ),
    "locations": Convention(
        named=lambda names: f"detect {' ; '.join(names)}",
        reserved="<>;",
        read=boxes.from_locations,
        scale=1024,
        captions={"short": "caption en", "detailed": "describe en"},
        question="answer en {}",
        scenes=False,
    ),
    "no boxes": Convention(),
}
UNKNOWN: Final = replace(_CONVENTIONS["thousandths"], family="unknown")
CONVENTIONS: Final = tuple(
    replace(
        _CONVENTIONS[prompting.convention],
        family=prompting.family,
        architectures=tuple(name for name, its in PROMPTING.items() if its == prompting),
        resized=prompting.resized,
    )
    for prompting in dict.fromkeys(PROMPTING.values())
)
_BY_ARCHITECTURE: Final = {
    architecture: convention for convention in CONVENTIONS for architecture in convention.architectures
}

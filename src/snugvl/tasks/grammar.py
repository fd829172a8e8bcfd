"""Grammars of the answers of scene and detect: the JSON that a family is asked for, in a fence or not.

Models write JSON in one of a few styles, and keep to it: on one line, each value on a line, or each outermost
one. An answer may be in any of them, but in one only: its first white space decides the rest, which is then
forced and costs no step of the network (`engine/sampling/masks.py`).

    [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, …     [\n\t{"bbox_2d": [1, 2, 3, 4], "label": "cat"},\n\t…
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from snugvl.core.messages import Grammar


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

"""What answers of scene and detect look like: the JSON that a family is asked for, in a fence or not.

The white space is what models write on their own (a space, or a new line with its indentation), once between
two tokens, so that nobody can go on with it for ever.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from snugvl.core.messages import Grammar

_SPACE: Final = r"(\n[ \t]{0,16}| )?"


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
    """JSON of `schema`, alone or in a ```json fence."""
    value = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})
    opening, closing = json.dumps("```json\n"), json.dumps("\n```")
    return Grammar("lark", f"start: value | {opening} value {closing}\nvalue: %json {value}")


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

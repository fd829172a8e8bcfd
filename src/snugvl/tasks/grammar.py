"""What answers of scene and detect look like: the JSON that `prompts` ask for, in a fence or not.

The white space is what models write on their own (a space, or a new line with its indentation), once between
two tokens, so that nobody can go on with it for ever.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from snugvl.backends.protocol import Grammar

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
_THOUSANDTHS: Final = {"type": "integer", "minimum": 0, "maximum": 1000}
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
BOXES: Final = _fenced(_list(_object(bbox_2d=_list(_THOUSANDTHS, minItems=4, maxItems=4), label=_TEXT)))

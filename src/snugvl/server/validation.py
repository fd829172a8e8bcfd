"""From pydantic's errors to one sentence and the path of one field."""

from collections.abc import Iterator, Mapping, Sequence
from operator import eq, is_
from typing import Any

from fastapi.exceptions import RequestValidationError

from snugvl.errors import RequestError

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_type": "unsupported_value",
}
SHOWN = 80  # characters of a value in a message
MOST = 1000  # of what pydantic says, which may quote the request
LOOKED_AT = 50  # errors; lists stop at the first of theirs, so that there are hardly ever as many

Loc = tuple[str | int, ...]


class InvalidRequest(RequestError):
    """A request that doesn't have the form it should. `code`: OpenAI's word for how."""

    def __init__(self, message: str, *, field: str | None, code: str) -> None:
        super().__init__(message, field=field)
        self.code = code


def invalid_request(error: RequestValidationError) -> InvalidRequest:
    """The error that comes nearest to what was meant: of a union's, the one deepest in the body."""
    found = [(_path(entry, error.body), entry) for entry in error.errors()[:LOOKED_AT]]
    path, entry = max(found, key=lambda pair: len(pair[0]))
    field = _written(path) or None
    return InvalidRequest(_message(field, entry, error.body), field=field, code=_code(entry["type"]))


def _code(kind: str) -> str:
    if kind.endswith("_type"):
        return "invalid_type"
    return CODES.get(kind, "invalid_value")


def _message(param: str | None, entry: Mapping[str, Any], body: object) -> str:
    kind, value = entry["type"], entry.get("input")
    if param is None:
        if kind == "missing":
            return "the request has no body; send a JSON object"
        if isinstance(body, bytes):
            return "the body is not marked as JSON; send it with Content-Type: application/json"
        return f"the body is wrong: {entry['msg']}"
    if kind == "missing":
        return f"{param} is missing"
    if kind == "extra_forbidden":
        return f"{param} is not supported; leave it out"
    if kind == "union_tag_invalid":
        return _unknown_kind(param, entry["ctx"])
    if kind == "union_tag_not_found":
        return f"{param}: {entry['ctx']['discriminator']} is missing"
    text = str(entry["msg"]).removeprefix("Value error, ")
    if kind in ("model_attributes_type", "model_type"):
        text = "Input should be an object"
    text = text if len(text) <= MOST else f"{text[:MOST]}…"
    if isinstance(value, str) and len(value) > SHOWN:  # before a copy is made to be looked at
        return f"{param}: {text}"
    if isinstance(value, str | int | float | bool | None) and len(shown := repr(value)) <= SHOWN:
        return f"{param}: {text}, got {shown}"
    return f"{param}: {text}"


def _unknown_kind(param: str, told: Mapping[str, Any]) -> str:
    """An object whose `type` (or whatever tells its kinds apart) is none that we know."""
    name = str(told["discriminator"]).strip("'")
    named = name if name.isidentifier() else "type"  # a function tells them apart
    tag, known = str(told["tag"])[:SHOWN], str(told["expected_tags"])
    return f"{param}: {named} {tag!r} is not supported; use {known.replace(', ', ' or ')}"


def _path(entry: Mapping[str, Any], body: object) -> Loc:
    """Where the error is, without what pydantic adds to tell the members of a union apart."""
    place, *rest = entry["loc"]
    loc = tuple(rest)
    if place != "body":
        return loc
    if entry["type"] == "missing" and loc:
        return (*_reading(loc[:-1], body, entry.get("input")), loc[-1])
    return _reading(loc, body, entry.get("input"))


def _reading(loc: Loc, body: object, wanted: object) -> Loc:
    """The way to read `loc` that leads to the value `wanted`."""
    readings = list(_readings(loc, body))
    for same in (is_, eq):
        for path, value in readings:
            if same(value, wanted):
                return path
    # A value that a validator replaced is found nowhere: then the reading that keeps most is best.
    return max((path for path, _ in readings), key=len)


def _readings(loc: Loc, value: object) -> Iterator[tuple[Loc, object]]:
    """Every way to read `loc` in `value`, each part either a step down or a name of a union's member."""
    if not loc:
        yield (), value
        return
    part, rest = loc[0], loc[1:]
    if (isinstance(value, Mapping) and part in value) or (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and isinstance(part, int)
        and part < len(value)
    ):
        below = value[part]  # type: ignore[index]  # an int for a sequence, a key for a mapping
        for path, found in _readings(rest, below):
            yield (part, *path), found
    yield from _readings(rest, value)


def _written(path: Loc) -> str:
    """`messages[0].content`."""
    text = ""
    for part in path:
        text += (
            f"[{part}]" if isinstance(part, int) else f".{part if len(part) <= SHOWN else part[:SHOWN] + '…'}"
        )
    return text.lstrip(".")

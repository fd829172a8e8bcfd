"""JSON of strangers: what a parser would let through and trip somebody later is refused at the door."""

import json
from typing import Any

from snugvl.server.validation import InvalidRequest

MAX_DEPTH = 100  # of arrays and objects in each other; JSON schemas of real tools need about 20
MAX_VALUES = 300_000  # in all; a prompt of token ids that fills the longest context has 262,144


def parse_json(data: bytes) -> object:
    """The value of a body.

    Raises:
        InvalidRequest: not UTF-8, not JSON, NaN or infinity, a key twice, half a surrogate pair, nested too
            deep, or of too many values.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _wrong(f"the body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # an integer of more digits than Python converts
        raise _wrong("the body holds a number of more than 4,300 digits") from None
    _check(value)
    return value


def _refuse_constant(name: str) -> None:
    raise _wrong(f"the body holds {name}, which is not JSON; numbers must be finite")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _wrong(f"the body holds {digits[:40]}, which is too large; numbers must be finite")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _wrong(f"the key {key[:80]!r} is in one object of the body twice", field=key)
            seen.add(key)
    return values


def _check(value: object) -> None:
    """Depth, number and characters of everything in `value`; not recursive itself."""
    level: list[object] = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_characters(item)
        if not below:
            return
        count += len(below)
        if count > MAX_VALUES:
            raise _wrong(f"the body holds more than {MAX_VALUES:,} values")
        level = below
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep()


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong("a string of the body holds half a surrogate pair") from None


def _too_deep() -> InvalidRequest:
    return _wrong(f"the body is nested deeper than {MAX_DEPTH} levels")


def _wrong(message: str, *, field: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, field=field, code="invalid_json")

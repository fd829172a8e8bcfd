"""Sizes as people write them, and as we print them; in between whole bytes."""

import numbers
import re
from decimal import ROUND_FLOOR, Decimal
from typing import Any, Final

from snugvl.errors import InputError

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

MAX_BYTES: Final = 2**50  # a petabyte: what is larger is a typing mistake

# "8g" is read as docker, java and nvidia-smi's own "8151MiB" users mean it: binary. GB is decimal, by the SI.
_UNITS: Final = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{
        f"{letter}{suffix}": 1024**power
        for power, letter in enumerate("kmgt", 1)
        for suffix in ("", "i", "ib")
    },
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.ASCII)


def parse_size(text: str, what: str = "size") -> int:
    """Bytes of "951MiB", "7.2GiB", "8GB" (10^9) or "8g" (GiB); "0" needs no unit.

    Raises:
        InputError: names `what` and the text: no number, no or an unknown unit, negative, beyond a petabyte.
    """
    cleaned = text.strip().lower()
    how = "write it like 951MiB, 7.2GiB or 8GB"
    if cleaned.startswith(("-", "−")):
        raise InputError(f"{what} {text!r} is negative; {how}")
    match = _SIZE.fullmatch(cleaned)
    if match is None:
        raise InputError(f"{what} {text!r} is not a size; {how}")
    number, unit = Decimal(match["number"]), match["unit"]
    if not unit and number:
        raise InputError(f"{what} {text!r} has no unit; {how}")
    if unit and unit not in _UNITS:
        raise InputError(f"{what} {text!r} has an unknown unit {match['unit']!r}; {how}")
    size = number * _UNITS.get(unit, 1)
    if size > MAX_BYTES:
        raise InputError(f"{what} {text!r} is more than a petabyte; {how}")
    return int(size.to_integral_value(ROUND_FLOOR))


def exact_size(size_bytes: int) -> str:
    """`size_bytes` as `parse_size` reads it, to the byte: "20GiB", "7200MiB", "777777777B"."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
    return next(f"{size_bytes // unit}{name}" for name, unit in units if size_bytes % unit == 0)


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people: "951 MiB" below a GiB, else "7.20 GiB", "1.2 TiB" above 1024 GiB."""
    if size_bytes < 0:
        return f"-{format_size(-size_bytes)}"
    if size_bytes < MIB:
        return f"{round(size_bytes / KIB)} KiB" if size_bytes else "0 MiB"
    if round(size_bytes / MIB) < KIB:
        return f"{round(size_bytes / MIB)} MiB"
    if round(size_bytes / GIB, 1) < KIB:
        return f"{size_bytes / GIB:.2f} GiB" if size_bytes < 100 * GIB else f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / 2**40:.1f} TiB"


def megapixels(pixels: int) -> str:
    """Pixels for people, 10^6 of them: 2.8 megapixels."""
    return f"{pixels / 1e6:.1f} megapixels"


def plain_number(value: object) -> Any:
    """A number of another library (numpy's `int64`, `float32`) as Python's; anything else as it is."""
    if isinstance(value, int | float):
        return float(value) if type(value) is not float and isinstance(value, float) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value

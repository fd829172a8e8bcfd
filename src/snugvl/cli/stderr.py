"""What goes to standard error: single lines, free of control characters."""

import os
import re
import sys
import traceback

_PYDANTIC = (
    (re.compile(r"Value error, "), ""),
    (
        re.compile(r"Input should be a valid integer(, unable to parse string as an integer)?"),
        "it must be a whole number",
    ),
    (
        re.compile(r"Input should be a valid number(, unable to parse string as a number)?"),
        "it must be a number",
    ),
    (re.compile(r"Input should be greater than or equal to "), "it must be at least "),
    (re.compile(r"Input should be less than or equal to "), "it must be at most "),
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters but line breaks and tabs: it may come from a model or a file name."""
    return _CONTROL.sub("", text)


def line(message: str) -> str:
    """`message` as one line."""
    return f"snugvl: {printable(' '.join(message.split()))}"


def say(message: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(line(message) + "\n")
    sys.stderr.flush()


def plainly(message: str) -> str:
    """What pydantic says of a value, in words for people."""
    for said, plain in _PYDANTIC:
        message = said.sub(plain, message)
    return message.rstrip(".")


def trace(error: BaseException) -> None:
    """The traceback of `error`, for who set SNUGVL_DEBUG."""
    if os.environ.get("SNUGVL_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)

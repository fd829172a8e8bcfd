"""The output of commands: results to standard output, single lines to standard error, all printable; and
their end on SIGTERM.
"""

import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Final, TextIO

from snugvl.core.wrapping import Wrap, columns, wrapped
from snugvl.errors import SnugvlWarning

SOME_FAILED: Final = 7  # exit code: of several
INTERRUPTED: Final = 130
HANG: Final = 2  # of what a narrow terminal needs further lines for
_PLAIN = (
    (
        re.compile(r"^Got unexpected extra argument(?:\(s\)|s)? \((.*)\)$", re.DOTALL),
        r"too many arguments: \1",
    ),
    (
        re.compile(r"^Invalid value for '(--[\w-]+)': (\S+) is not in the range at least ([\d.]*\d)\.?"),
        r"\1 must be at least \3, not \2",
    ),
    (re.compile(r"^Invalid value: "), ""),
    (re.compile(r"^Invalid value for '(--[\w-]+)': \1 "), r"\1 "),
    (re.compile(r"^Invalid value for '--([\w-]+)': \1 "), r"--\1 "),
    (
        re.compile(r"('\d[\d.,_ ]*\s*([kKmM]i?|e\d+)?') is not a valid int(eger)?( range)?\b"),
        r"\1 is not a whole number in digits alone, such as 8192",
    ),
    (re.compile(r" is not a valid int(eger)?( range)?\b"), " is not a whole number"),
    (re.compile(r" is not a valid float( range)?\b"), " is not a number"),
    (re.compile(r" is not in the range ([\d.]+) to ([\d.]+)"), r" is not between \1 and \2"),
    (re.compile(r" is not in the range at least ([\d.]*\d)\.?"), r" is less than \1"),
)
_SENT = re.compile(r"^the (?:image|video)(?: at images\[(\d+)\])?(?= )")  # as a server calls what it was sent
_shown: ContextVar[Sequence[str]] = ContextVar("_shown", default=())  # names of files, in this thread
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters but line breaks and tabs: it may come from a model or a file name."""
    return _CONTROL.sub("", text)


def line(message: str) -> str:
    """`message` as one line."""
    return f"snugvl: {printable(' '.join(message.split()))}"


def say(message: str) -> None:
    """Write one line to standard error; on a terminal as many as its width asks for."""
    _put(sys.stderr, wrapped(line(message), columns(sys.stderr), HANG) + "\n")


def named(message: str, names: Sequence[str]) -> str:
    """A server's message about a picture or video, with the name of the file, which it doesn't know. `names`:
    names of the files that were sent, in their order."""
    sent = _SENT.match(message)
    at = int(sent[1] or 0) if sent else len(names)
    return f"{names[at]}{message[sent.end() :]}" if sent and at < len(names) else message


@contextmanager
def about(names: Sequence[str]) -> Iterator[None]:
    """Put the names of these files into warnings of this thread, inside the `with`."""
    before = _shown.set(names)
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def warnings_said() -> Iterator[None]:
    """Print snugvl's warnings within the block as lines, each once, and libraries' as Python does."""
    said: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        said_now = named(str(message), _shown.get())
        if not issubclass(category, SnugvlWarning):
            plain(message, category, filename, lineno, file, line)
        elif said_now not in said:
            said.add(said_now)
            say(said_now)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SnugvlWarning)
        plain, warnings.showwarning = warnings.showwarning, show
        yield


def plainly(message: str) -> str:
    """click's message about a value, in plain words."""
    for said, plain in _PLAIN:
        message = said.sub(plain, message)
    return message.rstrip(".")


def trace(error: BaseException) -> None:
    """Print the traceback of `error` where SNUGVL_DEBUG is set."""
    if os.environ.get("SNUGVL_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)


def several(count: int, what: str) -> str:
    """`1 image`, `1,200 boxes`."""
    if count != 1:
        what = (
            f"{what[:-2]}ices" if what.endswith("trix") else f"{what}es" if what.endswith("x") else f"{what}s"
        )
    return f"{count:,} {what}"


class ClosedPipe(Exception):
    """A standard stream is closed, as after `| head -1`. Not an OSError: Typer catches those."""


def write(text: str) -> None:
    """Write `text` and flush it, so that the reader has it at once."""
    try:
        _put(sys.stdout, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def _put(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go; without this Python complains about it on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise ClosedPipe from None


def write_json(value: object) -> None:
    """Write a document for programs."""
    write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def show(text: str, hang: int = 0) -> None:
    """Write lines for people: on a terminal no wider than it is, further lines of each indented by `hang`."""
    width = columns(sys.stdout)
    write("".join(f"{wrapped(line, width, hang)}\n" for line in text.split("\n")))


def flow() -> Wrap:
    """A `Wrap` for a text that goes to standard output in pieces."""
    return Wrap(columns(sys.stdout))


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM do what Ctrl+C does: started servers are stopped, and partial files removed.

    In the background of a script SIGINT is ignored, and an event loop would turn none into its end. There it
    is blocked instead, which looks the same from outside, until SIGTERM comes.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN and hasattr(signal, "pthread_sigmask")
    if ignored:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(number: int, frame: FrameType | None) -> None:
        if ignored:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # which forgets one that waits
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

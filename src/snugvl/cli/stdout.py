"""Writing results to standard output."""

import sys

from snugvl.core.wrapping import Wrap, columns, wrapped


class ClosedPipe(Exception):
    """Nobody reads standard output any more, as after `| head -1`. Not an OSError: Typer takes those."""


def write(text: str) -> None:
    """Write `text` at once, so that whoever reads has it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedPipe from None


def show(text: str, hang: int = 0) -> None:
    """Write lines for people: on a terminal no wider than it is, further lines of each indented by `hang`."""
    width = columns(sys.stdout)
    write("".join(f"{wrapped(line, width, hang)}\n" for line in text.split("\n")))


def flow() -> Wrap:
    """A `Wrap` for a text that goes to standard output in pieces."""
    return Wrap(columns(sys.stdout))

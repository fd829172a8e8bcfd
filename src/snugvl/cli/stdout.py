"""Writing results to standard output."""

import sys


class ClosedPipe(Exception):
    """Nobody reads standard output any more, as after `| head -1`. Not an OSError: Typer takes those."""


def write(text: str) -> None:
    """Write `text` at once, so that whoever reads has it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedPipe from None

"""Writing results to standard output."""

import sys
from typing import Final

NARROWEST: Final = 40  # columns; below, lines are left to the terminal


class ClosedPipe(Exception):
    """Nobody reads standard output any more, as after `| head -1`. Not an OSError: Typer takes those."""


def write(text: str) -> None:
    """Write `text` at once, so that whoever reads has it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedPipe from None


def columns() -> int | None:
    """How wide the terminal is; None where standard output is none."""
    import shutil

    return max(shutil.get_terminal_size().columns, NARROWEST) if sys.stdout.isatty() else None


def folded(line: str, hang: int = 0) -> str:
    """A line on as many as a narrow terminal needs, all but the first indented by `hang`; a pipe gets one."""
    import textwrap

    width = columns()
    if width is None or len(line) <= width:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def folded_command(command: str) -> str:
    """A command for a POSIX shell on several lines, each but the last ending in a backslash. A word that is
    wider than the terminal stays whole."""
    import shlex

    width = columns()
    if width is None or len(command) <= width:
        return command
    lines = [""]
    for word in shlex.split(command, posix=False):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        if len(longer) + 2 > width and lines[-1].strip():
            lines.append(f"  {word}")
        else:
            lines[-1] = longer
    return " \\\n".join(lines)

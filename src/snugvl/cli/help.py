"""How `--help` reads: whole summaries on any terminal, and numbers in words instead of click's notation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

NUMBERS = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "str": "TEXT"}


def meant(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `word` misspells or begins; None where none is near."""
    from difflib import get_close_matches

    begun = [name for name in known if len(word) > 2 and name.startswith(word)]
    near = begun[:1] or get_close_matches(word, known, n=1, cutoff=0.75)
    return near[0] if near else None


class _Read:
    """Summary of a command or a group, and its numbers in words."""

    help: str | None
    params: list[Any]

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, however long: it is wrapped where a cut one would end in dots."""
        first, stop, _ = " ".join((self.help or "").split("\n\n")[0].split()).partition(". ")
        return first + stop.strip()

    def _plainly(self) -> None:
        for parameter in self.params:
            kind = parameter.type
            if (
                parameter.metavar is None
                and kind.name in NUMBERS
                and not getattr(parameter, "is_flag", False)
            ):
                parameter.metavar = NUMBERS[kind.name]
            least, most = getattr(kind, "min", None), getattr(kind, "max", None)
            if least is not None:
                words = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
                kind._describe_range = lambda words=words: words


class Command(_Read, TyperCommand):
    """A command."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._plainly()


class CommandGroup(_Read, TyperGroup):
    """A group of commands."""

"""Kinds of memory, and how every command shows them: words, letters and colours of bars and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

BLOCK: Final = "█"  # of a bar in colour


class Kind(StrEnum):
    """A kind of memory. Its value is the text that people and rows of the ledger see.

    Attributes:
        letter: its letter in a bar without colours.
        colour: its colour on a terminal, a name of rich's.
        within: the group that a bar of few kinds counts it to; empty where it is a group itself.
        among: words for the whole group; empty where they are its own.
    """

    letter: str
    colour: str
    within: str
    among: str

    WEIGHTS = "weights", "W", "blue"
    TEXT = "text weights", "W", "blue", "weights"
    VISION = "vision weights", "V", "cyan", "weights"
    EMBEDDING = "embedding", "W", "blue", "weights"
    HOST = "weights in host memory", "W", "blue", "weights"
    CACHE = "KV cache", "K", "green", "", "KV cache, states and encodings"
    UNUSED = "KV cache not in use", "k", "dark_sea_green4", "KV cache"
    STATES = "recurrent state", "s", "dark_sea_green4", "KV cache"
    ENCODINGS = "encoder outputs", "e", "dark_orange", "KV cache"
    WORKSPACE = "workspace", "v", "yellow"
    CONTEXT = "CUDA context and libraries", "c", "bright_black", "", "CUDA context"
    OTHER = "other", "o", "magenta", "", "everything else"
    GRAPHS = "CUDA graphs", "g", "magenta", "other"
    KERNELS = "late kernels", "l", "bright_black", "other"
    PROCESS = "Python and libraries", "l", "bright_black", "other"
    INPUTS = "image inputs", "i", "orange3", "other"
    ROUNDING = "allocator rounding", "o", "magenta", "other"
    BUFFERS = "buffers", "o", "magenta", "other"  # made with the weights, when a model is loaded
    HELD = "other processes", "#", "grey50", "", "held by others"
    SPARE = "free", ".", "grey23", "", "spare"
    LIMIT = "not used, by --memory", "x", "grey30"
    MARGIN = "margin", "-", "red"

    def __new__(
        cls, words: str, letter: str = "", colour: str = "", within: str = "", among: str = ""
    ) -> Kind:
        """A member, from its row of the table."""
        made = str.__new__(cls, words)
        made._value_ = words
        made.letter, made.colour, made.within, made.among = letter, colour, within, among
        return made

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        """The kind for a text that only a newer server knows."""
        return cls.OTHER

    @property
    def group(self) -> Kind:
        """The kind under which a bar of few kinds counts it."""
        return Kind(self.within) if self.within else self

    @property
    def group_words(self) -> str:
        """Text of its group in the legend of a bar."""
        return self.group.among or self.group.value


def shares(sizes: Sequence[int], width: int) -> list[int]:
    """`width` cells shared among parts by size, rounded so that they sum up to `width`."""
    total = sum(sizes) or 1
    edges, passed = [0], 0
    for size in sizes:
        passed += size
        edges.append(round(passed * width / total))
    return [after - before for before, after in pairwise(edges)]


def bar(parts: Iterable[tuple[Kind, int]], width: int, *, colour: bool) -> list[tuple[str, str]]:
    """Pieces of a bar of `width` cells: the text of each part, and its colour on a terminal. `parts`: kind
    and bytes of each; together they are the whole bar."""
    kinds, sizes = zip(*parts, strict=True) if (parts := list(parts)) else ((), ())
    return [
        ((BLOCK if colour else kind.letter) * cells, kind.colour)
        for kind, cells in zip(kinds, shares(sizes, width), strict=True)
    ]


def marked(kind: Kind, text: str, style: str = "", *, colour: bool = True) -> Text:
    """A part's mark and name, as tables and legends on a terminal have them."""
    from rich.text import Text

    return Text.assemble(("■ " if colour else f"{kind.letter} ", kind.colour), (text, style))

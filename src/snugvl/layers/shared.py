"""Small tensors that all networks of a process read: made once a device, not once a network."""

from collections.abc import Callable
from functools import cache
from typing import Final, TypeVar

Make = TypeVar("Make", bound=Callable[..., object])
_clearing: Final[list[Callable[[], None]]] = []


def shared(make: Make) -> Make:
    """Keep what `make` returns, by its arguments, until `clear_shared`: CUDA graphs read it where it is."""
    kept = cache(make)
    _clearing.append(kept.cache_clear)
    return kept  # type: ignore[return-value]


def clear_shared() -> None:
    """Let go of all of them; each is made again when needed. No CUDA graph may be left that reads one."""
    for clear in _clearing:
        clear()

"""Compiled grammars that are too large to be kept: shared while they are in use, given back afterwards."""

import time
import weakref
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Final, Generic, TypeVar

from snugvl.core.heap import give_back_heap
from snugvl.errors import QueueFull

AT_ONCE_BYTES: Final = 192 << 20  # of all that are in use
GONE_S: Final = 0.1  # from the end of one's last request until its memory is free for sure

T = TypeVar("T")


class LargeGrammars(Generic[T]):
    """Large grammars in use, by what they were made of. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: weakref.WeakValueDictionary[tuple[str, str], T] = weakref.WeakValueDictionary()
        self._bytes = 0
        self._gone: deque[int] = deque()  # bytes; the garbage collector adds to it, in any thread, anywhere

    @property
    def bytes(self) -> int:
        """Memory of those in use."""
        with self._lock:
            while self._gone:
                self._bytes -= self._gone.popleft()
            return self._bytes

    def find(self, key: tuple[str, str]) -> T | None:
        """The grammar of this kind and source, if it is in use."""
        return self._found.get(key)

    def made(self, key: tuple[str, str], size: int, make: Callable[[], T]) -> T:
        """A new grammar of `size` bytes, which count until nobody has it any more.

        Raises:
            QueueFull: those in use leave no room for it.
        """
        used = self.bytes
        with self._lock:
            if used and self._bytes + size > AT_ONCE_BYTES:
                raise QueueFull(
                    f"grammars of running requests take {used >> 20} MiB, and this one {size >> 20}; "
                    f"at most {AT_ONCE_BYTES >> 20} MiB are taken at once; try again shortly"
                )
            self._bytes += size
        try:
            compiled = make()
        except BaseException:
            self._gone.append(size)
            raise
        weakref.finalize(compiled, _let_go, self._gone, size).atexit = False
        self._found[key] = compiled
        return compiled


def _let_go(gone: deque[int], size: int) -> None:
    gone.append(size)
    with suppress(RuntimeError):  # the interpreter ends
        # Not a `threading.Thread`, which takes locks that the garbage collector may have come between.
        start_new_thread(_give_back, ())


def _give_back() -> None:
    time.sleep(GONE_S)
    give_back_heap()

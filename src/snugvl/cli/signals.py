"""How a command that leaves something behind ends on SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM does what Ctrl+C does: servers that were started are stopped, and drafts of files removed.

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

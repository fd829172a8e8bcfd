"""A stream whose deltas go elsewhere as they are made, instead of waiting for a reader."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from snugvl.backends.protocol import Delta

if TYPE_CHECKING:
    from snugvl.backends.native import NativeStream


def forward(
    stream: "NativeStream", put: Callable[[Delta], None], end: Callable[[Exception | None], None]
) -> None:
    """Hand what `stream` holds and gets to `put`, and its end or error to `end`.

    Both are called in the engine's thread (or here, for what is there already), in order; they must not
    wait. Nobody else may read the stream.
    """
    mailbox = stream._mailbox

    def pump() -> None:  # under the mailbox's lock, whenever something changed
        while mailbox._items:
            put(mailbox._items.popleft())
        if mailbox._closed:
            mailbox.__dict__.pop("_wake")  # breaks the cycle, so that what ended is freed at once
            end(mailbox._error)

    with mailbox._changed:
        mailbox._wake = pump  # type: ignore[method-assign]
        pump()

"""Several things at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from snugvl.core.messages import Picture, Video
from snugvl.errors import RequestError

TURN: Final = 32  # messages that are worked at before other requests have their turn
MAX_MEDIA: Final = 256  # pictures and videos of one request, in every protocol

T = TypeVar("T")
M = TypeVar("M", bound=Picture | Video)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; the event loop's other work is done between every `TURN` of them.

    What is done for each message of a conversation stands in such a loop: there may be thousands of them.
    """
    for index, item in enumerate(items, 1):
        yield item
        if index % TURN == 0:
            await asyncio.sleep(0)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all coroutines, run at once, in order. The first error ends the others and is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(item) for item in work]
    except ExceptionGroup as errors:
        # The error's traceback knows this frame, which would keep the results of the others (pictures).
        tasks.clear()
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def fetch_all(
    wanted: Mapping[str, T],
    fetch: Callable[[T, str], Coroutine[Any, Any, M]],
    check: Callable[[Sequence[str]], None],
) -> dict[str, M]:
    """Fetch everything that parts of one request refer to, at once.

    Args:
        wanted: parts by their path in the request.
        fetch: fetches one part, given its path.
        check: refuses paths that are too many for the model.

    Raises:
        RequestError, ImageError: too many of them, or the first that could not be fetched.
    """
    if len(wanted) > MAX_MEDIA:
        raise RequestError(
            f"the request has {len(wanted):,} pictures and videos; at most {MAX_MEDIA} are taken at once",
            field=list(wanted)[MAX_MEDIA],
        )
    check(list(wanted))
    found = await together(fetch(part, path) for path, part in wanted.items())
    return dict(zip(wanted, found, strict=True))

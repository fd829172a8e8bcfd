"""Helpers to run coroutines at once, and long loops in turns with other work."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, Final, TypeVar

TURN: Final = 32  # messages that are worked at before other requests have their turn

T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; the event loop's other work is done between every `TURN` of them.

    Loops over messages of a conversation use it: there may be thousands of them.
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

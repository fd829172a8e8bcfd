"""Several things at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


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

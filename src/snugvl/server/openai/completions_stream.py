"""Completions in chunks: those of several prompts come as they are made, told apart by their index."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from snugvl.backends.protocol import Delta
from snugvl.server.generation import Generation
from snugvl.server.openai.common import DONE, finish_of, total, usage_at_end, usage_of
from snugvl.server.openai.completions_answer import Asked, Logprobs, head
from snugvl.server.streaming import Event, compact


async def chunks(generations: Sequence[Generation], asked: Asked, *, usage: bool) -> AsyncGenerator[Event]:
    """The events of a streamed completion. `usage`: one more chunk for it at the end."""
    first = head(asked.model)
    tail: dict[str, Any] = {"usage": None} if usage else {}
    logprobs = [Logprobs() for _ in range(len(generations) * asked.n)]
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        for prompt, text in enumerate(asked.echoed):
            for index in range(prompt * asked.n, (prompt + 1) * asked.n if text else 0):
                yield Event(compact({**first, "choices": [_choice(index, text)], **tail}))
        deltas = await stack.enter_async_context(aclosing(interleaved(generations)))
        async for prompt, delta in deltas:
            index = prompt * asked.n + delta.choice
            entry = _choice(index, delta.text, finish_of(delta))
            if delta.logprobs:
                entry["logprobs"] = logprobs[index].add(delta.logprobs)
            yield Event(compact({**first, "choices": [entry], **tail}))
    counted = usage_of(total(map(usage_at_end, generations)))
    if usage:
        yield Event(compact({**first, "choices": [], "usage": counted}))
    yield DONE


def _choice(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


async def interleaved(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of all generations as they come, each with the number of its generation.

    The first error ends the others and is raised.
    """
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(number: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await queue.put((number, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(*item)) for item in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""From a task's request to its answer: complete, or as events."""

import asyncio
import io
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar

from PIL.Image import Image
from pydantic import BaseModel

from snugvl.backends.protocol import Request
from snugvl.errors import EngineError, OutputError, RequestError
from snugvl.server.context import Context
from snugvl.server.generation import Generation, complete
from snugvl.server.streaming import Event, compact
from snugvl.server.vision.schemas import TaskOptions
from snugvl.tasks import draw
from snugvl.tasks.results import Detections, Reply

SHOWN: Final = 2000  # characters of the model's text in an error

ResultT = TypeVar("ResultT", bound=BaseModel)


async def answer(
    context: Context, request: Request, options: TaskOptions, finish: Callable[[Reply], ResultT]
) -> ResultT:
    """The response to a task, complete.

    Raises:
        OutputError: the model's answer isn't what the task asked for; the message shows it.
        RequestError: it isn't because `max_tokens` cut it.
    """
    (choice,), usage = await complete(context, request)
    reply = Reply(text=choice.text, finish_reason=choice.finish_reason, usage=usage)
    return _finished(reply, options, finish)


async def events(
    generation: Generation, options: TaskOptions, finish: Callable[[Reply], BaseModel]
) -> AsyncGenerator[Event]:
    """The pieces of a task's answer as they come, then its result."""
    text, finish_reason = "", "abort"
    async with generation:
        async for delta in generation:
            text += delta.text
            finish_reason = delta.finish_reason or finish_reason
            if delta.text:
                yield Event(compact({"delta": delta.text}))
    if finish_reason == "abort":
        raise EngineError("the request was aborted before its answer was complete")
    reply = Reply(text=text, finish_reason=finish_reason, usage=generation.usage)
    response = _finished(reply, options, finish)
    yield Event(compact({"result": response.model_dump(mode="json")}))


async def drawn(image: Image, detections: Detections) -> bytes:
    """A PNG of `image` with boxes and labels on it."""
    return await asyncio.to_thread(_png, image, detections)


def _png(image: Image, detections: Detections) -> bytes:
    file = io.BytesIO()
    draw.annotate(image, detections).save(file, "PNG")
    return file.getvalue()


def _finished(reply: Reply, options: TaskOptions, finish: Callable[[Reply], ResultT]) -> ResultT:
    try:
        return finish(reply)
    except OutputError as error:
        if reply.truncated and options.max_tokens is not None:
            raise RequestError(
                f"max_tokens {options.max_tokens} cut the answer before there was a result in it; "
                "allow more, or leave it out",
                field="max_tokens",
            ) from None
        said = reply.text if len(reply.text) <= SHOWN else f"{reply.text[:SHOWN]}…"
        raise OutputError(f"{error}; the model said: {said!r}", text=reply.text) from None

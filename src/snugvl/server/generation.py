"""One generation from start to end, the same for every protocol: started, read, measured, given up."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from snugvl.backends.protocol import Delta, Logprob, Request, Stream, Usage
from snugvl.errors import EngineError
from snugvl.server.context import Context


class Generation:
    """The answer to one request, read once: `async with await generate(...) as g: async for delta in g`.

    Leaving the `async with` early aborts the request and frees its KV cache.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.usage: Usage | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._stream:
            self.usage = delta.usage or self.usage
            yield delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


class Finished:
    """One choice that is complete."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = "abort"
        self.logprobs: list[Logprob] = []


async def generate(context: Context, request: Request) -> Generation:
    """Start a request.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    return Generation(await context.service.submit(request))


async def complete(context: Context, request: Request) -> tuple[list[Finished], Usage]:
    """Every choice of a request, complete, and its tokens."""
    choices = [Finished() for _ in range(request.sampling.n)]
    async with await generate(context, request) as generation:
        async for delta in generation:
            choice = choices[delta.choice]
            choice.text += delta.text
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
    if generation.usage is None or any(choice.finish_reason == "abort" for choice in choices):
        raise EngineError("the request was aborted before its answer was complete")
    return choices, generation.usage

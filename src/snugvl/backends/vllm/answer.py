"""One request under way: opened, read as it streams, ended by its end, an error, its deadline or its reader.

It is read as fast as vLLM sends it; what its reader hasn't taken yet is merged (`remote.Inbox`). Closing the
stream closes the connection, on which vLLM aborts the request.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx

from snugvl.backends.remote import Inbox, RemoteStream
from snugvl.backends.vllm.api import VllmApi, error_of
from snugvl.backends.vllm.chunks import Chunks, Reasoning
from snugvl.backends.vllm.watch import Watchdog
from snugvl.errors import DeadlineExceeded, EngineError, RequestError, SnugvlError
from snugvl.sampling import SamplingParams

DYING_S = 20.0  # until it is known why vLLM died; whoever watches it ends the answer with that


class Answer:
    """The answer to one request. `dog` is told of every piece that comes, and asked when none does.

    `reasoning`: see `Chunks`.
    """

    def __init__(
        self, api: VllmApi, sampling: SamplingParams, dog: Watchdog, reasoning: Reasoning | None = None
    ) -> None:
        self._api = api
        self._chunks = Chunks(sampling, reasoning)
        self._dog = dog
        self._inbox = Inbox()
        self._began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    async def open(
        self, path: str, body: bytes, deadline_s: float | None, done: Callable[[], None]
    ) -> RemoteStream:
        """POST the request; the stream, once its first piece is there.

        Raises:
            RequestError, EngineError: what vLLM refuses or fails with.
        """
        self._task = asyncio.create_task(self._read(path, body))
        self._task.add_done_callback(lambda _: done())
        if deadline_s is not None:
            error = DeadlineExceeded(
                f"the deadline of {deadline_s:g} s passed before the answer was complete"
            )
            self._deadline = asyncio.get_running_loop().call_later(deadline_s, self.end, error)
        try:
            return RemoteStream(self._inbox, await asyncio.shield(self._began), self.end)
        except BaseException:
            self.end()
            raise

    @property
    def began(self) -> bool:
        """Whether a piece of it came."""
        return self._began.done()

    def end(self, error: SnugvlError | None = None) -> None:
        """End it now, with an error or without."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._fail(error)
        if self._task is not None:
            self._task.cancel()

    def _fail(self, error: SnugvlError | None) -> None:
        self._inbox.end(error)
        if not self._began.done():
            if error is None:
                self._began.cancel()
            else:
                self._began.set_exception(error)

    async def _read(self, path: str, body: bytes) -> None:
        try:
            async with AsyncExitStack() as until:
                response = await self._api.open(path, body, until)
                await self._stream(response)
        except RequestError as error:
            self._fail(error)
        except SnugvlError as error:
            await self._dying()
            self._fail(error)
        except httpx.HTTPError as error:
            await self._dying()
            self._fail(EngineError(f"the connection to vLLM broke ({type(error).__name__})"))
        except Exception as error:  # a bug of ours: no reader may wait for ever
            self._fail(EngineError(f"the answer could not be read: {type(error).__name__}: {error}"))
            raise
        finally:
            if self._deadline is not None:
                self._deadline.cancel()

    async def _dying(self) -> None:
        """Return at once if vLLM is well; otherwise this answer is about to be ended with the reason."""
        if not await self._dog.doubted():
            await asyncio.sleep(DYING_S)

    async def _stream(self, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            self._dog.alive()
            data = line[5:].strip()
            if data == "[DONE]":
                break
            await self._take(_chunk(data))
        if not self._chunks.complete:
            raise httpx.RemoteProtocolError("the answer ended early")
        for delta in self._chunks.end():
            self._inbox.put(delta)
        self._fail(None)

    async def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise error_of(chunk, 500)
        deltas = self._chunks.read(chunk)
        if self._chunks.stop_token is not None:
            answer = await self._api.call("/detokenize", {"tokens": [self._chunks.stop_token]})
            self._chunks.named(str(answer.get("prompt", "")))
        if not self._began.done():
            self._began.set_result(self._chunks.prompt_tokens)
        for delta in deltas:
            self._inbox.put(delta)


def _chunk(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"vLLM sent a chunk that is no JSON object: {data[:80]!r}")
    return value

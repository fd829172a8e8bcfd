"""`snugvl.AsyncClient`: the same in an event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, overload

import httpx
import openai

from snugvl.client import answers, calls, failures
from snugvl.client.answers import Memory, understood
from snugvl.client.connection import DEFAULT_URL, Address, address_of, answered, sdk_options
from snugvl.core.guesses import hint_arguments, unknown
from snugvl.core.messages import Delta
from snugvl.core.sampling import SamplingParams
from snugvl.core.service import Health
from snugvl.inputs.given import ImageSource, VisualSource
from snugvl.inputs.talk import Spoken
from snugvl.tasks.conversation import AsyncConversation
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene
from snugvl.tasks.surface import TASKS, Tasks, documented_as

T = TypeVar("T")


class AsyncClient(calls.Requester):
    """`snugvl.Client` for an event loop: the same methods as coroutines, the same arguments and exceptions.

        async with snugvl.AsyncClient() as client:
            captions = await asyncio.gather(*(client.caption(picture) for picture in pictures))

    Cancelling a call, or leaving a stream's `async with`, stops the server's work.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        super().__init__(address_of(base_url), model)
        options = sdk_options(self._address, api_key, timeout, max_retries)
        http_client = openai.DefaultAsyncHttpxClient(
            timeout=options["timeout"],
            trust_env=not self._address.local,
            event_hooks={"response": [_answered]},
        )
        self.openai = openai.AsyncOpenAI(**options, http_client=http_client)

    @documented_as(Tasks.caption)
    async def caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Caption:
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        return await self._send(await asyncio.to_thread(calls.caption, image, detail, options))

    @documented_as(Tasks.ask)
    async def ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Answer:
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        return await self._send(await asyncio.to_thread(calls.ask, images, question, options))

    @documented_as(Tasks.scene)
    async def scene(
        self,
        image: VisualSource,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Scene:
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        return await self._send(await asyncio.to_thread(calls.scene, image, options))

    @documented_as(Tasks.detect)
    async def detect(
        self,
        image: ImageSource,
        objects: str | Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Detections:
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        return await self._send(await asyncio.to_thread(calls.detect, image, objects, options))

    @overload
    def chat(self, messages: None = None, *, system: str | None = None) -> AsyncConversation[calls.Body]: ...

    @overload
    def chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> Awaitable[Reply]: ...

    @documented_as(Tasks.chat)
    def chat(
        self,
        messages: Spoken | Sequence[Spoken] | None = None,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> Awaitable[Reply] | AsyncConversation[calls.Body]:
        if messages is None:
            return AsyncConversation(calls.message_of, self.stream_chat, system, str(self))
        options = self._options(sampling, max_tokens, temperature, system=system)
        return self._chat(messages, options)

    async def _chat(self, messages: Spoken | Sequence[Spoken], options: calls.Options) -> Reply:
        return await self._send(await asyncio.to_thread(calls.chat, messages, options))

    @documented_as(Tasks.stream_caption)
    async def stream_caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> "AsyncClientStream":
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        call = await asyncio.to_thread(calls.caption, image, detail, options)
        return await self._open(calls.streamed_task(call))

    @documented_as(Tasks.stream_ask)
    async def stream_ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> "AsyncClientStream":
        options = self._options(sampling, max_tokens, temperature, max_pixels)
        call = await asyncio.to_thread(calls.ask, images, question, options)
        return await self._open(calls.streamed_task(call))

    @documented_as(Tasks.stream_chat)
    async def stream_chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> "AsyncClientStream":
        options = self._options(sampling, max_tokens, temperature, system=system)
        call = await asyncio.to_thread(calls.chat, messages, options)
        return await self._open(calls.streamed_chat(call))

    async def models(self) -> tuple[str, ...]:
        """Names that requests may use for the model."""
        return understood(answers.model_names, await self.get("/v1/models"))

    async def health(self) -> Health:
        """Where the engine stands, ready or not; one try."""
        with failures.told(self._address):
            try:
                value = await self._once().get(self._address.url("/health"), cast_to=object)
            except openai.APIStatusError as error:
                value = failures.body_of_503(error)
        return understood(answers.health, value)

    async def memory(self) -> Memory:
        """The ledger, planned and measured, and what the engine is doing; one try."""
        with failures.told(self._address):
            value = await self._once().get(self._address.url("/memory"), cast_to=object)
        return understood(answers.memory, value)

    async def get(self, path: str) -> Any:
        """The answer to a GET of one of the server's paths: JSON as Python values, else text."""
        with failures.told(self._address):
            return await self.openai.get(self._address.url(path), cast_to=object)

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        await self.openai.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    if not TYPE_CHECKING:  # or every attribute would be taken to exist

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(unknown(type(self).__name__, name))

    def _once(self) -> openai.AsyncOpenAI:
        return self.openai.with_options(max_retries=0)

    async def _send(self, call: calls.Call[T]) -> T:
        with failures.sending(self._address, call.body):
            value = await self.openai.post(self._address.url(call.path), cast_to=object, body=call.body)
        return understood(call.read, value)

    async def _open(self, call: calls.StreamCall) -> "AsyncClientStream":
        with failures.sending(self._address, call.body):
            events = await self.openai.post(
                self._address.url(call.path),
                cast_to=object,
                body=call.body,
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        return AsyncClientStream(self._address, call, events)


hint_arguments(AsyncClient, TASKS)


class AsyncClientStream:
    """An answer as it comes: iterate it with `async for`, or close it to stop the server's work."""

    def __init__(self, address: Address, call: calls.StreamCall, events: openai.AsyncStream[object]) -> None:
        self._address, self._call, self._events = address, call, events

    async def __aiter__(self) -> AsyncIterator[Delta]:
        finished = False
        with failures.told(self._address, self._call.body):
            async for event in self._events:
                for delta in understood(self._call.read, event):
                    finished = finished or delta.finish_reason is not None
                    yield delta
        if not finished:
            raise failures.broke_off(self._address)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        await self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _answered(response: httpx.Response) -> None:
    answered(response)

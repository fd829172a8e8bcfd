"""`snugvl.Client` and `snugvl.AsyncClient`: a server behind the methods of a loaded model."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import httpx2
import openai

from snugvl.client import answers, calls, connection
from snugvl.client.answers import Memory, understood
from snugvl.client.connection import Address, Sockets, answered
from snugvl.core.messages import NO_MORE, AsyncClosing, Closing, Delta
from snugvl.core.service import Health
from snugvl.tasks.conversation import AsyncConversation, Conversation
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene
from snugvl.tasks.surface import Surface, Tasks

AHEAD: Final = 64  # pieces of an answer that are read before they are asked for
T = TypeVar("T")
Coming = Coroutine[Any, Any, T]


class Client(calls.Requester, Tasks, Closing):
    """A client of a snugvl server, or of several behind one address.

    Every method does what that of `snugvl.Model` does, with the same results and the same exceptions, and is
    safe to call from several threads. Pickled or copied, it is another client of the same server, such as for
    another process. Images may also be URLs (http, https, data), which the server fetches.
    What the server warns of is a `SnugvlWarning`.

        with snugvl.Client() as client:
            print(client.caption("picture.png"))

    Args:
        base_url: the server, with or without /v1.
        api_key: sent as a bearer token.
        model: a name that the server serves; by default its first.
        timeout: seconds that an answer may take; of a stream, the wait for its next piece.
        max_retries: how often a request is sent again when the server is busy or starting (it says when
            to come back), can't be reached, or didn't answer within `timeout`.

    Attributes:
        openai: the SDK's own client, for everything else that the server speaks.

    Raises:
        EngineUnavailable: there is no such server, or it isn't ready.
        SnugvlError: what the server refused, as the exception that a loaded model raises.
    """

    def _connect(self, options: dict[str, Any], http: dict[str, Any]) -> None:
        self._sockets = Sockets()
        hooks: Any = {"request": [self._sockets.watch], "response": [answered]}
        http_client = openai.DefaultHttpxClient(**http, event_hooks=hooks)
        self.openai = openai.OpenAI(**options, http_client=http_client)

    def _conversation(self, system: str | None) -> Conversation[calls.Body]:
        return Conversation(calls.message_of, self.stream_chat, system, str(self))

    def models(self) -> tuple[str, ...]:
        """Names that requests may use for the model."""
        return understood(answers.model_names, self.get("/v1/models"))

    def health(self) -> Health:
        """The state of the server's engine, ready or not; asked for once."""
        with connection.translating(self._address):
            try:
                value = self._once().get(self._address.url("/health"), cast_to=object)
            except openai.APIStatusError as error:
                value = connection.body_of_503(error)
        return understood(answers.health, value)

    def memory(self) -> Memory:
        """The ledger, planned and measured, and what the engine is doing; one try."""
        with connection.translating(self._address):
            value = self._once().get(self._address.url("/memory"), cast_to=object)
        return understood(answers.memory, value)

    def get(self, path: str) -> Any:
        """The answer to a GET of one of the server's paths: JSON as Python values, else text."""
        with connection.translating(self._address):
            return self.openai.get(self._address.url(path), cast_to=object)

    def close(self) -> None:
        """End what is under way, in other threads too. Safe to call twice."""
        self._sockets.shut()
        self.openai.close()

    def _once(self) -> openai.OpenAI:
        return self.openai.with_options(max_retries=0)

    def _send(self, make: Callable[[], calls.Call[T]]) -> T:
        call = make()
        with connection.sending(self._address, call.body):
            value = self.openai.post(self._address.url(call.path), cast_to=object, body=call.body)
        return understood(call.read, value)

    def _open(self, make: Callable[[], calls.StreamCall]) -> "ClientStream":
        call = make()
        with connection.sending(self._address, call.body):
            events = self.openai.post(
                self._address.url(call.path),
                cast_to=object,
                body=call.body,
                stream=True,
                stream_cls=openai.Stream[object],
            )
        return ClientStream(self._address, call, events, self._sockets.are_shut)


class ClientStream(Closing):
    """An answer as it comes, an iterator of `Delta`s. Closing or dropping it stops the server's work."""

    def __init__(
        self,
        address: Address,
        call: calls.StreamCall,
        events: openai.Stream[object],
        closed: Callable[[], bool],
    ) -> None:
        self._events, self._ended = events, False
        self._deltas = _deltas(address, call, events, closed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._ended or (delta := next(self._deltas, None)) is None:
            raise StopIteration(NO_MORE)
        return delta

    def close(self) -> None:
        """Stop. Safe to call twice; what is read afterwards is at its end."""
        self._ended = True
        self._events.close()


def _deltas(
    address: Address, call: calls.StreamCall, events: openai.Stream[object], closed: Callable[[], bool]
) -> Iterator[Delta]:
    finished = False
    with connection.translating(address, call.body, closed):
        for event in events:
            for delta in understood(call.read, event):
                finished = finished or delta.finish_reason is not None
                yield delta
    if not finished:
        raise connection.broke_off(address)


class AsyncClient(
    calls.Requester,
    Surface[
        Coming[Caption],
        Coming[Answer],
        Coming[Scene],
        Coming[Detections],
        Coming[Reply],
        Coming["AsyncClientStream"],
        AsyncConversation[calls.Body],
    ],
    AsyncClosing,
):
    """`snugvl.Client` for an event loop: the same methods as coroutines, the same arguments and exceptions.

        async with snugvl.AsyncClient() as client:
            captions = await asyncio.gather(*(client.caption(picture) for picture in pictures))

    Cancelling a call, or leaving a stream's `async with`, stops the server's work.
    """

    def _connect(self, options: dict[str, Any], http: dict[str, Any]) -> None:
        http_client = openai.DefaultAsyncHttpxClient(**http, event_hooks={"response": [_answered]})
        self.openai = openai.AsyncOpenAI(**options, http_client=http_client)

    def _conversation(self, system: str | None) -> AsyncConversation[calls.Body]:
        return AsyncConversation(calls.message_of, self.stream_chat, system, str(self))

    async def models(self) -> tuple[str, ...]:
        """Names that requests may use for the model."""
        return understood(answers.model_names, await self.get("/v1/models"))

    async def health(self) -> Health:
        """The state of the server's engine, ready or not; asked for once."""
        with connection.translating(self._address):
            try:
                value = await self._once().get(self._address.url("/health"), cast_to=object)
            except openai.APIStatusError as error:
                value = connection.body_of_503(error)
        return understood(answers.health, value)

    async def memory(self) -> Memory:
        """The ledger, planned and measured, and what the engine is doing; one try."""
        with connection.translating(self._address):
            value = await self._once().get(self._address.url("/memory"), cast_to=object)
        return understood(answers.memory, value)

    async def get(self, path: str) -> Any:
        """The answer to a GET of one of the server's paths: JSON as Python values, else text."""
        with connection.translating(self._address):
            return await self.openai.get(self._address.url(path), cast_to=object)

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        await self.openai.close()

    def _once(self) -> openai.AsyncOpenAI:
        return self.openai.with_options(max_retries=0)

    async def _send(self, make: Callable[[], calls.Call[T]]) -> T:
        call = await asyncio.to_thread(make)
        with connection.sending(self._address, call.body):
            value = await self.openai.post(self._address.url(call.path), cast_to=object, body=call.body)
        return understood(call.read, value)

    async def _open(self, make: Callable[[], calls.StreamCall]) -> "AsyncClientStream":
        call = await asyncio.to_thread(make)
        with connection.sending(self._address, call.body):
            events = await self.openai.post(
                self._address.url(call.path),
                cast_to=object,
                body=call.body,
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        return AsyncClientStream(self._address, call, events, self.openai.is_closed)


class AsyncClientStream(AsyncClosing):
    """An answer as it comes, an asynchronous iterator of `Delta`s. Closing or dropping it stops the server's
    work.

    A task reads the events. Were they read by `__anext__`, a loop that is left early would leave the HTTP
    library's generators suspended, and asyncio, which closes all of them at once, would print their errors.
    """

    def __init__(
        self,
        address: Address,
        call: calls.StreamCall,
        events: openai.AsyncStream[object],
        closed: Callable[[], bool],
    ) -> None:
        self._pieces: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(AHEAD)
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(_read(address, call, events, closed, self._pieces))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        piece = None if self._ended else await self._pieces.get()
        if isinstance(piece, Delta):
            return piece
        self._end()
        if piece is None:
            raise StopAsyncIteration(NO_MORE)
        raise piece

    async def close(self) -> None:
        """Stop. Safe to call twice; what is read afterwards is at its end."""
        self._end()
        self._task.cancel()
        await asyncio.wait({self._task})

    def _end(self) -> None:
        self._ended = True
        with suppress(asyncio.QueueFull):  # then nobody waits
            self._pieces.put_nowait(None)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it what it ran
            self._loop.call_soon_threadsafe(self._task.cancel)


async def _read(
    address: Address,
    call: calls.StreamCall,
    events: openai.AsyncStream[object],
    closed: Callable[[], bool],
    pieces: asyncio.Queue[Delta | Exception | None],
) -> None:
    """Put all deltas of `events` into `pieces`, then the error that ended them, or None."""
    finished = False
    try:
        with connection.translating(address, call.body, closed):
            async for event in events:
                for delta in understood(call.read, event):
                    finished = finished or delta.finish_reason is not None
                    await pieces.put(delta)
        await pieces.put(None if finished else connection.broke_off(address))
    except Exception as error:  # raised where the stream is read
        await pieces.put(error)
    finally:
        with suppress(httpx2.HTTPError):  # broken already
            await events.close()


async def _answered(response: httpx2.Response) -> None:
    answered(response)

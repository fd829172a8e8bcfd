"""A conversation that remembers its messages, as `chat()` without messages returns it, here and on a server.

It keeps messages in the form in which they are sent, so a picture is read once. A turn is added when its
answer is there: after an error the conversation is as it was before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

from snugvl.core.guesses import arguments_hinted, unknown
from snugvl.core.messages import AsyncClosing, Closing, Delta, Deltas, Text
from snugvl.core.sampling import SamplingParams, chosen
from snugvl.inputs.talk import Shown, Turn, of_user, system_turn
from snugvl.tasks.ask import collect
from snugvl.tasks.results import Reply

M = TypeVar("M")
StreamT = TypeVar("StreamT")


class AsyncDeltas(Protocol):
    """A stream of an answer's pieces, in an event loop; closing it stops the work."""

    def __anext__(self) -> Awaitable[Delta]: ...

    async def close(self) -> None: ...


class _Remembers(Generic[M, StreamT]):
    """The messages so far, how a turn becomes one, and how they are answered."""

    def __init__(
        self,
        take: Callable[[Turn], M],
        ask: Callable[[Sequence[M], SamplingParams | None], StreamT],
        system: str | None,
        name: str,
    ) -> None:
        self._take, self._ask, self._name = take, ask, name
        self._system = [take(turn) for turn in system_turn(system)]
        self._said: list[M] = []

    @property
    def messages(self) -> tuple[M, ...]:
        """The messages so far, oldest first, the system's included."""
        return (*self._system, *self._said)

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self._said.clear()

    def _remember(self, mine: M, answer: str) -> None:
        self._said += [mine, self._take(Turn("assistant", (Text(answer),)))]

    if not TYPE_CHECKING:  # or every attribute would be taken to exist

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(unknown(type(self).__name__, name))

    def __repr__(self) -> str:
        turns = len(self._said) // 2
        return f"<conversation with {self._name}: {turns} {'turn' if turns == 1 else 'turns'}>"


class Conversation(_Remembers[M, Deltas]):
    """A conversation with a model, which is shown all earlier turns with each new one.

    Pictures stay in the context: each takes its tokens in every turn, until `RequestTooLarge` says that there
    is no more room, and `clear` begins anew. One turn at a time; conversations may run side by side.

    Example:
        chat = model.chat(system="Answer in one sentence.")
        print(chat.send("photo.jpg", "What is on the table?"))
        print(chat.send("And behind it?"))
    """

    @arguments_hinted
    def send(
        self,
        *parts: Shown,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> Reply:
        """Say something, and have the whole answer.

        Args:
            parts: words and pictures, as `snugvl.user` takes them.
            max_tokens: longest answer; by default what the context leaves.
            temperature: 0, the default, is greedy: the same answer every time.
            sampling: everything else about the choice of tokens.

        Returns:
            The model's answer.

        Raises:
            ImageError, RequestError: what was said can't be used; nothing is remembered of it.
            RequestTooLarge: the conversation is longer than the context.
            EngineError: the engine failed, or was closed.
        """
        said = chosen(sampling, max_tokens, temperature)
        with self.stream(*parts, sampling=said) as stream:
            return collect(stream)

    __call__ = send

    def stream(
        self,
        *parts: Shown,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> "ConversationStream":
        """`send`, with the answer as it is generated. If it is closed early, the text so far is remembered.

        Returns:
            A stream of `Delta`s, to be used in a `with`; `print(delta, end="")` prints its text.
        """
        mine = self._take(of_user(parts))
        deltas = self._ask((*self.messages, mine), chosen(sampling, max_tokens, temperature))
        return ConversationStream(deltas, lambda answer: self._remember(mine, answer))


class _Heard(Generic[StreamT]):
    """Collects the pieces of an answer and adds it to a conversation once, unless it ended in an error."""

    def __init__(self, deltas: StreamT, remember: Callable[[str], None]) -> None:
        self._deltas, self._remember = deltas, remember
        self._pieces: list[str] = []
        self._open = True

    def _end(self) -> None:
        if self._open and self._pieces:
            self._open = False
            self._remember("".join(self._pieces))


class ConversationStream(_Heard[Deltas], Closing):
    """An answer as it comes; when it has ended, or is closed, it is part of the conversation."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            delta = next(self._deltas)
        except StopIteration:
            self.close()
            raise
        except Exception:
            self._open = False
            raise
        self._pieces.append(delta.text)
        return delta

    def close(self) -> None:
        """Stop. Safe to call twice."""
        self._deltas.close()
        self._end()


class AsyncConversation(_Remembers[M, Awaitable[AsyncDeltas]]):
    """`Conversation` for an event loop: the same methods as coroutines.

    Example:
        chat = client.chat()
        print(await chat.send("photo.jpg", "What is on the table?"))
        async with await chat.stream("And behind it?") as stream:
            async for delta in stream:
                print(delta, end="", flush=True)
    """

    async def send(
        self,
        *parts: Shown,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> Reply:
        """Say something, and have the whole answer: see `Conversation.send`."""
        said = chosen(sampling, max_tokens, temperature)
        async with await self.stream(*parts, sampling=said) as stream:
            return collect([delta async for delta in stream])

    def __call__(self, *parts: Shown, **options: Any) -> Awaitable[Reply]:
        return self.send(*parts, **options)

    async def stream(
        self,
        *parts: Shown,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> "AsyncConversationStream":
        """`send`, with the answer as it is generated: see `Conversation.stream`."""
        mine = await asyncio.to_thread(lambda: self._take(of_user(parts)))
        deltas = await self._ask((*self.messages, mine), chosen(sampling, max_tokens, temperature))
        return AsyncConversationStream(deltas, lambda answer: self._remember(mine, answer))


class AsyncConversationStream(_Heard[AsyncDeltas], AsyncClosing):
    """An answer as it comes, in an event loop; see `ConversationStream`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            await self.close()
            raise
        except Exception:
            self._open = False
            raise
        self._pieces.append(delta.text)
        return delta

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        await self._deltas.close()
        self._end()

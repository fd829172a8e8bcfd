"""Threads that make prompts of requests, and what may end that work before it is done.

    submit ─┬► light ─► 4 threads
            ├► heavy ─► 2 threads   a grammar that is new
            └► long  ─► 1 thread    very much text, or very many messages: templates hold Python's lock, for
                                    which the engine's own thread would wait as often as there are threads

Heavy and long work waits for its like alone, and light work doesn't wait for it.

A request that is given up, or whose deadline has passed, is not prepared any more: waiting work is dropped,
running work ends at its next part (`Preparation.go_on`). Every part is bounded; should one not end all the
same, `longest_s` shows that to the supervisor of the process.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal, TypeVar

from snugvl.core.messages import Request, characters, pieces
from snugvl.errors import DeadlineExceeded

LIGHT: Final = 4  # threads; preparing is mostly Pillow and numpy, which leave Python's lock
HEAVY: Final = 2
LONG_TEXT: Final = 1 << 16  # characters; what is shorter is tokenised in some milliseconds
MANY_PIECES: Final = 512  # messages, their parts and calls; each is worked at in Python
REMEMBERED: Final = 256  # grammars that were compiled once, and so take no time

T = TypeVar("T")
Weight = Literal["light", "heavy", "long"]


class GivenUp(Exception):
    """This request is no longer wanted."""


class Preparation:
    """The work for one request, until its prompt is ready."""

    def __init__(self, deadline_s: float | None = None) -> None:
        """`deadline_s`: seconds from now."""
        self._given_up = False
        self._begun = time.monotonic()
        self._deadline_s = deadline_s
        self.started: float | None = None  # monotonic seconds

    def give_up(self) -> None:
        """Let it end soon. In any thread."""
        self._given_up = True

    def left_s(self) -> float | None:
        """Seconds until its deadline."""
        return None if self._deadline_s is None else self._deadline_s - (time.monotonic() - self._begun)

    def go_on(self) -> None:
        """Called between two parts of the work.

        Raises:
            GivenUp, DeadlineExceeded: it must end here.
        """
        if self._given_up:
            raise GivenUp("the request was given up while its prompt was prepared")
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"the deadline of {self._deadline_s:g} s passed before the prompt was prepared"
            )


class Preparers:
    """The threads, and whose turn it is. Safe to use from any thread."""

    def __init__(self, light: int = LIGHT, heavy: int = HEAVY) -> None:
        self._threads: dict[Weight, ThreadPoolExecutor] = {
            "light": ThreadPoolExecutor(light, "snugvl-prepare"),
            "heavy": ThreadPoolExecutor(heavy, "snugvl-prepare-heavy"),
            "long": ThreadPoolExecutor(1, "snugvl-prepare-long"),
        }
        self._running: set[Preparation] = set()
        self._known: dict[int, None] = {}  # grammars, the one used last at the end

    def submit(self, preparation: Preparation, job: Callable[[], T], weight: Weight = "light") -> "Future[T]":
        """Run `job` when it is its turn; the result, or what it raises, is the future's."""

        def turn() -> T:
            preparation.started = time.monotonic()
            self._running.add(preparation)
            try:
                return job()
            finally:
                self._running.discard(preparation)

        return self._threads[weight].submit(turn)

    async def run(
        self,
        preparation: Preparation,
        job: Callable[[], T],
        weight: Weight = "light",
        *,
        discard: Callable[[T], object] = lambda _: None,
    ) -> T:
        """`submit`, and wait in an event loop. A cancelled caller gives the work up, and waits for its end.
        `discard`: called with a result that is no longer wanted."""

        def begun() -> T:
            preparation.go_on()
            return job()

        future = self.submit(preparation, begun, weight)
        work = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            preparation.give_up()
            if not future.cancel():  # it runs
                await asyncio.wait([work])
                if work.exception() is None:
                    discard(work.result())
            raise

    @property
    def longest_s(self) -> float:
        """Seconds for which the oldest work has been going on."""
        now = time.monotonic()
        return max((now - (each.started or now) for each in tuple(self._running)), default=0.0)

    def weigh(self, request: Request) -> Weight:
        """The weight of a request's preparation, estimated without doing it."""
        tools = () if request.tools is None else request.tools.tools
        text = characters(request.messages, tools) + len(request.prompt or "")
        if text > LONG_TEXT or pieces(request.messages) > MANY_PIECES:
            return "long"
        grammar = _grammar_of(request)
        return "light" if grammar is None or grammar in self._known else "heavy"

    def remember(self, request: Request) -> None:
        """Note that a request's grammar was compiled, so that the next request with it counts as light."""
        grammar = _grammar_of(request)
        if grammar is not None:
            self._known.pop(grammar, None)
            self._known[grammar] = None
            while len(self._known) > REMEMBERED:
                self._known.pop(next(iter(self._known)), None)

    def close(self) -> None:
        """Take nothing more; what runs is not waited for."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def _grammar_of(request: Request) -> int | None:
    """A key of the grammar that a request needs, or None."""
    if request.tools is not None:
        return hash(repr(request.tools))
    return None if request.grammar is None else hash((request.grammar.kind, request.grammar.source))

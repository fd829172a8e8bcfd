"""The load: some clients, each with one request at a time, until no request is left.

Bytes and times are kept as they came; the records of requests are read from them afterwards.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

import httpx

from snugvl.core.folders import json_object

MOST_MESSAGE = 300
DONE = b"[DONE]"

CountedBy = Literal["usage", "pieces"]

# Two pieces may arrive in one read of the socket: their time is then the network's, not that of decoding.
LEAST_TOKENS: Final = 8  # of an answer that has a decode rate


@dataclass(frozen=True, slots=True)
class Record:
    """Times and tokens of one request; times are seconds from the start of the level.

    Attributes:
        sent_s: when its first byte was about to leave.
        ended_s: when the last byte of its answer was there, or when it failed.
        pieces_s: when each piece of the answer came; a piece is a token, or several.
        finished_s: when the server said that the answer is whole: later than the last piece where the last
            tokens have no text.
        output_tokens: tokens of the answer by the server's count, else the number of pieces (`counted_by`).
        error: None, or a short code such as "429 queue_full"; `message` is the server's.
    """

    sent_s: float
    ended_s: float
    pieces_s: tuple[float, ...] = ()
    finished_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = "pieces"
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else None

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between one piece and the next."""
        return tuple(after - before for before, after in pairwise(self.pieces_s))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, per second from the first piece to the end of the answer; None for fewer
        than `LEAST_TOKENS` tokens."""
        if not self.pieces_s or self.output_tokens < LEAST_TOKENS:
            return None
        end = self.finished_s if self.finished_s is not None else self.pieces_s[-1]
        seconds = end - self.pieces_s[0]
        return (self.output_tokens - 1) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as it went over the wire; seconds from the start of the level.

    Attributes:
        status: HTTP status of the answer; None where none came.
        chunks: (time, bytes) of each piece as it came.
        failure: the network's error, as (code, message).
    """

    sent_s: float
    ended_s: float
    status: int | None = None
    chunks: tuple[tuple[float, bytes], ...] = ()
    failure: tuple[str, str] | None = None


def read(exchange: Exchange) -> Record:
    """The record of a request, read from its exchange."""
    sent, ended = exchange.sent_s, exchange.ended_s
    if exchange.status is not None and exchange.status != 200:
        code, message = _refusal(exchange)
        return Record(sent, ended, error=code, message=message)
    answer = _Answer()
    for at, data in events(exchange.chunks):
        answer.take(at, data)
    trouble = exchange.failure or answer.trouble()
    return Record(
        sent,
        ended,
        tuple(answer.pieces),
        answer.finished,
        answer.usage.get("prompt_tokens"),
        answer.usage.get("completion_tokens") or len(answer.pieces),
        "usage" if answer.usage.get("completion_tokens") else "pieces",
        answer.finish,
        *(trouble or (None, None)),
    )


def events(chunks: tuple[tuple[float, bytes], ...]) -> Iterator[tuple[float, bytes]]:
    """The data lines of a stream of server-sent events, each with the time when it was complete."""
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


class _Answer:
    """A streamed chat completion, event by event."""

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.usage: dict[str, Any] = {}
        self.finish: str | None = None
        self.finished: float | None = None
        self._done = False
        self._trouble: tuple[str, str] | None = None

    def take(self, at: float, data: bytes) -> None:
        """Take one event."""
        if data == DONE:
            self._done = True
            return
        if (event := json_object(data)) is None:
            self._trouble = self._trouble or ("not JSON", _short(data.decode(errors="replace")))
            return
        if event.get("error"):
            code, message = _told(event)
            self._trouble = self._trouble or (f"stream {code}".strip(), message)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            if choice.get("finish_reason"):
                self.finish, self.finished = choice["finish_reason"], at
            if _is_piece(choice):
                self.pieces.append(at)

    def trouble(self) -> tuple[str, str] | None:
        """(code, message) of why it is no good answer, or None."""
        if self._trouble is not None:
            return self._trouble
        if not self._done and self.finish is None:
            return "broke off", "the stream ended before the answer did"
        if not self.pieces:
            return "no tokens", "the answer is empty"
        return None


def _is_piece(choice: dict[str, Any]) -> bool:
    """Whether an event has text, or a token whose text is held back; not only a role or a finish reason."""
    delta = choice.get("delta") or {}
    if any(delta.get(name) for name in ("content", "tool_calls", "reasoning_content", "reasoning")):
        return True
    return "content" in delta and not delta.get("role") and not choice.get("finish_reason")


def _refusal(exchange: Exchange) -> tuple[str, str]:
    body = b"".join(data for _, data in exchange.chunks)
    if (value := json_object(body)) is None:
        return str(exchange.status), _short(body.decode(errors="replace"))
    code, message = _told(value)
    return f"{exchange.status} {code}".strip(), message


def _told(value: dict[str, Any]) -> tuple[str, str]:
    """Code and message of an error in OpenAI's form, or nearly."""
    error = value.get("error", value)
    if not isinstance(error, dict):
        return "", _short(str(error))
    code = error.get("code") or error.get("type") or ""
    return str(code) if isinstance(code, str) else "", _short(str(error.get("message") or ""))


def _short(text: str) -> str:
    return " ".join(text.split())[:MOST_MESSAGE]


LAG_EVERY_S = 0.01
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Generator:
    """The cost of generating the load in this process. `cpu_share`: share of one core, while the level ran;
    `lag_median_s`, `lag_p99_s`, `lag_max_s`: how late the event loop woke up: times are wrong by so much."""

    cpu_share: float
    lag_median_s: float
    lag_p99_s: float
    lag_max_s: float


@dataclass(slots=True)
class Lag:
    """How late the event loop wakes up, in seconds."""

    late_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            due = time.perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.late_s.append(max(0.0, time.perf_counter() - due))


class Level:
    """One level, while it runs and after. `done` grows with each request, so an interrupt loses none."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.done: list[Exchange] = []
        self._http, self._url = http, url
        self._begin = self._cpu = 0.0
        self._wall = self._cpu_used = 0.0
        self._lag = Lag()

    async def run(self, bodies: Sequence[bytes], clients: int) -> None:
        """Send all requests and wait for their answers."""
        waiting = deque(bodies)
        lag = asyncio.ensure_future(self._lag.watch())
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(clients, len(bodies))):
                    group.create_task(self._client(waiting))
        finally:
            lag.cancel()
            self._cpu_used = time.process_time() - self._cpu
            self._wall = self._now()

    @property
    def generator(self) -> Generator:
        """The cost of generating the load, once the level has ended."""
        late = sorted(self._lag.late_s) or [0.0]
        share = self._cpu_used / self._wall if self._wall else 0.0
        return Generator(share, percentile(late, 0.5), percentile(late, 0.99), late[-1])

    async def _client(self, waiting: deque[bytes]) -> None:
        while waiting:
            self.done.append(await self._exchange(waiting.popleft()))

    async def _exchange(self, body: bytes) -> Exchange:
        chunks: list[tuple[float, bytes]] = []
        status, failure = None, None
        keep = chunks.append
        sent = self._now()
        try:
            async with self._http.stream("POST", self._url, content=body, headers=HEADERS) as response:
                status = response.status_code
                async for chunk in response.aiter_raw():
                    keep((self._now(), chunk))
        except (httpx.HTTPError, httpx.StreamError) as error:
            failure = failure_of(error)
        return Exchange(sent, self._now(), status, tuple(chunks), failure)

    def _now(self) -> float:
        return time.perf_counter() - self._begin


def failure_of(error: Exception) -> tuple[str, str]:
    """(code, message) of the network's failure."""
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return "timeout", message
    return "connection", message


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie."""
    place = (len(ordered) - 1) * share
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

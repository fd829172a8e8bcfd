"""The load: some clients, each with one request at a time, until there are none left."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from snugvl.bench.record import Exchange
from snugvl.bench.summary import percentile

LAG_EVERY_S = 0.01
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Generator:
    """What making the load cost in this process.

    Attributes:
        cpu_share: of one core, while the level ran.
        lag_median_s, lag_p99_s, lag_max_s: how late its clock ran: times are wrong by so much.
    """

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
    """One level while it runs and after; `done` grows, so that what was measured outlives an interrupt."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.done: list[Exchange] = []
        self._http, self._url = http, url
        self._begin = self._cpu = 0.0
        self._wall = self._cpu_used = 0.0
        self._lag = Lag()

    async def run(self, bodies: Sequence[bytes], clients: int) -> None:
        """Send everything."""
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
        """What it cost, after the end."""
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
    """Code and message of what the network did."""
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return "timeout", message
    return "connection", message

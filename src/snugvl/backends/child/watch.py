"""A child server as seen from outside: whether its start goes on, when it is ready, and when it no longer is.

Slow is not hung. A start that compiles uses the processor, one that reads weights reads them, one that loads
them fills the GPU's memory, and most write lines. Only one that does none of it for a while has stopped. What
spins for ever looks like work from here: the limit on the whole start is for that. With measurements of every
child engine: memory that its processes hold, and its counters.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

from snugvl.backends.child.http import ChildApi, Foreign, NobodyThere, Served, Unreachable
from snugvl.backends.supervisor import Supervision
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.errors import EngineError, SnugvlError
from snugvl.hardware import host, nvml
from snugvl.inputs.tools.forms import MARKERS

POLL_S = 0.25  # between two looks at a server that is starting
HUNG = "{name} hung"
LOOK_S = 5.0  # a look at a server that is starting may take


async def until_ready(
    api: ChildApi, wanted: str, watchdog_s: float, waited: Callable[[float], Awaitable[None]] | None = None
) -> Served:
    """Wait until it serves the model. `waited` is called after every pause, with its seconds, and may end it.

    A server that is loading refuses connections: one that takes them and says nothing hangs.

    Raises:
        Foreign: something else answers.
        Unreachable: it has taken connections for `watchdog_s` without an answer.
    """
    silent_s = 0.0
    while True:
        try:
            if await api.healthy(min(LOOK_S, watchdog_s)):
                return await api.served(wanted)
        except NobodyThere:
            silent_s = 0.0
        except Unreachable:
            silent_s += min(LOOK_S, watchdog_s)
            if silent_s >= watchdog_s:
                raise
        await asyncio.sleep(POLL_S)
        if waited is not None:
            await waited(POLL_S)


async def marker_tokens(api: ChildApi) -> dict[str, int]:
    """Ids of the markers of tool calls, of any form, that are tokens of their own."""
    found = {}
    for text in MARKERS:
        ids = await api.text_tokens(text)
        if len(ids) == 1:
            found[text] = ids[0]
    return found


class Watchdog:
    """Looks at a server that is ready, until it isn't. Silence is counted in looks, not by the clock."""

    def __init__(
        self,
        api: ChildApi,
        supervision: Supervision,
        running: Callable[[], int],
        on_healthy: Callable[[], None] = lambda: None,
    ) -> None:
        """`running`: requests under way; `on_healthy` is called whenever it said that it is."""
        self._api = api
        self._supervision = supervision
        self._running = running
        self._on_healthy = on_healthy
        self._hung = HUNG.format(name=api.name)
        self._roused = asyncio.Event()
        self._silent_s = self._stalled_s = 0.0

    def alive(self) -> None:
        """Note a sign of life: a piece of an answer."""
        self._stalled_s = 0.0

    async def confirm_alive(self) -> bool:
        """Whether the server is well though an answer failed. If not, `wait_for_failure` knows at once."""
        with suppress(SnugvlError):
            if await self._api.healthy(LOOK_S):
                return True
        self._roused.set()
        return False

    async def wait_for_failure(self) -> str:
        """Wait until it hangs, is dead or gone; returns why, as half a sentence."""
        limit_s, ping_s = self._supervision.watchdog_s, self._supervision.ping_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ping_s):
                    await self._roused.wait()
            self._roused.clear()
            try:
                if not await self._api.healthy(min(LOOK_S, limit_s)):
                    return f"{self._api.name}'s engine died"
                self._silent_s = 0.0
                self._on_healthy()
            except Foreign as error:
                return str(error)
            except NobodyThere as error:
                return f"{self._api.name} is gone: {error}"
            except Unreachable:
                self._silent_s += ping_s + min(LOOK_S, limit_s)
                if self._silent_s > limit_s:
                    return f"{self._hung}: it has not answered for {self._silent_s:.1f} s"
            self._stalled_s = self._stalled_s + ping_s if self._running() else 0.0
            if self._stalled_s > limit_s:
                return f"{self._hung}: nothing came of {self._running()} running requests for {limit_s:g} s"


# Less than this since the last progress is not progress: an event loop that waits wakes up now and then.
WORK_SHARE: Final = 1 / 60  # of one processor core over the limit, by all processes together
MOVED_BYTES: Final = 1 << 16  # read and written: files, pipes, a slow download's file
GPU_BYTES: Final = 64 << 20  # above the most that was held on the GPUs before
ACTIVITY_LOOK_S: Final = 1.0  # between two looks


class Stalled(EngineError):
    """A start has stalled: it does nothing any more."""


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Processor time and bytes moved by one process since it began."""

    cpu_s: float
    moved_bytes: int


def readings(family: Sequence[psutil.Process]) -> dict[int, ProcessReading]:
    """The reading of each process, by process id; those that have ended are left out."""
    found: dict[int, ProcessReading] = {}
    for process in family:
        with suppress(psutil.Error):
            cpu = process.cpu_times()
            # Those of children that were waited for: a compiler lives for less than a second.
            cpu_s = cpu.user + cpu.system + cpu.children_user + cpu.children_system
            found[process.pid] = ProcessReading(cpu_s, _moved_bytes_of(process))
    return found


class Activity:
    """Counts for how many seconds the processes of a start have been idle (`idle_s`).

    Only time between looks counts, not the clock: a machine that slept or was busy proves nothing.
    """

    def __init__(
        self, family: Callable[[], Sequence[psutil.Process]], limit_s: float, gpus: Any = None
    ) -> None:
        """`family`: returns the present processes; `gpus`: NVML where there is a GPU."""
        self._family = family
        self._limit_s = limit_s
        self._gpus = gpus
        self._seen: dict[int, ProcessReading] = {}
        self._line = ""
        self._cpu_s = 0.0  # since the last progress
        self._moved_bytes = 0  # since the last progress
        self._held_bytes = self._held_on_gpus()  # the most so far
        self._since_s = 0.0  # the last look
        self.idle_s = 0.0  # without progress

    def look(self, line: str, since_s: float) -> None:
        """Take a reading, if it is time to. Takes milliseconds: call it in a thread.

        `line`: the last line of the log, without its time: a repeated one is not progress.
        `since_s`: seconds since the last call.

        Raises:
            Stalled: nothing has happened for `limit_s`.
        """
        self._since_s += since_s
        if self._since_s < min(ACTIVITY_LOOK_S, self._limit_s / 4):
            return
        since_s, self._since_s = self._since_s, 0.0
        self.idle_s = 0.0 if self._progress(line) else self.idle_s + since_s
        if self.idle_s >= self._limit_s:
            raise Stalled(f"for {self.idle_s:.0f} s it has computed, read and written nothing")

    def _progress(self, line: str) -> bool:
        now = readings(self._family())
        for pid, reading in now.items():
            before = self._seen.get(pid, ProcessReading(0.0, 0))
            self._cpu_s += max(reading.cpu_s - before.cpu_s, 0.0)
            self._moved_bytes += max(reading.moved_bytes - before.moved_bytes, 0)
        self._seen = now
        held_bytes = self._held_on_gpus()
        progress = (
            line != self._line
            or self._cpu_s >= WORK_SHARE * self._limit_s
            or self._moved_bytes >= MOVED_BYTES
            or held_bytes >= self._held_bytes + GPU_BYTES
        )
        self._line = line
        if progress:
            self._cpu_s, self._moved_bytes = 0.0, 0
            self._held_bytes = max(held_bytes, self._held_bytes)
        return progress

    def _held_on_gpus(self) -> int:
        """Bytes held on all GPUs by any process: memory that others take and give back sets no new mark."""
        if self._gpus is None:
            return 0
        with suppress(self._gpus.NVMLError):
            handles = map(self._gpus.nvmlDeviceGetHandleByIndex, range(self._gpus.nvmlDeviceGetCount()))
            return sum(int(self._gpus.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
        return 0


def _moved_bytes_of(process: psutil.Process) -> int:
    """Bytes that a process has read and written, from disks and through calls; 0 where unknown."""
    with suppress(psutil.Error, AttributeError, NotImplementedError, OSError):
        io = process.io_counters()
        return int(io.read_bytes + io.write_bytes + io.read_chars + io.write_chars)
    return 0


class Held(NamedTuple):
    """Bytes of one device: all of it, what is free, what the processes hold."""

    device: str
    total: int
    free: int
    held: int


class Gauge:
    """Measures one server, and makes the ledger of it: the plan's rows beside those of its log.

    Attributes:
        kinds: kinds of the rows whose names don't say them.
    """

    kinds: ClassVar[Mapping[str, Kind]]

    def __init__(self, planned: Sequence[LedgerRow], gpu_uuids: Sequence[str], device: str) -> None:
        """`gpu_uuids`: NVML's ids of the server's GPUs, where the plan knows them; `device`: the name of the
        first for people; empty: NVML's name."""
        self._planned: dict[str, int] = {}
        for row in planned:
            name = self.row_of(row)
            self._planned[name] = self._planned.get(name, 0) + (row.planned_bytes or 0)
        self._gpu_uuids, self._device = gpu_uuids, device
        self._nvml = nvml.started()

    @staticmethod
    def row_of(planned: LedgerRow) -> str:
        """The name of the row with which one of the plan's can be compared."""
        raise NotImplementedError

    def ledger(
        self, held: Held, measured: Mapping[str, int | None], used: Mapping[str, int | None] | None = None
    ) -> Ledger:
        """The ledger of what it holds: `measured` and `used` bytes of each row, None for unknown ones."""
        rows = [
            LedgerRow(
                str(name),
                self._planned.get(name),
                measured.get(name),
                (used or {}).get(name),
                self.kinds.get(name) or Kind(name),
            )
            for name in dict.fromkeys((*self._planned, *measured))
            if name in self._planned or measured[name] is not None
        ]
        rows.sort(key=lambda row: -(row.planned_bytes or row.measured_bytes or 0))
        return Ledger(self._device or held.device, tuple(rows), held.total, held.free, held.held)

    def held_by(self, family: Sequence[psutil.Process]) -> Held:
        """The memory that its processes hold now. Takes milliseconds: call it in a thread."""
        gpu = self._gpu({process.pid for process in family})
        return gpu if gpu is not None else host_memory(family)

    def _gpu(self, pids: set[int]) -> Held | None:
        """Name, total, free and held bytes of the GPU that holds most of it; None without a GPU."""
        if self._nvml is None:
            return None
        best: tuple[int, Any] | None = None
        with suppress(self._nvml.NVMLError):
            for handle in self._handles():
                held_bytes = nvml.held_by(self._nvml, handle, pids)
                if best is None or held_bytes > best[0]:
                    best = (held_bytes, handle)
            if best is not None:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(best[1])
                name = str(self._nvml.nvmlDeviceGetName(best[1]))
                return Held(name, int(memory.total), int(memory.free), best[0])
        return None

    def _handles(self) -> list[Any]:
        assert self._nvml is not None
        if self._gpu_uuids:
            return [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._gpu_uuids]
        return [
            self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())
        ]


def host_memory(family: Sequence[psutil.Process]) -> Held:
    """Host memory, and what they hold of it."""
    held_bytes = 0
    for process in family:
        with suppress(psutil.Error):
            held_bytes += process.memory_info().rss
    memory = host.memory()
    return Held("host memory", memory.total_bytes, memory.free_bytes, held_bytes)


def samples(text: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each wanted sample of a text in Prometheus' format.

    The others are most of it, and would take the parser its time.
    """
    lines = [line for line in text.splitlines() if wanted(line.partition("{")[0].partition(" ")[0])]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value

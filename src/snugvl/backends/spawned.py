"""A process of an engine that is started here: what it prints is read, and its end waited for and explained.

How an engine writes its log is a `LogForm` of its own.
"""

import asyncio
import logging
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Final

HEAD_LINES: Final = 300  # the command, the version, the arguments
TAIL_LINES: Final = 600
MAX_LINE: Final = 8000  # the list of arguments is one line
LAST_LINES: Final = 40  # among which the cause of a death is looked for
READ_BYTES: Final = 1 << 16
LAST_WORDS_S: Final = 0.5  # until what a process has printed is read, once it is gone

logger = logging.getLogger("snugvl.engine")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a start. `progress`: of the whole start, from 0 to 1."""

    detail: str
    progress: float


class LogForm:
    """The form of an engine's log.

    Args:
        prefix: what stands before what a line says: process, time, file.
        failed: how a line without its prefix begins that says what failed.
        chatty: whether the usual lines of a start are too many to be read.
        kept: how many of the first and of the last lines a diagnosis needs.
        max_line: characters of a line; what is beyond is dropped.
        ends: ends a line. A progress bar rewrites one line, so a carriage return does as well.
        stages: what a line says → what is being done now, and from where to where on the way. A group that
            a pattern has is a percentage: how far between the two.
    """

    def __init__(
        self,
        prefix: str,
        failed: str,
        stages: Sequence[tuple[str, str, float, float]],
        *,
        chatty: bool = False,
        kept: tuple[int, int] = (HEAD_LINES, TAIL_LINES),
        max_line: int = MAX_LINE,
        ends: str = r"[\r\n]",
    ) -> None:
        self.chatty, self.kept, self.max_line, self.ends = chatty, kept, max_line, re.compile(ends)
        self._prefix, self._failed = re.compile(prefix), re.compile(failed)
        self._stages = tuple((re.compile(stage[0]), *stage[1:]) for stage in stages)

    def stage_of(self, line: str) -> Stage | None:
        """The stage that a line of the log shows, or None."""
        for pattern, detail, begin, end in self._stages:
            if match := pattern.search(line):
                if not pattern.groups:
                    return Stage(detail, begin)
                percent = min(int(match[1]), 100)
                return Stage(f"{detail} ({percent} %)", begin + (end - begin) * percent / 100)
        return None

    def plain(self, line: str) -> str:
        """A line without its prefix."""
        return self._prefix.sub("", line)

    def is_error(self, line: str) -> bool:
        """Whether a line says what failed."""
        return self._failed.match(self.plain(line)) is not None

    def exception_lines(self, lines: Sequence[str]) -> list[str]:
        """The lines of a log that say what failed, without their prefixes."""
        return [self.plain(line) for line in lines if self.is_error(line)]


class Log:
    """The lines of one life: the first and the last, as many as a diagnosis needs."""

    def __init__(self, form: LogForm) -> None:
        self._form = form
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=form.kept[1])
        self._partial = ""
        self._count = 0
        self._marks = (0, 0)  # lines at the last two times when all was well
        self.was_well = False
        self.stage: Stage | None = None

    def feed(self, text: str) -> list[str]:
        """Take output in any pieces; the lines that it completes."""
        *lines, rest = self._form.ends.split(self._partial + text)
        self._partial = rest[-self._form.max_line :]
        lines = [line.rstrip()[: self._form.max_line] for line in lines if line.strip()]
        for line in lines:
            self._keep(line)
        return lines

    @property
    def lines(self) -> tuple[str, ...]:
        """Oldest first; of a long log the middle is missing."""
        rest = (self._partial,) if self._partial.strip() else ()
        return (*self._head, *self._tail, *rest)

    @property
    def last_words(self) -> tuple[str, ...]:
        """Lines that explain a death now: the fresh ones that say what failed, or else the last ones."""
        # An error may be followed by a page of what else ended because of it.
        words = self._form.exception_lines(self.fresh) or [self._form.plain(line) for line in self.fresh]
        return tuple(words[-LAST_LINES:])

    @property
    def fresh(self) -> tuple[str, ...]:
        """The lines since all was well: since the start, before `all_is_well` was called twice."""
        lines = self.lines
        partial = len(lines) - len(self._head) - len(self._tail)
        return lines[-max(self._count - self._marks[0] + partial, 1) :]

    def all_is_well(self) -> None:
        """Note that it serves: lines from before the last call but one no longer explain a death."""
        self.was_well = True
        self._marks = (self._marks[1], self._count)

    @property
    def last(self) -> str:
        """The last line, without its prefix."""
        return self._form.plain(self.lines[-1]) if self.lines else ""

    def _keep(self, line: str) -> None:
        self._count += 1
        if len(self._head) < self._form.kept[0]:
            self._head.append(line)
        else:
            self._tail.append(line)
        found = self._form.stage_of(line)
        # A parallel start says everything once a process; what is behind us stays behind us.
        if found is not None and (self.stage is None or found.progress >= self.stage.progress):
            self.stage = found


class SpawnedProcess(ABC):
    """A process that was started here. Lives in one event loop; how it is told to end its subclass says.
    `log`: what it has printed."""

    def __init__(self, popen: "subprocess.Popen[bytes]", name: str, form: LogForm) -> None:
        """`name`: the process' in half a sentence."""
        self._popen, self._name = popen, name
        self._killed_because: str | None = None
        self.log = Log(form)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    async def why_gone(self) -> str:
        """Read what it prints until it is gone; then why it went, as half a sentence."""
        assert self._popen.stdout is not None
        listener = asyncio.create_task(_read(self._popen.stdout, self._take))
        watched(listener, lambda why: self.kill(f"what {self._name} prints can't be read: {why}"))
        try:
            await self._gone()
            await asyncio.wait([listener], timeout=LAST_WORDS_S)  # a grandchild may hold the pipe
            return self._killed_because or describe(self._popen.poll(), self.log.last_words, self._name)
        finally:
            listener.cancel()
            await asyncio.wait([listener])

    def kill(self, because: str) -> None:
        """Begin to end it. `because`: what `why_gone` will say, as half a sentence."""
        self._killed_because = self._killed_because or because
        self._end()

    async def stop(self) -> None:
        """End it and wait; nothing is left of it."""
        for end, patience_s in self._ways_to_end():
            end()
            with suppress(TimeoutError):
                await self._wait_for_exit(patience_s)
                break
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    @abstractmethod
    def _end(self) -> None:
        """Have it end at once, without waiting."""

    @abstractmethod
    def _ways_to_end(self) -> Sequence[tuple[Callable[[], object], float | None]]:
        """The ways to end it, politely first, each with the seconds to wait for it (None: for ever)."""

    @abstractmethod
    def _heard(self, line: str) -> None:
        """Take a line that the process printed."""

    async def _gone(self) -> None:
        """Return when nothing more will come from it."""
        await self._wait_for_exit(None)

    async def _wait_for_exit(self, timeout_s: float | None) -> None:
        """Wait until the process has ended.

        Raises:
            TimeoutError: it has not.
        """
        pause_s = 0.002
        async with asyncio.timeout(timeout_s):
            while self._popen.poll() is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)

    def _take(self, text: str) -> None:
        for line in self.log.feed(text):
            self._heard(line)


def watched(task: "asyncio.Task[Any]", failed: Callable[[str], object]) -> None:
    """Call `failed` with the reason if a task fails that is never awaited."""

    def look(_: object) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the supervisor failed", exc_info=error)
            failed(f"{type(error).__name__}: {error}")

    task.add_done_callback(look)


async def _read(pipe: IO[bytes], take: Callable[[str], None]) -> None:
    """Hand what a process prints to `take`, as it comes, until it ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while data := await reader.read(READ_BYTES):
            take(data.decode("utf-8", "replace"))
    finally:
        transport.close()


# What the last lines say → what it means. The first that matches counts.
_CAUSES: Final = (
    (r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
     "the GPU's memory ran out; another program may have taken it"),
    (r"MemoryError|std::bad_alloc|can't allocate memory|Cannot allocate memory",
     "host memory ran out"),
    (r"uncorrectable ECC|Xid|fallen off the bus|device unavailable",
     "the GPU reported a hardware fault"),
    (r"device-side assert|illegal memory access|misaligned address|unspecified launch failure",
     "a GPU kernel failed"),
    (r"driver version is insufficient|driver too old|no kernel image is available",
     "the NVIDIA driver is too old for this torch, or the GPU for its kernels"),
    (r"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error|Driver/library version mismatch",
     "CUDA can't reach the GPU"),
    (r"No module named|cannot open shared object file", "the installation is incomplete"),
)  # fmt: skip
_ERROR_LINE: Final = re.compile(r"(?i)[\w.]*(?:error|exception)\b.*: |terminate called|.*\berror:")
# The traceback that faulthandler prints after a signal says where, not why.
_TRACEBACK: Final = re.compile(r'Fatal Python error|(?:Current )?[Tt]hread 0x|  File "|Extension modules:')
# Of "out of memory": what torch says of other processes and of its own settings.
_TENANTS: Final = re.compile(r" GPU \d+ has a total capacity.*")


def describe(returncode: int | None, lines: tuple[str, ...], name: str = "the engine process") -> str:
    """The clause on how a process ended and, where its last lines tell, why; without a full stop."""
    return f"{name} {_how(returncode)}{_why(returncode, lines)}"


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "broke the connection"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = f", {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        name = ""
    return f"died (signal {-returncode}{name})"


def _why(returncode: int | None, lines: tuple[str, ...]) -> str:
    text = "\n".join(lines)
    cause = next((meaning for pattern, meaning in _CAUSES if re.search(pattern, text)), None)
    lines = tuple(line for line in lines if not _TRACEBACK.match(line))
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    if cause is None and returncode == -signal.SIGKILL and not errors:
        cause, lines = "killed from outside, perhaps by the system because host memory ran out", ()
    said = errors or list(lines)
    quoted = f' (it said: "{_TENANTS.sub("", said[-1])}")' if said else ""
    return (f": {cause}" if cause else "") + quoted

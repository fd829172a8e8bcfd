"""Decoder processes, from the server's side: started when first needed, watched, and replaced.

Each thread of a pool owns one process (`worker.py`) and gives it one job at a time, so the pool's queue is
the queue. A process that takes too long is killed, one that crashes is noticed; either costs the one request
that it was working for. What a process answers is checked like anything from outside.

Pixels come through memory that both share (`core/resources.py`); through the pipe where there is not enough.
Measured (2 cores, Linux): 0.4 ms for a small picture and 1 to 2 ms for a megapixel beyond decoding it in this
process. So every picture takes this way, however small.
"""

import asyncio
import contextlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import IO, Any, Literal, TypeVar, cast

from PIL import Image

from snugvl.core import resources
from snugvl.core.messages import Picture
from snugvl.core.resources import Region, Worker
from snugvl.core.sizes import MIB
from snugvl.errors import EngineUnavailable, ImageError, ImageTooLarge, SnugvlError
from snugvl.inputs.frames import VideoLimits
from snugvl.inputs.image import ImageLimits
from snugvl.server.media import pipe

if sys.platform == "linux":
    import fcntl

T = TypeVar("T")
Kind = Literal["pictures", "videos"]
_PIPE_BYTES = MIB  # what Linux lets any user have
_REGION_BYTES = 48 * MIB  # 16 megapixels, the most that Qwen3-VL reads of a picture
_START_S = 60.0
WORKER = "snugvl.server.media.worker"
_SIZE_S = 15.0
_HEAD_BYTES = 1 << 18  # of a file, with which its size is looked for; all of it where that isn't enough
_LEFT_S = 1.0  # that a job still gets whose client has left: cheaper than a new process
_THRIFT = {**resources.ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _Gone(Exception):
    """The process ended before it answered."""


class _TooSlow(_Gone):
    """The process was killed at the time limit."""


class Decoders:
    """Up to `workers` processes that decode. Safe to use from several threads and event loops."""

    def __init__(self, kind: Kind, workers: int, memory_bytes: int) -> None:
        self._kind: Kind = kind
        self._memory_bytes = memory_bytes
        self._mine = threading.local()
        self._processes: set[_DecoderProcess] = set()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"snugvl-{kind}")
        # Without a call of `close` no process is left behind either.
        self._finalizer = weakref.finalize(self, _end, self._processes)

    async def size(self, data: bytes, limits: ImageLimits, name: str) -> int:
        """Pixels of a picture by its head; 0 of one that won't be decoded."""
        job = {"kind": "size", "name": name, "decode_s": _SIZE_S}
        pixels = 0
        for count in sorted({min(_HEAD_BYTES, len(data)), len(data)}):
            pixels = await self._run(self._size, job, data[:count])
            if pixels:
                break
        return pixels if pixels <= limits.max_pixels else 0

    async def picture(
        self, data: bytes, limits: ImageLimits, decode_s: float, name: str, max_pixels: int | None = None,
        *, note: Callable[[str], object] = str,
    ) -> Picture:  # fmt: skip
        """Decode a picture. `max_pixels`: number of pixels by its header; `note`: as in `open_image`.

        Raises:
            ImageError, ImageTooLarge: it can't be decoded.
        """
        job = {"kind": "picture", "name": name, "limits": asdict(limits), "decode_s": decode_s}
        most = limits.max_pixels if max_pixels is None else max_pixels
        pictures, _, notes = await self._run(self._decode, job, data, most, 1)
        for text in notes:
            note(text)
        return pictures[0]

    async def video(
        self, data: bytes, limits: VideoLimits, fps: float | None, name: str
    ) -> tuple[list[Image.Image], list[float]]:
        """Decode frames of a video or an animation, with their times in seconds.

        Raises:
            ImageError, ImageTooLarge: it can't be.
        """
        job = {
            "kind": "video",
            "name": name,
            "limits": asdict(limits),
            "fps": fps,
            "decode_s": limits.decode_s,
        }
        frames, times, _ = await self._run(
            self._decode, job, data, limits.max_total_pixels, limits.max_frames
        )
        return [frame.image for frame in frames], times

    async def warm(self) -> tuple[str, ...]:
        """Start one process now, so that the first picture doesn't wait for it.

        Returns:
            What it could do to others, were it taken over (`confine.py`); nothing where it is confined.
        """
        process = await asyncio.get_running_loop().run_in_executor(self._threads, self._process)
        return process.left

    def close(self) -> None:
        """End all processes; jobs they were working on fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        _end(self._processes)
        self._threads.shutdown(wait=True)
        _end(self._processes)

    async def _run(self, work: Callable[..., T], job: dict[str, Any], data: bytes, *limits: int) -> T:
        """Run a job in a thread and return its result; a cancelled caller ends it."""
        at_work: list[_DecoderProcess] = []
        found: list[T] = []  # not the future's result, which the thread keeps for a moment longer
        try:
            future = self._threads.submit(lambda: found.append(work(job, data, at_work, *limits)))
        except RuntimeError:  # the threads are shut down
            raise EngineUnavailable("the server is stopping") from None
        waited = asyncio.wrap_future(future)
        try:
            await asyncio.shield(waited)
            return found.pop()
        except asyncio.CancelledError:
            if not future.cancel():  # it is being decoded, and counts until that has ended
                _, running = await asyncio.wait([waited], timeout=_LEFT_S)
                if running:
                    for process in at_work:
                        process.interrupt()
                    await asyncio.wait([waited])
                waited.exception()
            raise

    def _size(self, job: dict[str, Any], data: bytes, at_work: "list[_DecoderProcess]") -> int:
        header, _ = self._ask(job, data, at_work, 0)
        width, height = header.get("width"), header.get("height")
        if not (isinstance(width, int) and isinstance(height, int) and width >= 0 and height >= 0):
            self._drop(self._process())
            raise _decode_error(job["name"])
        return width * height

    def _decode(
        self,
        job: dict[str, Any],
        data: bytes,
        at_work: "list[_DecoderProcess]",
        max_pixels: int,
        max_frames: int,
    ) -> tuple[list[Picture], list[float], list[str]]:
        header, pixels = self._ask(job, data, at_work, 3 * max_pixels)
        if "error" in header:
            kind = ImageTooLarge if header["error"] == "ImageTooLarge" else ImageError
            raise kind(str(header.get("message")))
        try:
            return *pipe.pictures(header, pixels, max_pixels, max_frames), pipe.notes(header)
        except pipe.BrokenMessage:
            self._drop(self._process())
            raise _decode_error(job["name"]) from None

    def _ask(
        self, job: dict[str, Any], data: bytes, at_work: "list[_DecoderProcess]", max_payload: int
    ) -> tuple[dict[str, Any], bytearray | memoryview]:
        """The answer of this thread's process. A process that did not answer in full is never used again."""
        process = self._process()
        at_work.append(process)
        try:
            return process.call(job, data, max_payload, job["decode_s"])
        except _TooSlow:
            self._drop(process)
            raise ImageError(
                f"{job['name']} took longer than {job['decode_s']:g} s to decode; "
                "convert it to PNG or JPEG, or scale it down"
            ) from None
        except _Gone:
            self._drop(process)
            raise _decode_error(job["name"]) from None
        except BaseException:
            self._drop(process)
            raise

    def _process(self) -> "_DecoderProcess":
        """The decoder process of the calling thread, started where none is alive."""
        process: _DecoderProcess | None = getattr(self._mine, "process", None)
        if process is None or not process.alive:
            if process is not None:
                self._drop(process)
            try:
                process = _DecoderProcess(self._kind, self._memory_bytes)
            except OSError:
                raise _start_error() from None
            self._processes.add(process)
            self._mine.process = process
            process.wait_ready()
        return process

    def _drop(self, process: "_DecoderProcess") -> None:
        self._mine.process = None
        self._processes.discard(process)
        process.end()


class _DecoderProcess(Worker):
    """One decoder process, used by one thread. Calls block."""

    def __init__(self, kind: Kind, memory_bytes: int) -> None:
        self._region = region = Region.made(_REGION_BYTES)
        shared, inherited = ((), ()) if region is None else (region.arguments, (region.descriptor,))
        try:
            super().__init__(WORKER, (kind, str(memory_bytes), *shared), _THRIFT, inherited)
        finally:
            if region is not None:
                region.keep_to_ourselves()
        self.left: tuple[str, ...] = ()
        for stream in (self._popen.stdin, self._popen.stdout):
            _widen(stream)

    def wait_ready(self) -> None:
        """Wait until it takes jobs.

        Raises:
            SnugvlError: it did not start, which is not a picture's fault.
        """
        try:
            header, _ = self._exchange(None, b"", 0, _START_S)
            self.left = tuple(map(str, header["left"]))
        except _Gone:
            self.end()
            raise _start_error() from None

    def call(
        self, job: dict[str, Any], data: bytes, max_payload: int, timeout_s: float
    ) -> tuple[dict[str, Any], bytearray | memoryview]:
        """Send a job and wait for its answer, whose pixels are there until the next call.

        Raises:
            _TooSlow, _Gone: there is none; the process must not be used again.
        """
        return self._exchange(job, data, max_payload, timeout_s)

    def interrupt(self) -> None:
        """End it under the thread that waits for its answer, which clears it away."""
        self._popen.kill()

    def end(self) -> None:
        """End it now, and give back the memory that it shares. Safe to call twice."""
        super().end()
        if self._region is not None:
            self._region.close()

    def _exchange(
        self, job: dict[str, Any] | None, data: bytes, max_payload: int, timeout_s: float
    ) -> tuple[dict[str, Any], bytearray | memoryview]:
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        with _Watchdog(self._popen, timeout_s) as watchdog:
            try:
                if job is not None:
                    pipe.send(cast(Any, stdin), job, data)
                header, pixels = pipe.receive(cast(Any, stdout), max_payload)
                found = self._shared(header["shared"], max_payload) if "shared" in header else pixels
            except (OSError, ValueError, pipe.BrokenMessage):  # ValueError: closed by `end`
                raise (_TooSlow if watchdog.fired else _Gone) from None
        if watchdog.fired:  # in the moment after it answered: the process is dead all the same
            raise _TooSlow
        return header, found

    def _shared(self, count: object, max_payload: int) -> memoryview:
        """The pixels that the process reports to have written into the shared memory."""
        if self._region is None or not isinstance(count, int) or not 0 <= count <= max_payload:
            raise pipe.BrokenMessage("no such pixels")
        return self._region.view[:count]  # shorter, where the region is


class _Watchdog:
    """Kills a process unless it is left in time."""

    def __init__(self, popen: "subprocess.Popen[bytes]", timeout_s: float) -> None:
        self._popen = popen
        self._lock = threading.Lock()
        self._left = False
        self.fired = False
        self._timer = threading.Timer(timeout_s, self._fire)
        self._timer.daemon = True

    def __enter__(self) -> "_Watchdog":
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._left = True

    def _fire(self) -> None:
        with self._lock:
            if not self._left:
                self.fired = True
                self._popen.kill()


def _widen(stream: IO[bytes] | None) -> None:
    """A larger buffer for a pipe, on Linux: fewer turns between the processes for each picture."""
    if sys.platform == "linux" and stream is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def memory_for_pictures(limits: ImageLimits) -> int:
    """Bytes of address space in which the largest allowed picture can be decoded.

    Pillow holds 4 bytes a pixel, and five such copies while it composites transparency on white and turns
    the result upright; then 3 as they are sent.
    """
    return 24 * limits.max_pixels + 2 * limits.max_bytes + 256 * MIB


def memory_for_videos(limits: VideoLimits) -> int:
    """Bytes for the largest allowed video: a decoder's reference frames, and the frames that are kept."""
    return 32 * 4 * limits.max_frame_pixels + 8 * limits.max_total_pixels + 2 * limits.max_bytes + 512 * MIB


def _start_error() -> SnugvlError:
    return SnugvlError("the picture decoder did not start; see whether memory or processes are short")


def _decode_error(name: str) -> ImageError:
    return ImageError(f"{name} could not be decoded: the decoder failed on it; convert it to PNG or JPEG")


def _end(processes: "set[_DecoderProcess]") -> None:
    for process in list(processes):
        process.end()
    processes.clear()

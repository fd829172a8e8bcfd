"""The process that decodes: bytes of strangers in, RGB pixels out.

Started by `decoders.py` with pipes for stdin and stdout, and with memory for pixels that both share.
Everything it needs is imported first; then it gives up what it can: memory beyond a limit, new files and
sockets, core dumps (`shut_doors`), and what it could do to other processes (`confine.py`). A decoder that
crashes, hangs or is taken over has no network, no files and no secrets in its environment; on Linux it can't
read, signal or limit another process nor run a program. All that it can do is to answer: with pixels, true or
not, in memory whose size is sealed (`core/resources.py`).
"""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any, BinaryIO

from PIL import AvifImagePlugin, Image

from snugvl.core.resources import Region
from snugvl.errors import ImageError, ImageTooLarge
from snugvl.inputs.frames import Frames, VideoLimits, decode_video
from snugvl.inputs.frames import preload as preload_video_reader
from snugvl.inputs.image import FORMATS, ImageLimits, open_image
from snugvl.inputs.looks_like import hide
from snugvl.server.media import pipe
from snugvl.server.media.confine import confine

# Imported by Pillow, or by our own code, only when a rare picture needs it: by then no file can be opened.
_LATER = (
    "numpy",
    *(f"PIL.{name}" for name in ("ImageChops", "ImageCms", "ImageColor", "ImageFile", "ImageFilter")),
    *(f"PIL.{name}" for name in ("ImagePalette", "MpoImagePlugin", "PpmImagePlugin", "TiffTags")),
)

MAX_INPUT_BYTES = 1 << 32
NICE = 5  # streams that run go before pictures of those who only come


def main(kind: str, memory_bytes: int, region: Region | None) -> None:
    """Answer jobs until stdin ends. `kind`: "pictures" or "videos". `region`: for pixels, if they fit."""
    # Service managers signal every process at once, but the server first finishes what runs. It closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a C library prints must not look like an answer
    if hasattr(os, "nice"):
        os.nice(NICE)
    preload()
    if kind == "videos":
        preload_video_reader()
    os.chdir("/")  # Pillow asks for the current folder, and the server's may be removed while it runs
    pipe.send(outgoing, {"ready": True, "left": shut_doors(memory_bytes)})
    with contextlib.suppress(pipe.BrokenMessage):
        while True:
            _serve_one(incoming, outgoing, region)


def _serve_one(incoming: BinaryIO, outgoing: BinaryIO, region: Region | None) -> None:
    """Answer one job; a function of its own, so that no picture is kept while the next is waited for."""
    job, data = pipe.receive(incoming, MAX_INPUT_BYTES)
    limit_cpu(job["decode_s"])
    header, pixels = answer(job, bytes(data))
    if region is not None and region.put(pixels):
        pipe.send(outgoing, {**header, "shared": sum(map(len, pixels))})
    else:
        pipe.send(outgoing, header, *pixels)


def preload() -> None:
    """Import what decoding a picture may need."""
    Image.preinit()
    for module in _LATER:
        import_module(module)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 2  # or as many as there are cores, each with a stack


def answer(job: dict[str, Any], data: bytes) -> tuple[dict[str, Any], Sequence[memoryview]]:
    """Decode one job: a header that says what follows, and the pixels of every frame."""
    if job["kind"] == "size":
        width, height = size_of(data)
        return {"width": width, "height": height}, ()
    try:
        notes: list[str] = []
        found = _picture(job, data, notes) if job["kind"] == "picture" else _video(job, data)
        width, height = found.images[0].size
        header = {"width": width, "height": height, "timestamps": found.timestamps, "notes": notes}
        return header, [_pixels(image) for image in found.images]
    except ImageError as error:
        if isinstance(error.__context__, MemoryError):
            return _failure(ImageTooLarge(f"{job['name']} needs too much memory to decode; scale it down"))
        return _failure(error)
    except MemoryError:
        return _failure(ImageTooLarge(f"{job['name']} needs too much memory to decode; scale it down"))


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of a picture by its head; 0 and 0 for other data, or a head that is cut off."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing else runs here
            return Image.open(BytesIO(hide(data, b"moov")), formats=FORMATS).size
    except Exception:  # its plugin failed; decoding it will say why
        return 0, 0


def _failure(error: ImageError) -> tuple[dict[str, Any], Sequence[memoryview]]:
    return {"error": type(error).__name__, "message": str(error)}, ()


def _pixels(image: Image.Image) -> memoryview:
    """RGB, row by row: what `tobytes` gives, ten times faster, as the end of a PPM file."""
    file = BytesIO()
    image.save(file, "PPM")
    return file.getbuffer()[-3 * image.width * image.height :]


def _picture(job: dict[str, Any], data: bytes, notes: list[str]) -> Frames:
    image = open_image(
        data, limits=ImageLimits(**job["limits"]), name=job["name"], quote=False, note=notes.append
    )
    return Frames([image], [0.0])


def _video(job: dict[str, Any], data: bytes) -> Frames:
    return decode_video(data, VideoLimits(**job["limits"]), job["fps"], job["name"])


def shut_doors(memory_bytes: int) -> tuple[str, ...]:
    """Limit this process from here on; what a system doesn't have (Windows) stays as it is.

    Returns:
        What `confine` says is left to do to others; it comes last but for the limits, which need no file.
    """
    try:
        import resource
    except ImportError:
        return confine()
    limits = [(resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)]
    if sys.platform == "linux":  # elsewhere the address space isn't what is used
        limits.append((resource.RLIMIT_AS, _address_space() + memory_bytes))
    left = confine()
    for kind, limit in limits:
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))
    return left


def limit_cpu(seconds: float) -> None:
    """Let the system end this process after about that much more processor time, as a last resort."""
    try:
        import resource
    except ImportError:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + 2 * seconds * (os.cpu_count() or 1)) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )


def _address_space() -> int:
    """Bytes of address space in use, most of it libraries that are hardly touched; without /proc a guess."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - before pathlib is worth its import
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Region.inherited(*sys.argv[3:]) if sys.argv[3:] else None)

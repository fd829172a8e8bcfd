"""Video files for tests, written with PyAV."""

from fractions import Fraction
from io import BytesIO

import av
import numpy as np


def film(
    container: str = "mp4",
    codec: str = "mpeg4",
    *,
    frames: int = 50,
    fps: int = 10,
    size: tuple[int, int] = (64, 48),
    key_every: int = 12,
    pixels: str = "yuv420p",
) -> bytes:
    """Frame i is grey, level 4·i modulo 240."""
    file = BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps, options=codec_options(codec))
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = key_every
        stream.codec_context.time_base = Fraction(1, fps)
        stream.bit_rate = 2_000_000
        for index in range(frames):
            level = 4 * index % 240
            pixel = np.full((size[1], size[0], 3), level, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixel)))
        output.mux(stream.encode())
    return file.getvalue()


def codec_options(codec: str) -> dict[str, str]:
    """Options of an encoder: x265 is quiet, and has one thread (with its own it once ended the process)."""
    return {"x265-params": "log-level=none:pools=none:frame-threads=1"} if codec == "libx265" else {}


def sound() -> bytes:
    """An MP4 with nothing but silence in it."""
    file = BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()

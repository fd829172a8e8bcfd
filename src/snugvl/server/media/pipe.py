"""Messages between the server and its decoders: a JSON header, then raw bytes. No pickle on purpose.

┌ header bytes, payload bytes (u32, u64, big-endian) ┬ header: JSON ┬ payload ┐
"""

import json
import struct
from io import BytesIO
from typing import Any, BinaryIO

from PIL.PpmImagePlugin import PpmImageFile

from snugvl.core.messages import Picture
from snugvl.core.resources import write_all

_NOTE = 400  # characters of what is said of a file
_LENGTHS = struct.Struct(">IQ")
_MAX_HEADER_BYTES = 64 * 1024


class BrokenMessage(Exception):
    """The other side is gone, or sent what is not a message."""


def send(stream: BinaryIO, header: dict[str, Any], *payload: bytes | bytearray | memoryview) -> None:
    """Write one message. Blocks."""
    encoded = json.dumps(header).encode()
    size = sum(map(len, payload))
    for piece in (_LENGTHS.pack(len(encoded), size) + encoded, *payload):
        write_all(stream, piece)


def receive(stream: BinaryIO, max_payload: int) -> tuple[dict[str, Any], bytearray]:
    """Read one message. Blocks.

    Raises:
        BrokenMessage: the stream ended, or its lengths are beyond the limits.
    """
    header_size, payload_size = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    if header_size > _MAX_HEADER_BYTES or payload_size > max_payload:
        raise BrokenMessage(f"header of {header_size} bytes, payload of {payload_size}")
    try:
        header = json.loads(_exactly(stream, header_size))
    except ValueError:
        raise BrokenMessage("header is not JSON") from None
    if not isinstance(header, dict):
        raise BrokenMessage("header is not an object")
    return header, _exactly(stream, payload_size)


def _exactly(stream: BinaryIO, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = stream.readinto(view[done:])  # type: ignore[attr-defined] # pipes and files have it
        if not count:
            raise BrokenMessage("the stream ended")
        done += count
    return data


def pictures(
    header: dict[str, Any], pixels: bytearray | memoryview, max_pixels: int, max_frames: int
) -> tuple[list[Picture], list[float]]:
    """Pictures out of an answer whose every number is doubted."""
    width, height, times = header.get("width"), header.get("height"), header.get("timestamps")
    if not (isinstance(width, int) and isinstance(height, int) and isinstance(times, list)):
        raise BrokenMessage("no size")
    count, frame = len(times), 3 * width * height
    if min(width, height, count) < 1 or count > max_frames or width * height * count > max_pixels:
        raise BrokenMessage("too large")
    if len(pixels) != count * frame or not all(isinstance(time, float) for time in times):
        raise BrokenMessage("pixels don't match the size")
    view = memoryview(pixels)
    return [_picture(width, height, view[i * frame : (i + 1) * frame]) for i in range(count)], times


def notes(header: dict[str, Any]) -> list[str]:
    """Notes on parts of a file that weren't looked at, each as long as ours at most."""
    found = header.get("notes", [])
    if not isinstance(found, list) or len(found) > 1 or not all(isinstance(note, str) for note in found):
        raise BrokenMessage("no notes")
    return [note[:_NOTE] for note in found]


def _picture(width: int, height: int, pixels: memoryview) -> Picture:
    """A copy of the pixels, as a file that is decoded only if the image is looked at, which is rare."""
    head = b"P6 %d %d 255\n" % (width, height)
    data = b"".join((head, pixels))
    return Picture(PpmImageFile(BytesIO(data)), pixels=memoryview(data)[len(head) :])

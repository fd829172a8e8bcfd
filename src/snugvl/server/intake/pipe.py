"""Messages between the server and its decoders: a JSON header, then raw bytes. No pickle on purpose.

┌ header bytes, payload bytes (u32, u64, big-endian) ┬ header: JSON ┬ payload ┐
"""

import json
import struct
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">IQ")
_MAX_HEADER_BYTES = 64 * 1024


class BrokenMessage(Exception):
    """The other side is gone, or sent what is no message."""


def send(stream: BinaryIO, header: dict[str, Any], *payload: bytes | bytearray | memoryview) -> None:
    """Write one message. Blocks."""
    encoded = json.dumps(header).encode()
    size = sum(map(len, payload))
    for piece in (_LENGTHS.pack(len(encoded), size) + encoded, *payload):
        view = memoryview(piece)
        while view:  # an unbuffered pipe may take only a part
            view = view[stream.write(view) :]


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

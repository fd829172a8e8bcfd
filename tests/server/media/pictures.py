"""Files for the corpus: honest ones, and ones that claim, lack or hide something."""

import struct
import zlib
from functools import cache
from io import BytesIO

from PIL import Image


def encoded(kind: str, size: tuple[int, int] = (8, 6), mode: str = "RGB", **options: object) -> bytes:
    file = BytesIO()
    Image.new(mode, size, 200 if mode == "L" else "red").save(file, kind, **options)
    return file.getvalue()


def animation(kind: str, frames: int = 6, size: tuple[int, int] = (16, 12), delay_ms: int = 250) -> bytes:
    """Frame i is grey, level 20·i."""
    images = [Image.new("RGB", size, (20 * i, 20 * i, 20 * i)) for i in range(frames)]
    file = BytesIO()
    extra = {"lossless": True} if kind == "WEBP" else {}
    images[0].save(file, kind, save_all=True, append_images=images[1:], duration=delay_ms, loop=0, **extra)
    return file.getvalue()


def png(width: int, height: int, body: bytes = b"", *, kind: int = 2) -> bytes:
    """A PNG whose header claims that size."""
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@cache
def png_bomb(width: int, height: int) -> bytes:
    """A true picture, all black, grey: a few kilobytes for tens of megapixels."""
    compressor = zlib.compressobj(9)
    row = bytes(1 + width)
    body = b"".join(compressor.compress(row * 64) for _ in range(height // 64)) + compressor.flush()
    return png(width, height // 64 * 64, body, kind=0)


def gif_claim(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + encoded("GIF")[10:]


def jpeg_claim(width: int, height: int) -> bytes:
    data = bytearray(encoded("JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def bmp_claim(width: int, height: int) -> bytes:
    data = bytearray(encoded("BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def tiff_claim(width: int, height: int) -> bytes:
    data = bytearray(encoded("TIFF"))
    for tag, value in ((256, width), (257, height)):
        place = data.index(struct.pack("<HH", tag, 4))  # a LONG
        data[place + 8 : place + 12] = struct.pack("<I", value)
    return bytes(data)


def webp_claim(width: int, height: int) -> bytes:
    """An extended WebP (VP8X) whose canvas is that large."""
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + encoded("WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def avif_claim(width: int, height: int) -> bytes:
    data = bytearray(encoded("AVIF"))
    place = data.index(b"ispe")
    data[place + 8 : place + 16] = struct.pack(">II", width, height)
    return bytes(data)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

"""Files as phones, cameras, browsers and scanners write them, by real encoders: x265, libaom, FFmpeg, Pillow.

All show a scene of four quarters, so that one sees which side is up. What no encoder at hand writes is made
of what they wrote: another brand in `ftyp`, a depth map from an alpha plane, a track beside a still picture.
"""

import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from io import BytesIO

import av
import numpy as np
import pillow_heif
from PIL import Image

from snugvl.inputs import image as _image  # noqa: F401 - pi_heif is what reads HEIC
from tests.server.media.films import codec_options

# pillow_heif makes Pillow write HEIC; what reads it stays what users have.
_READER = Image.OPEN["HEIF"]
pillow_heif.register_heif_opener()
Image.OPEN["HEIF"] = _READER

SIZE = (64, 48)
QUARTERS = ((230, 20, 20), (20, 200, 20), (20, 20, 220), (230, 220, 20))  # in the order in which one reads


def scene(size: tuple[int, int] = SIZE, shift: int = 0) -> Image.Image:
    """Four quarters; `shift`: by how many they are moved on, so that frames differ."""
    quarters = [QUARTERS[(index + shift) % 4] for index in range(4)]
    small = Image.new("RGB", (2, 2))
    small.putdata(quarters)
    return small.resize(size, Image.Resampling.NEAREST)


def quarters_of(image: Image.Image) -> tuple[int, ...]:
    """Which quarter is seen where, by the nearest colour."""
    width, height = image.size
    seen = []
    for x, y in ((1, 1), (3, 1), (1, 3), (3, 3)):
        pixel = np.asarray(image.convert("RGB").getpixel((x * width // 4, y * height // 4)), int)
        seen.append(int(np.abs(np.asarray(QUARTERS, int) - pixel).sum(1).argmin()))
    return tuple(seen)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def moving(kind: str, frames: int = 4, **options: object) -> bytes:
    rest = [scene(shift=shift) for shift in range(1, frames)]
    return saved(scene(), kind, save_all=True, append_images=rest, duration=200, loop=0, **options)


def sideways() -> Image.Image:
    """As a sensor lies that is held upright: turned by its EXIF orientation it is `SCENE`, 64 high."""
    image = scene((48, 64)).transpose(Image.Transpose.ROTATE_90)
    image.getexif()[0x0112] = 6
    return image


def heic(**options: object) -> bytes:
    return saved(scene(), "HEIF", quality=90, **options)


def turned_jpeg() -> bytes:
    image = sideways()
    return saved(image, "JPEG", quality=95, exif=image.getexif())


def heic_ten_bits() -> bytes:
    samples = np.asarray(scene()).astype(np.uint16) * 257
    file = BytesIO()
    pillow_heif.from_bytes("RGB;16", SIZE, samples.tobytes()).save(file, quality=90)
    return file.getvalue()


def heic_with_depth() -> bytes:
    """An alpha plane is an auxiliary picture, and so is a depth map: only its type's last digit differs."""
    image = scene().convert("RGBA")
    data = saved(image, "HEIF", quality=90)
    assert data.count(b"auxid:1") == 1
    return data.replace(b"auxid:1", b"auxid:2")


def heic_burst() -> bytes:
    """Three pictures, of which the second is the main one."""
    first, last = scene(shift=2), scene(shift=3)
    return saved(first, "HEIF", save_all=True, append_images=[scene(), last], primary_index=1, quality=90)


def branded(brand: bytes) -> bytes:
    data = heic()
    return data[:8] + brand + data[12:]


@cache
def film(container: str = "mp4", codec: str = "libx264", frames: int = 8) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=4, options={"crf": "20", **codec_options(codec)})
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 4)
        for _ in range(frames):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(scene()))))
        output.mux(stream.encode())
    return file.getvalue()


def sequence(brand: bytes) -> bytes:
    """A HEIF image sequence: a track of pictures, no still one."""
    made = film(codec="libx265")
    length = int.from_bytes(made[:4])
    head = struct.pack(">I4s4sI", 28, b"ftyp", brand, 0) + b"msf1hevciso8"
    assert length == len(head)  # so that the places of samples stay right
    return head + made[length:].replace(b"vide", b"pict", 1)


def heic_live() -> bytes:
    """A still picture, and a track beside it, in one file."""
    still, track = heic(), sequence(b"msf1")
    length = int.from_bytes(track[:4])
    moved = bytearray(track[length:])
    at = moved.index(b"stco") + 8  # behind its flags: how many, and where each chunk is
    for chunk in range(int.from_bytes(moved[at : at + 4])):
        place = at + 4 + 4 * chunk
        where = int.from_bytes(moved[place : place + 4]) + len(still) - length
        moved[place : place + 4] = where.to_bytes(4)
    return still + bytes(moved)


def tiff_pages() -> bytes:
    pages = [scene().convert("CMYK"), scene(shift=1).convert("CMYK")]
    return saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])


def png_sixteen_bits() -> bytes:
    """16 bits of grey, as scanners and cameras of microscopes write them."""
    grey = np.asarray(scene().convert("L")).astype(np.uint16) * 257
    return saved(Image.fromarray(grey), "PNG")


PICTURES: dict[str, Callable[[], bytes]] = {
    "phone.jpg": turned_jpeg,
    "still.heic": heic,
    "turned.heic": lambda: saved(sideways(), "HEIF", quality=90),
    "ten.heic": heic_ten_bits,
    "tiles.heic": lambda: saved(scene((1280, 960)), "HEIF", quality=60, grid_tile_size=512),
    "depth.heic": heic_with_depth,
    "live.heic": heic_live,
    **{f"{brand}.heif": lambda brand=brand: branded(brand.encode())  # type: ignore[misc]
       for brand in ("heix", "heim", "heis", "mif1", "msf1")},
    "still.avif": lambda: saved(scene(), "AVIF", quality=90),
    "scan.png": png_sixteen_bits,
    "scan.tif": lambda: saved(scene().convert("CMYK"), "TIFF"),
    "screen.bmp": lambda: saved(scene(), "BMP"),
    "camera.mpo": lambda: saved(
        scene(), "MPO", save_all=True, append_images=[scene((16, 12), 1)], quality=95
    ),
}  # fmt: skip
SEVERAL: dict[str, Callable[[], bytes]] = {
    "moves.gif": lambda: moving("GIF"),
    "moves.webp": lambda: moving("WEBP", lossless=True),
    "moves.png": lambda: moving("PNG"),
    "moves.avif": lambda: moving("AVIF", quality=90),
    "burst.heic": heic_burst,
}
FILMS: dict[str, Callable[[], bytes]] = {
    "phone.mp4": film,
    "phone.mov": lambda: film("mov", "libx265"),
    "msf1.heics": lambda: sequence(b"msf1"),
    "hevc.heics": lambda: sequence(b"hevc"),
}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "scan.pdf": (lambda: saved(scene(), "PDF"), "it looks like a PDF; export the page as PNG first"),
    "pages.tif": (tiff_pages, "has 2 pages; extract one page as PNG first"),
}

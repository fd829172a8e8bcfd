"""Every kind of bad file gets one line that names it and says what to do; colours equal transformers'."""

import contextlib
import io
import os
import re
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pi_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from snugvl.errors import ImageError, ImageTooLarge, SnugvlWarning, warn
from snugvl.inputs import image as image_module
from snugvl.inputs.image import FORMATS, ImageLimits, open_image, to_rgb
from tests import phone_files  # noqa: F401 - it makes Pillow write HEIC
from tests.draws import draws


def picture(width: int = 40, height: int = 30, mode: str = "RGB", seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    # Smooth, so that lossy formats stay close and files stay small.
    small = Image.fromarray(values[..., 0] if bands == 1 else values[..., :3])
    image = small.resize((4, 4)).resize((width, height))
    if mode in ("RGBA", "LA"):
        image = image.convert(mode[:-1])
        image.putalpha(Image.linear_gradient("L").resize((width, height)))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises that many pixels in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


def animation(kind: str) -> bytes:
    frames = [picture(seed=i) for i in range(12)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


PNG, JPEG = encoded(picture(400, 300), "PNG"), encoded(picture(400, 300), "JPEG")

# file name → content, what the message must say
CORPUS: dict[str, tuple[bytes, str]] = {
    "text.png": (b"This is no picture, only text.\n" * 9, r"looks like text; send a JPEG"),
    "utf16.png": ("Guten Tag".encode("utf-16"), r"unknown data \(it starts with"),
    "empty.jpg": (b"", r"is empty \(0 bytes\)"),
    "page.jpg": (b"<!DOCTYPE html><html><body>404", r"an HTML page.*download the picture itself"),
    "drawing.svg": (
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
        r"SVG.*export it as PNG",
    ),
    "paper.png": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", r"a PDF; export the page as PNG"),
    "film.jpg": (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00", r"a video \(MP4.*extract a frame"),
    "IMG_0001.CR3": (
        b"\x00\x00\x00\x18ftypcrx \x00\x00\x00\x01crx isom",
        "a camera's raw file; export it as JPEG",
    ),
    "film.webm": (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01", r"a video \(Matroska.*extract a frame"),
    "phone.heic": (
        b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00",
        r"a damaged HEIC photo; copy",
    ),
    "film.avi": (b"RIFF\x00\x00\x00\x00AVI LIST", r"a video \(AVI\)"),
    "sound.wav": (b"RIFF\x00\x00\x00\x00WAVEfmt ", r"an audio file"),
    "broken.webp": (b"RIFF\x00\x00\x00\x00WEBPVP8 ", r"a damaged WebP"),
    "archive.png": (b"PK\x03\x04\x14\x00\x00\x00", r"ZIP archive"),
    "lfs.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", r"git lfs pull"),
    "data.json": (b'{"image": "x"}', r"JSON text; send a picture"),
    "icon.ico": (encoded(picture(32, 32), "ICO"), r"a Windows icon; convert it to PNG"),
    "net.ppm": (encoded(picture(), "PPM"), r"unknown data .*; send a JPEG"),
    "random.bin": (bytes(range(200, 256)) * 20, r"unknown data \(it starts with c8 c9"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], r"damaged or incomplete \(.*truncated.*copy or download it again"),
    "head.jpg": (JPEG[:20], r"a damaged JPEG file; copy or download"),
    "cut.png": (PNG[: len(PNG) // 2], r"damaged or incomplete"),
    "flipped.png": (PNG[:60] + bytes(200) + PNG[260:], r"damaged or incomplete|a damaged PNG"),
    "magic.png": (b"\x89PNG\r\n\x1a\n", r"a damaged PNG file"),
    "zero.png": (png_header(0, 10), r"0×10 pixels|a damaged PNG"),
    "cut.tif": (encoded(picture(400, 300), "TIFF", compression="tiff_lzw")[:300], r"damaged"),
    "cut.gif": (encoded(picture(400, 300), "GIF")[:40], r"damaged"),
    "cut.bmp": (encoded(picture(400, 300), "BMP")[:90], r"damaged"),
    "pages.tif": (animation("TIFF"), r"has 12 pages; extract one page"),
    "float.tif": (encoded(Image.new("F", (8, 8)), "TIFF"), r"32-bit samples \(mode F\); convert"),
    "long.tif": (encoded(Image.new("I", (8, 8)), "TIFF"), r"32-bit samples \(mode I\)"),
}
TOO_LARGE = {
    "bomb.png": (png_header(30_000, 30_000), r"30,000×30,000 = 900,000,000 pixels, the limit is|far larger"),
    "wide.png": (png_header(12_000, 9_000), r"12,000×9,000 = 108,000,000 pixels.*scale it down"),
}


def refused(source: Any, limits: ImageLimits | None = None) -> ImageError:
    """The error of a bad picture; any warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError) as raised:
            open_image(source, limits=limits)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return raised.value


@pytest.mark.parametrize("name", CORPUS | TOO_LARGE)
def test_bad_files(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data, message = (CORPUS | TOO_LARGE)[name]
    path = tmp_path / name
    path.write_bytes(data)
    error = refused(path)
    assert re.search(message, str(error)), str(error)
    assert str(error).startswith(str(path))
    assert isinstance(error, ImageTooLarge) == (name in TOO_LARGE)
    # The same as bytes and as a stream, by another name.
    assert str(refused(data)).startswith("the image ")
    assert type(refused(io.BytesIO(data))) is type(error)
    assert capfd.readouterr() == ("", "")  # C libraries don't write either


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "doesn't exist; check the path" in str(refused(tmp_path / "no.png"))
    assert "is a folder; give a picture in it" in str(refused(tmp_path))
    assert "is a URL, not a file" in str(refused("https://example.com/a.png"))
    assert "can't be read" in str(refused("a\0b.png"))
    assert "can't be read" in str(refused("x" * 5000))
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    assert "can't be read" in str(refused(loop))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(PNG)
    path.chmod(0)
    assert "permission denied" in str(refused(path))


def test_no_permission_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret.png"
    path.write_bytes(PNG)
    monkeypatch.setattr(Path, "open", deny)
    assert str(refused(path)) == f"{path} can't be read: permission denied; check its access rights"


def test_byte_limit_of_files_bytes_and_endless_streams(tmp_path: Path) -> None:
    limits = ImageLimits(max_bytes=100)
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert f"has {len(PNG):,} bytes, the limit is 100" in str(refused(path, limits))
    assert isinstance(refused(PNG, limits), ImageTooLarge)

    class Endless(io.RawIOBase):
        served = 0

        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= 1 << 20
            self.served += size
            return bytes(size)

    stream = Endless()
    assert isinstance(refused(stream, limits), ImageTooLarge)
    assert stream.served == 101
    assert isinstance(refused("/dev/zero", limits), ImageTooLarge)


def test_pixel_limit_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda _: pytest.fail("decoded"))
    error = refused(PNG, ImageLimits(max_pixels=1000))
    assert "400×300 = 120,000 pixels, the limit is 1,000; scale it down" in str(error)


def test_standard_input_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin(io.BytesIO):
        name = "<stdin>"

    assert str(refused(Stdin(b""))) == "standard input is empty (0 bytes); send a picture"
    assert open_image(Stdin(PNG)).size == (400, 300)


READABLE: dict[str, Callable[[Image.Image], bytes]] = {
    kind: lambda image, kind=kind: encoded(image, kind)
    for kind in FORMATS  # type: ignore[misc]
}


@pytest.mark.parametrize("kind", READABLE)
def test_every_format_reads_from_every_source(kind: str, tmp_path: Path) -> None:
    data = READABLE[kind](picture())
    path = tmp_path / "any.name"
    path.write_bytes(data)
    images = [open_image(path), open_image(str(path)), open_image(data), open_image(io.BytesIO(data))]
    for image in images:
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert image.tobytes() == images[0].tobytes()
    assert np.abs(np.asarray(images[0]).astype(int) - np.asarray(picture())).mean() < 12


def test_the_first_picture_of_a_phone_photo() -> None:
    first = picture(64, 48)
    data = encoded(first, "MPO", save_all=True, append_images=[picture(16, 16)])
    assert open_image(data).size == (64, 48)


def test_no_other_decoder_of_pillows_is_tried() -> None:
    always = {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "HEIF"}
    assert always <= set(FORMATS) <= {*always, "AVIF"}


@pytest.mark.parametrize("first", ["snugvl.inputs.image", "pillow_heif"])
def test_a_program_may_have_pillow_heif_too(first: str) -> None:
    """Whichever opener comes last: the program goes on writing HEIC, and both read it."""
    code = f"""
import io
from PIL import Image
import pillow_heif
if {first == "pillow_heif"}:
    pillow_heif.register_heif_opener()
from snugvl.inputs.image import open_image
if {first != "pillow_heif"}:
    pillow_heif.register_heif_opener()
file = io.BytesIO()
Image.new("RGB", (40, 30), "red").save(file, "HEIF")
for image in (open_image(file.getvalue()), Image.open(file)):
    assert image.size == (40, 30), image
    assert image.convert("RGB").getpixel((20, 15))[0] > 200, image
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_what_reads_heic_has_no_encoder() -> None:
    """x265, which pillow-heif's wheels hold, is GPL; this is what users install."""
    assert Image.OPEN["HEIF"][0].__module__.partition(".")[0] == "pi_heif"
    assert set(pi_heif.libheif_info()["encoders"]) <= {"mask"}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_equals_pillows(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(40, 30), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    ours = open_image(data)
    assert ours.size == expected.size
    assert ours.tobytes() == expected.tobytes()
    if orientation > 1:  # nobody turns it a second time
        assert ImageOps.exif_transpose(ours).tobytes() == ours.tobytes()


def test_corrupt_exif_counts_as_none() -> None:
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(data).size == (40, 30)


def palette(transparency: int | bytes | None) -> bytes:
    options = {} if transparency is None else {"transparency": transparency}
    return encoded(picture().quantize(16), "PNG", **options)


COLOURS = {
    "RGBA": encoded(picture(mode="RGBA"), "PNG"),
    "LA": encoded(picture(mode="LA"), "PNG"),
    "L": encoded(picture(mode="L"), "PNG"),
    "1": encoded(picture(mode="1"), "PNG"),
    "palette": palette(None),
    "palette, one transparent": palette(3),
    "palette, graded": palette(bytes(range(0, 256, 16))),
    "RGB, one transparent": encoded(Image.new("RGB", (9, 9), (1, 2, 3)), "PNG", transparency=(1, 2, 3)),
    "CMYK": encoded(picture(mode="CMYK"), "JPEG"),
    "grey JPEG": encoded(picture(mode="L"), "JPEG"),
    "GIF, transparent": encoded(picture().quantize(8), "GIF", transparency=2),
    "WebP with alpha": encoded(picture(mode="RGBA"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colours_equal_transformers(name: str) -> None:
    transforms = pytest.importorskip("transformers.image_transforms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, in the oracle
        theirs = transforms.convert_to_rgb(Image.open(io.BytesIO(COLOURS[name])), return_numpy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(np.asarray(open_image(COLOURS[name])), theirs)


def test_turned_and_transparent_at_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture().quantize(16), "PNG", transparency=3, exif=exif)
    plain = encoded(picture().quantize(16), "PNG", transparency=3)
    assert open_image(data).tobytes() == open_image(plain).transpose(Image.Transpose.ROTATE_270).tobytes()


@given(st.sampled_from(sorted(READABLE)), st.data())
@draws(150)
def test_damage_anywhere_is_an_image_error_or_a_picture(kind: str, data: st.DataObject) -> None:
    raw = bytearray(READABLE[kind](picture()))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(ImageError):
            assert open_image(bytes(raw), limits=ImageLimits(max_pixels=1_000_000)).mode == "RGB"


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(8, 0)
    image = open_image(encoded(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(np.asarray(image)[0, :, 0], np.arange(256))


def test_to_rgb_keeps_rgb_and_refuses_unreadable() -> None:
    image = picture()
    assert to_rgb(image) is image
    with pytest.raises(ImageError, match="pixels of mode RGB"):
        to_rgb(Image.open(io.BytesIO(JPEG[: len(JPEG) // 2])))


def test_threads_leave_the_warning_filters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that overlap inside `catch_warnings` would leave the first one's filters behind."""
    original = Image.open

    def slow(*args: Any, **options: Any) -> Image.Image:
        time.sleep(0.05)
        return original(*args, **options)

    monkeypatch.setattr("snugvl.inputs.image.Image.open", slow)
    before = list(warnings.filters)
    threads = [threading.Thread(target=open_image, args=(PNG,)) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_pillows_log_stays_off_the_terminal(tmp_path: Path) -> None:
    """Outside pytest, whose own log handlers would hide it."""
    data = encoded(picture(), "TIFF")
    samples = struct.pack("<HHI", 277, 3, 1)  # SamplesPerPixel
    at = data.index(samples) + len(samples)
    path = tmp_path / "samples.tif"
    path.write_bytes(data[:at] + struct.pack("<H", 2048) + data[at + 2 :])
    code = f"from snugvl.inputs.image import open_image; open_image({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "More samples per pixel" not in done.stderr
    assert done.stderr.count("ImageError: ") == 1


def test_image_and_resize_import_no_torch() -> None:
    code = "import sys, snugvl.inputs.image, snugvl.checkpoint.image_rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_animation_is_its_first_frame_and_says_so(kind: str) -> None:
    first = np.asarray(picture(seed=0)).astype(int)
    with pytest.warns(SnugvlWarning, match=r"the image is animated \(12 frames\): only its"):
        seen = open_image(animation(kind))
    assert np.abs(np.asarray(seen) - first).mean() < 12
    told: list[str] = []
    open_image(animation(kind), name="moves", note=told.append)
    assert told == [
        (
            "moves is animated (12 frames): only its first frame was looked at. For another, save it as a "
            "file of its own, or show all as a video to a model that reads videos"
        )
    ]


def test_a_warning_points_at_the_line_of_the_program() -> None:
    with pytest.warns(SnugvlWarning) as warned:
        open_image(animation("GIF"))
    assert warned[0].filename == __file__


def test_warnings_of_other_threads_are_shown_while_pillows_are_not() -> None:
    """Filters are the process's: what silences Pillow in one thread must not silence ours in another."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with image_module._quiet():
            warn("somebody else's")
    assert [str(warning.message) for warning in found] == ["somebody else's"]

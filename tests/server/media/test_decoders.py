"""Decoder processes: the same pixels as in this process, behind limits."""

import asyncio
import gc
import os
import sys
import zlib
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from snugvl.core.resources import Region
from snugvl.errors import EngineUnavailable, ImageTooLarge
from snugvl.inputs.image import open_image
from snugvl.server.media import pipe
from snugvl.server.media.decoders import Decoders, memory_for_pictures
from snugvl.server.media.loading import MediaSettings, workers_for
from tests.patience import PATIENCE_S, until_async
from tests.server.media.pictures import encoded, png_bomb
from tests.server.media.pool import LIMITS, MIB, decoded, only_process, pixels
from tests.server.media.single import Loader


def rare(kind: str) -> bytes:
    """Pictures for which Pillow imports or computes something unusual."""
    image, file = pixels(), BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    options: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "16-bit grey": (Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100), "PNG", {}),
        "palette with transparency": (image.convert("P"), "PNG", {"transparency": 3}),
        "alpha": (image.convert("RGBA"), "WEBP", {"lossless": True}),
        "CMYK": (image.convert("CMYK"), "JPEG", {}),
        "LAB": (Image.new("LAB", (20, 10), (120, 130, 140)), "TIFF", {}),
        "compressed TIFF": (image, "TIFF", {"compression": "tiff_lzw"}),
        "turned by EXIF": (image, "JPEG", {"exif": turned}),
        "two pictures of a phone": (image, "MPO", {"save_all": True, "append_images": [image]}),
        "AVIF": (image, "AVIF", {}),
        "bilevel": (image.convert("1"), "BMP", {}),
        "GIF": (image, "GIF", {}),
    }
    picture, name, extra = options[kind]
    picture.save(file, name, **extra)
    return file.getvalue()


RARE = (
    "16-bit grey",
    "palette with transparency",
    "alpha",
    "CMYK",
    "LAB",
    "compressed TIFF",
    "turned by EXIF",
    "two pictures of a phone",
    "AVIF",
    "bilevel",
    "GIF",
)


def test_pixels_are_those_of_this_process(decoders: Decoders) -> None:
    async def run() -> None:
        for kind in RARE:
            data = rare(kind)
            here, there = open_image(data), await decoded(decoders, data)
            assert there.mode == "RGB"
            assert there.size == here.size, kind
            assert there.tobytes() == here.tobytes(), kind

    asyncio.run(run())


@pytest.mark.parametrize("shared", [None, 3 * 20 * 10 - 1])
def test_pixels_without_memory_for_them_come_through_the_pipe(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, shared: int | None
) -> None:
    """No shared memory at all, or too little of it for this picture."""
    made = Region.made
    monkeypatch.setattr(Region, "made", lambda _: None if shared is None else made(shared))
    sizes, receive = [], pipe.receive

    def watched(*args: Any) -> tuple[dict[str, Any], bytearray]:
        header, payload = receive(*args)
        sizes.append(len(payload))
        return header, payload

    monkeypatch.setattr(pipe, "receive", watched)

    async def run() -> None:
        data = encoded("PNG", (20, 10))
        assert (await decoded(decoders, data)).tobytes() == open_image(data).tobytes()

    asyncio.run(run())
    assert sizes == [0, 600]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_memory_is_limited() -> None:
    async def run() -> None:
        pool = Decoders("pictures", 1, 32 * MIB)
        try:
            with pytest.raises(ImageTooLarge, match=r"^the image needs too much memory to decode; scale it"):
                await decoded(pool, png_bomb(8000, 7936))
            assert (await decoded(pool, encoded("PNG"))).size == (8, 6)
        finally:
            pool.close()

    asyncio.run(run())


@pytest.mark.slow
def test_the_largest_allowed_picture_fits_its_memory(decoders: Decoders) -> None:
    # The dearest way through Pillow: transparency, composited on white. Grey with a transparent level.
    data = png_bomb(8000, 7936)
    chunk = b"tRNS" + bytes(2)
    marked = data[:33] + b"\0\0\0\x02" + chunk + zlib.crc32(chunk).to_bytes(4, "big") + data[33:]

    async def run() -> None:
        assert (await decoded(decoders, marked, 60.0)).size == (8000, 7936)
        # Nothing of it is kept: 190 MB of pixels and several copies are given back, once it has answered.
        decoder = psutil.Process(only_process(decoders).pid)
        await until_async(lambda: decoder.memory_info().rss < 150 * MIB)

    asyncio.run(run())


def test_messages_round_trip() -> None:
    file = BytesIO()
    pipe.send(file, {"a": "ü\ud800"}, b"one", memoryview(b"two"))
    file.seek(0)
    assert pipe.receive(file, 6) == ({"a": "ü\ud800"}, bytearray(b"onetwo"))


def test_many_at_once_come_back_to_their_own_requests() -> None:
    async def run() -> None:
        intake = Loader()
        try:
            sizes = [(i + 1, 2 * i + 1) for i in range(40)]
            found = await asyncio.gather(
                *(intake.picture_bytes(encoded("PNG", size), field="a") for size in sizes)
            )
            assert [picture.image.size for picture in found] == sizes
            assert len(intake._pictures._processes) <= MediaSettings().workers
        finally:
            await intake.close()

    asyncio.run(run())


def test_closing_leaves_no_process() -> None:
    pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))

    async def run() -> None:
        await pool.warm()
        process = only_process(pool)
        pool.close()
        pool.close()
        assert process.poll() is not None
        with pytest.raises(EngineUnavailable, match="stopping"):
            await decoded(pool, encoded("PNG"))

    asyncio.run(run())


def test_a_current_folder_that_is_removed_is_no_fault_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))

    async def run() -> None:
        await pool.warm()
        gone.rmdir()
        assert (await decoded(pool, encoded("PNG", (30, 20)))).size == (30, 20)
        pool.close()

    asyncio.run(run())


def test_whoever_forgets_to_close_leaves_no_process() -> None:
    async def run() -> Any:
        pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))
        await pool.warm()
        return only_process(pool)

    process = asyncio.run(run())
    gc.collect()
    assert process.wait(PATIENCE_S) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_system_ends_a_decoder_that_nobody_watches(decoders: Decoders) -> None:
    """Each picture has its own processor time, beyond what the process has used."""

    async def run() -> None:
        await decoders.warm()
        process = psutil.Process(only_process(decoders).pid)
        for decode_s in (20.0, 2.0):
            await decoded(decoders, encoded("PNG"), decode_s)
            soft, _ = process.rlimit(psutil.RLIMIT_CPU)
            used = process.cpu_times()
            most = used.user + used.system + 2 * decode_s * (os.cpu_count() or 1) + 1
            assert 2 * decode_s <= soft <= most

    asyncio.run(run())


def test_a_picture_knows_its_file() -> None:
    async def run() -> None:
        intake = Loader()
        try:
            one, other = encoded("PNG", (100, 99)), encoded("PNG", (99, 100))
            found = [await intake.picture_bytes(data, field="a") for data in (one, one, other)]
            found.append(await intake.picture(data_url(one), field="a"))
            assert found[0].file == found[1].file == found[3].file is not None
            assert found[2].file != found[0].file
            for picture in found:
                assert picture.pixels is not None
                assert bytes(picture.pixels) == picture.image.tobytes()
        finally:
            await intake.close()

    asyncio.run(run())


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (8, 2), (12, 3), (16, 4), (128, 4)])
def test_more_cores_decode_more_at_once(cores: int, workers: int) -> None:
    assert workers_for(cores) == workers
    assert 2 <= MediaSettings().workers <= 4

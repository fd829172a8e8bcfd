"""Decoder processes: the same pixels as in this process, behind limits, whatever happens to them."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from snugvl.errors import EngineUnavailable, ImageError, ImageTooLarge, QueueFull, SnugvlError
from snugvl.inputs.image import ImageLimits, open_image
from snugvl.region import Region
from snugvl.server.intake import decoders as module
from snugvl.server.intake import pipe
from snugvl.server.intake.decoders import Decoders, memory_for_pictures
from snugvl.server.intake.intake import Intake
from snugvl.server.intake.settings import IntakeSettings, workers_for
from tests.server.intake.pictures import encoded, png_bomb

MIB = 1024 * 1024
LIMITS = ImageLimits(max_pixels=64_000_000)


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))
    yield pool
    pool.close()


async def decoded(pool: Decoders, data: bytes, decode_s: float = 20.0) -> Image.Image:
    return (await pool.picture(data, LIMITS, decode_s, "the image")).image


def pixels(size: tuple[int, int] = (31, 17)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


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


@pytest.mark.parametrize("lie", [-1, "144", 1 << 40, 143, 145, None])
def test_a_lie_about_shared_pixels_costs_the_process(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, lie: object
) -> None:
    receive = pipe.receive

    def liar(*args: Any) -> tuple[dict[str, Any], bytearray]:
        header, payload = receive(*args)
        return {**header, "shared": lie}, payload

    async def run() -> None:
        await decoders.warm()
        process = only_process(decoders)
        monkeypatch.setattr(pipe, "receive", liar)
        with pytest.raises(ImageError, match="the decoder failed on it"):
            await decoded(decoders, encoded("PNG"))
        assert process.poll() is not None

    asyncio.run(run())


def only_process(pool: Decoders) -> Any:
    (process,) = pool._processes
    return process._popen


@asynccontextmanager
async def stopped_in_the_middle(
    pool: Decoders, data: bytes, decode_s: float
) -> AsyncIterator[tuple[Any, asyncio.Task[Image.Image]]]:
    """A decoder that was given `data` and stands still."""
    await pool.warm()
    process = only_process(pool)
    os.kill(process.pid, signal.SIGSTOP)
    yield process, asyncio.create_task(decoded(pool, data, decode_s))


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
def test_a_crash_costs_one_picture(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = threading.Event(), pipe.send

    def send_and_tell(*message: Any) -> None:
        send(*message)
        sent.set()

    monkeypatch.setattr(pipe, "send", send_and_tell)

    async def run() -> None:
        async with stopped_in_the_middle(decoders, encoded("PNG"), 20.0) as (process, task):
            await asyncio.to_thread(sent.wait)
            process.kill()
            with pytest.raises(
                ImageError, match=r"^the image could not be decoded: the decoder failed on it; convert"
            ):
                await task
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)

    asyncio.run(run())


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
def test_a_decoder_that_hangs_is_killed_and_replaced(decoders: Decoders) -> None:
    async def run() -> None:
        async with stopped_in_the_middle(decoders, encoded("PNG"), 0.2) as (process, task):
            with pytest.raises(ImageError, match=r"^the image took longer than 0\.2 s to decode; convert"):
                await task
            assert process.poll() is not None
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)

    asyncio.run(run())


def test_an_answer_that_was_not_read_to_its_end_is_nobody_elses(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = pipe.receive

    def out_of_memory(*_: Any) -> None:
        monkeypatch.setattr(pipe, "receive", receive)
        raise MemoryError

    async def run() -> None:
        await decoders.warm()
        monkeypatch.setattr(pipe, "receive", out_of_memory)
        with pytest.raises(MemoryError):
            await decoded(decoders, encoded("PNG", (20, 20)))
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)

    asyncio.run(run())


def test_a_lie_about_the_size_costs_the_process(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        await decoders.warm()
        liar = only_process(decoders)
        receive = pipe.receive
        lie = {"width": 9, "height": 6, "timestamps": [0.0]}
        monkeypatch.setattr(pipe, "receive", lambda *args: (lie, receive(*args)[1]))
        with pytest.raises(ImageError, match="the decoder failed on it"):
            await decoded(decoders, encoded("PNG"))
        monkeypatch.setattr(pipe, "receive", receive)
        assert liar.poll() is not None
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)

    asyncio.run(run())


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_whole_group_leaves_decoders_working(
    decoders: Decoders, kind: signal.Signals
) -> None:
    async def run() -> None:
        await decoders.warm()
        process = only_process(decoders)
        process.send_signal(kind)
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)
        assert only_process(decoders) is process
        assert os.getsid(process.pid) != os.getsid(0)

    asyncio.run(run())


def test_a_decoder_that_died_while_idle_costs_nothing(decoders: Decoders) -> None:
    async def run() -> None:
        await decoders.warm()
        only_process(decoders).kill()
        only_process(decoders).wait()
        assert (await decoded(decoders, encoded("PNG"))).size == (8, 6)

    asyncio.run(run())


def test_a_picture_that_takes_too_long_is_given_up(decoders: Decoders) -> None:
    async def run() -> None:
        with pytest.raises(ImageError, match=r"took longer than 0\.01 s"):
            await decoded(decoders, png_bomb(8000, 7936), 0.01)

    asyncio.run(run())


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
        # Nothing of it is kept: 190 MB of pixels and several copies are given back.
        assert psutil.Process(only_process(decoders).pid).memory_info().rss < 150 * MIB

    asyncio.run(run())


def in_a_worker(code: str) -> str:
    """What `code` prints in a process whose doors are shut, through a pipe that was open before."""
    script = f"""
import os, socket, sys
from snugvl.server.intake import worker
worker.preload()
worker.shut_doors(64 << 20)
try:
    {code}
    print("done")
except (OSError, MemoryError) as error:
    print(type(error).__name__)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("open('/etc/hostname')", "OSError"),
        ("socket.socket()", "OSError"),
        ("os.pipe()", "OSError"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("bytearray(1 << 20)", "done"),
    ],
)
def test_a_worker_can_open_nothing(code: str, printed: str) -> None:
    assert in_a_worker(code) == printed


def test_a_worker_has_no_secrets(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGVL_TEST_SECRET", "hush")

    async def run() -> None:
        await decoders.warm()
        if sys.platform == "linux":
            environment = Path(f"/proc/{only_process(decoders).pid}/environ").read_bytes()
            assert b"PATH" in environment
            assert b"SECRET" not in environment

    asyncio.run(run())


def test_a_worker_imports_no_torch() -> None:
    script = "import sys, snugvl.server.intake.worker as w; w.preload(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "pydantic", "httpcore2"} & set(run.stdout.split())


def test_a_worker_that_does_not_start_is_no_fault_of_the_picture(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def run() -> None:
        with pytest.raises(SnugvlError, match="the picture decoder did not start") as caught:
            await decoded(decoders, encoded("PNG"))
        assert not isinstance(caught.value, ImageError)

    asyncio.run(run())


GOOD = {"width": 2, "height": 1, "timestamps": [0.0]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (GOOD, 5),
        (GOOD | {"width": 3}, 6),
        (GOOD | {"width": -2, "height": -1}, 6),
        (GOOD | {"width": 0}, 0),
        (GOOD | {"width": "2"}, 6),
        (GOOD | {"timestamps": []}, 0),
        (GOOD | {"timestamps": [0.0, 1.0]}, 12),
        (GOOD | {"timestamps": ["0"]}, 6),
        (GOOD | {"width": 20, "height": 10}, 600),
        ({}, 6),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(header: dict[str, Any], size: int) -> None:
    with pytest.raises(pipe.BrokenMessage):
        module._pictures(header, bytearray(size), max_pixels=100, max_frames=1)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0\0\0\x02\0\0\0\0\0\0\0\0",
        b"\xff\xff\xff\xff" + bytes(8),
        b"\0\0\0\x02\xff" + bytes(7) + b"{}",
        b"\0\0\0\x02" + bytes(8) + b"[]",
        b"\0\0\0\x02" + bytes(8) + b"}{",
    ],
)
def test_a_broken_message_is_refused(message: bytes) -> None:
    with pytest.raises(pipe.BrokenMessage):
        pipe.receive(BytesIO(message), 1000)


def test_messages_round_trip() -> None:
    file = BytesIO()
    pipe.send(file, {"a": "ü\ud800"}, b"one", memoryview(b"two"))
    file.seek(0)
    assert pipe.receive(file, 6) == ({"a": "ü\ud800"}, bytearray(b"onetwo"))


def test_pictures_in_flight_are_bounded() -> None:
    async def run() -> None:
        intake = Intake(replace(IntakeSettings(), max_live_bytes=4 * 100 * 100))
        try:
            held = [await intake.picture_bytes(encoded("PNG", (100, 99)), field="a")]
            held.append(await intake.picture_bytes(encoded("PNG", (100, 99)), field="b"))
            with pytest.raises(QueueFull, match=r"hold 40,000 bytes, the limit; try again"):
                await intake.picture_bytes(encoded("PNG"), field="c")
            held.clear()
            assert (await intake.picture_bytes(encoded("PNG"), field="c")).image.size == (8, 6)
        finally:
            await intake.close()

    asyncio.run(run())


def test_many_at_once_come_back_to_their_own_requests() -> None:
    async def run() -> None:
        intake = Intake()
        try:
            sizes = [(i + 1, 2 * i + 1) for i in range(40)]
            found = await asyncio.gather(
                *(intake.picture_bytes(encoded("PNG", size), field="a") for size in sizes)
            )
            assert [picture.image.size for picture in found] == sizes
            assert len(intake._pictures._processes) <= IntakeSettings().workers
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


def test_whoever_forgets_to_close_leaves_no_process() -> None:
    async def run() -> Any:
        pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))
        await pool.warm()
        return only_process(pool)

    process = asyncio.run(run())
    gc.collect()
    assert process.wait(10) is not None


def test_a_picture_knows_its_file() -> None:
    async def run() -> None:
        intake = Intake()
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
    assert 2 <= IntakeSettings().workers <= 4

"""Decoder processes that die, hang or lie cost one picture."""

import asyncio
import os
import signal
import sys
import threading
from io import BytesIO
from typing import Any

import pytest

from snugvl.errors import ImageError
from snugvl.server.media import pipe
from snugvl.server.media.decoders import Decoders
from tests.server.media.pictures import encoded, png_bomb
from tests.server.media.pool import decoded, only_process, stopped_in_the_middle


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
        pipe.pictures(header, bytearray(size), max_pixels=100, max_frames=1)


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

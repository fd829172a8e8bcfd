"""What crosses between the processes arrives as it left; what a process said last is understood."""

import asyncio
import pickle
import signal
import socket
import threading
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from PIL.PpmImagePlugin import PpmImageFile

from snugvl.backends.inbox import Inbox
from snugvl.backends.process import wire
from snugvl.backends.process.life import FORM
from snugvl.backends.process.wire import Arena
from snugvl.backends.spawned import Log, describe
from snugvl.core.messages import (
    Delta,
    Grammar,
    Logprob,
    Message,
    Picture,
    Request,
    TokenLogprob,
    Tool,
    ToolUse,
    Usage,
    Video,
    user,
)
from snugvl.core.resources import Region
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, RequestError, SnugvlError


def arrived(message: wire.ToEngine) -> wire.ToEngine:
    """A message after it went through a real socket, in pieces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(b"".join(wire.pieces(message)),))
        sender.start()
        received = wire.Channel(theirs).receive()
        sender.join()
    assert received is not None
    return received


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_a_request_arrives_whole() -> None:
    tools = ToolUse((Tool("f", "does", {"type": "object", "properties": {"a": {"type": "integer"}}}),), "f")
    request = Request(
        (user("a", noise(20, 10)), user(Video((noise(8, 8), noise(8, 8)), (0.0, 0.5)))),
        SamplingParams(temperature=0.5, stop=("x",), seed=3),
        deadline_s=3.5,
        tools=tools,
        grammar=Grammar("regex", "a+"),
    )
    submit = arrived(wire.Submit(7, request))
    assert isinstance(submit, wire.Submit)
    got = submit.request
    assert (submit.id, got.sampling, got.deadline_s, got.tools, got.grammar) == (
        7, request.sampling, 3.5, tools, request.grammar,
    )  # fmt: skip
    picture, video = got.messages[0].content[1], got.messages[1].content[0]
    assert isinstance(picture, Picture)
    assert isinstance(video, Video)
    assert picture.image.tobytes() == noise(20, 10).tobytes()
    assert picture.image.size == (20, 10)
    assert (len(video.frames), video.timestamps) == (2, (0.0, 0.5))


def test_a_picture_leaves_its_metadata_at_home() -> None:
    image = noise(4, 4)
    image.info["exif"] = b"secret" * 1000
    submit = arrived(wire.Submit(1, Request((user(image),))))
    assert isinstance(submit, wire.Submit)
    part = submit.request.messages[0].content[0]
    assert isinstance(part, Picture)
    assert part.image.info == {}


def test_a_12_megapixel_picture_crosses() -> None:
    image = Image.new("RGB", (4032, 3024), (1, 2, 3))
    image.putpixel((4031, 3023), (9, 8, 7))
    submit = arrived(wire.Submit(1, Request((user(image),))))
    assert isinstance(submit, wire.Submit)
    part = submit.request.messages[0].content[0]
    assert isinstance(part, Picture)
    assert part.image.size == (4032, 3024)
    assert part.image.getpixel((4031, 3023)) == (9, 8, 7)


def test_events_arrive_in_order() -> None:
    logprob = Logprob("a", b"a", -0.5, (TokenLogprob("b", b"b", -1.0),))
    events: list[wire.Event] = [
        wire.MessageReply(1, None, RequestError("too hot", field="temperature")),
        (1, Delta("x", 1, (logprob,), "stop", Usage(3, 2, 1), "END")),
        wire.End(1),
    ]

    async def receive() -> list[wire.Event] | None:
        reader = asyncio.StreamReader()
        reader.feed_data(wire.encode(events) + b"\0\0")
        reader.feed_eof()
        got = await wire.receive(reader)
        assert await wire.receive(reader) is None  # cut off in the middle of a length
        return got

    got = asyncio.run(receive())
    assert got is not None
    reply = got[0]
    assert isinstance(reply, wire.MessageReply)
    assert isinstance(reply.error, RequestError)
    assert (str(reply.error), reply.error.field) == ("too hot", "temperature")
    assert got[1:] == events[1:]


def test_a_channel_whose_other_end_is_gone_says_so() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(wire.encode(wire.Ping())[:-1])
        ours.close()
        assert wire.Channel(theirs).receive() is None


def test_errors_are_made_portable() -> None:
    bug = wire.portable(KeyError("x"))
    assert type(bug) is EngineError
    assert str(bug) == "the engine failed: KeyError: 'x'"
    error = RequestError("no", field="a")
    assert isinstance(wire.portable(error), RequestError)
    assert wire.portable(error).__traceback__ is None
    assert pickle.loads(pickle.dumps(wire.portable(error))).field == "a"


def test_an_inbox_merges_what_is_unread_choice_by_choice() -> None:
    async def test() -> None:
        inbox = Inbox()
        inbox.put(Delta("a", 0))
        inbox.put(Delta("x", 1))
        inbox.put(Delta("b", 0, finish_reason="stop", stop="END"))
        inbox.put(Delta("y", 1, finish_reason="length", usage=Usage(1, 4)))
        inbox.end()
        inbox.put(Delta("late", 0))
        assert await inbox.get() == Delta("ab", 0, finish_reason="stop", stop="END")
        assert await inbox.get() == Delta("xy", 1, finish_reason="length", usage=Usage(1, 4))
        assert await inbox.get() is None
        assert await inbox.get() is None

    asyncio.run(test())


def test_merged_deltas_count_upwards_and_the_usage_comes_last() -> None:
    async def test() -> None:
        inbox = Inbox()
        inbox.put(Delta("a", 0, completion_tokens=1))
        inbox.put(Delta("x", 1, completion_tokens=2))
        inbox.put(Delta("b", 0, completion_tokens=3, finish_reason="stop", usage=Usage(1, 3)))
        read = [await inbox.get(), await inbox.get()]
        assert [(delta.text, delta.completion_tokens) for delta in read if delta] == [("x", 2), ("ab", 3)]
        inbox = Inbox()
        inbox.put(Delta("a", 0, completion_tokens=1))
        inbox.put(Delta("x", 1, completion_tokens=2))
        inbox.put(Delta("b", 0, completion_tokens=3))
        read = [await inbox.get(), await inbox.get()]
        assert [(delta.text, delta.completion_tokens) for delta in read if delta] == [("ab", 3), ("x", 3)]

    asyncio.run(test())


def test_an_inbox_gives_what_came_before_an_error_first() -> None:
    async def test() -> None:
        inbox = Inbox()
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.put(Delta("a"))
        inbox.put(Delta("b"))
        assert await waiting == Delta("ab")
        inbox.put(Delta("c"))
        inbox.end(EngineError("gone"))
        inbox.end()
        assert await inbox.get() == Delta("c")
        for _ in range(2):
            with pytest.raises(SnugvlError, match="gone"):
                await inbox.get()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("returncode", "output", "expected"),
    [
        (None, "", "the engine process broke the connection"),
        (1, "", "the engine process ended with exit code 1"),
        (-11, "", "the engine process died (signal 11, SIGSEGV)"),
        (-40, "", "the engine process died (signal 40)"),
        (-signal.SIGKILL, "", "(signal 9, SIGKILL): killed from outside, perhaps by the system"),
        (-signal.SIGKILL, "warming up\n", "SIGKILL): killed from outside, perhaps by the system"),
        (-signal.SIGKILL, "a.BadError: x\n", 'died (signal 9, SIGKILL) (it said: "a.BadError: x")'),
        (1, "MemoryError\n", 'exit code 1: host memory ran out (it said: "MemoryError")'),
        (1, "a\ntorch.AcceleratorError: CUDA error: device-side assert\nCompile with\n",
         ': a GPU kernel failed (it said: "torch.AcceleratorError: CUDA error: device-side assert")'),
        (1, "ImportError: libx.so: cannot open shared object file\n", ": the installation is incomplete"),
        (3, "something\nodd\n", 'exit code 3 (it said: "odd")'),
    ],
)  # fmt: skip
def test_why_a_process_ended(returncode: int | None, output: str, expected: str) -> None:
    words = Log(FORM)
    words.feed(output)
    assert expected in describe(returncode, words.last_words)


def test_last_words_are_bounded_and_may_come_in_pieces() -> None:
    words = Log(FORM)
    assert words.feed("one\ntw") == ["one"]
    assert words.feed("o\n") == ["two"]
    words.feed("no end " * 1000)
    words.feed("\n" + "x\n" * 1000)
    assert len(words.last_words) == 40
    assert words.feed("y" * 9999 + "\n") == ["y" * 500]


def test_a_picture_whose_pixels_are_at_hand_is_not_decoded_to_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(_: PpmImageFile) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(PpmImageFile, "load", load)
    image = noise(20, 10)
    pixels = image.tobytes()
    file = BytesIO()
    image.save(file, "PPM")
    lazy = PpmImageFile(BytesIO(file.getvalue()))
    picture = Picture(lazy, 4096, b"hash", memoryview(pixels))
    submit = arrived(wire.Submit(1, Request((Message("user", (picture,)),))))
    assert isinstance(submit, wire.Submit)
    part = submit.request.messages[0].content[0]
    assert isinstance(part, Picture)
    assert (part.max_pixels, part.file, part.pixels) == (4096, b"hash", None)
    assert (part.image.size, part.image.tobytes()) == ((20, 10), pixels)


def test_pixels_without_room_follow_their_message_uncopied() -> None:
    region = Region.made(2000)
    assert region is not None
    region.keep_to_ourselves()
    arena = Arena(region)
    data = [bytes([each]) * 300 for each in range(5)]
    pictures = [Picture(Image.new("RGB", (10, 10)), pixels=memoryview(each)) for each in data]
    message = wire.Submit(7, Request((user(*pictures),), SamplingParams()))
    head, *behind = wire.pieces(message, arena)
    assert [bytes(each) for each in behind] == data[3:]
    assert all(isinstance(each, memoryview) and each.obj is data[3 + i] for i, each in enumerate(behind))
    assert len(head) < 3000
    wire.share(region)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join((head, *behind, wire.encode(wire.Ping()))))
        channel = wire.Channel(theirs)
        received = channel.receive()
        assert isinstance(received, wire.Submit)
        found = [
            part.image.tobytes() for part in received.request.messages[0].content if isinstance(part, Picture)
        ]
        assert found == data
        assert isinstance(channel.receive(), wire.Ping)
        ours.sendall(b"".join((head, *behind))[:-1])
        ours.close()
        assert channel.receive() is None, "the server is gone in the middle of the pixels"

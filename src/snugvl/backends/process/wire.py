"""Messages between the server and its engine process: pickled, with the length before each.

    server ── Start, Submit, Abort, Tokenize, Detokenize, Ping, Bye ─► engine process
           ◄── lists of Loading, Ready, Failed, MessageReply, (id, Delta), End, Pong, Snapshot ──

The engine's events go out as one list a step. Pixels go beside the socket where they can (`Arena`); every
Submit and Tokenize has a MessageReply, after which the engine has read them. Both ends are this package in
the same version, started by one another over a socket pair that nobody else can open: so pickle will do.
Pixels that have no room there follow their message over the socket, in the order in which it names them.

    region  │ picture of 7 │ free │ picture of 9 │ free …
    message 9  "… RGB, 1024×1024, at byte 4,194,304 …" ─► engine: copies it, prepares it, replies ─► free

A socket would carry them in pieces of some hundred KiB, each of which wakes both sides.
"""

import asyncio
import pickle
import socket
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from io import BytesIO
from operator import attrgetter
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from PIL import Image

from snugvl.core.messages import (
    Capabilities,
    Delta,
    Logprob,
    Message,
    Picture,
    Request,
    Size,
    Text,
    TokenLogprob,
    ToolCall,
    Usage,
)
from snugvl.core.options import LoadOptions
from snugvl.core.resources import Region
from snugvl.core.service import Snapshot, Timeline, Tokens
from snugvl.errors import EngineError, SnugvlError, engine_failed

if TYPE_CHECKING:  # half of a process's start; what is sent brings it along
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Allocation


class Arena:
    """The sender's side: what lies where. Safe to use from several threads."""

    def __init__(self, region: Region) -> None:
        self._view = region.view
        self._used: list[tuple[int, int, int]] = []  # start, end and owner of each piece, in order
        self._lock = Lock()

    def put(self, owner: int, piece: bytes | memoryview) -> int | None:
        """Write a piece where there is room for it, and return where; None where there is none.

        An owner that has a piece already gets at most half of all, as others come meanwhile.
        """
        with self._lock:
            own = sum(end - start for start, end, its in self._used if its == owner)
            if own and own + len(piece) > len(self._view) // 2:
                return None
            start = self._gap(len(piece))
            if start is None:
                return None
            insort(self._used, (start, start + len(piece), owner))
        self._view[start : start + len(piece)] = piece
        return start

    def free(self, owner: int) -> None:
        """Note that the reader is done with what this owner has put, or was never told of it."""
        with self._lock:
            self._used = [piece for piece in self._used if piece[2] != owner]

    def _gap(self, nbytes: int) -> int | None:
        """The first one that is large enough: low addresses are the ones that have been touched before."""
        end_before = 0
        for start, end, _ in self._used:
            if start - end_before >= nbytes:
                break
            end_before = end
        return end_before if end_before + nbytes <= len(self._view) else None


HostedEngine = Literal["native", "transformers"]

_LENGTH = Struct("!Q")


@dataclass(frozen=True, slots=True)
class EngineChoice(LoadOptions):
    """The choice that an engine's process loads: the options, and the plan's allocation.

    Attributes:
        engine: which backend loads it.
        planned: what is allocated; None: the process plans itself (our own engine only).
        placement: where transformers puts which module ("model.language_model.layers.3" → "cpu"), by the
            plan; empty: everything on `device`.
        machine: as the server saw it a moment ago; None: the process looks itself (our own engine only).
    """

    engine: HostedEngine = "native"
    planned: "Allocation | None" = None
    placement: tuple[tuple[str, str], ...] = ()
    machine: "Machine | None" = None


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, and seconds between two snapshots."""

    choice: EngineChoice
    snapshot_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Start a request; answered by a `MessageReply`, deltas, and an `End`; aborted before, by the first."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, wherever it is, or a question; one without its `MessageReply` still gets it, soon."""

    id: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokenize:
    """Answered by a `MessageReply` with `Tokens`. `pixels`: whether they are needed, or sizes will do."""

    id: int
    request: Request
    pixels: bool = True


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Answered by a `MessageReply` with text."""

    id: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by a `Pong` from the main thread, whatever the others do."""


@dataclass(frozen=True, slots=True)
class Bye:
    """Exit now."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A stage of loading. `progress`: of all of it, from 0 to 1."""

    detail: str
    progress: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests are taken. `timeline`: how the process came here."""

    capabilities: Capabilities
    timeline: Timeline = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Loading reported an error that would come again."""

    error: SnugvlError


@dataclass(frozen=True, slots=True)
class MessageReply:
    """The answer to the message of that id: a value (of a `Submit`: tokens of the prompt), or an error."""

    id: int
    value: Tokens | str | int | None = None
    error: SnugvlError | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a request."""

    id: int
    error: SnugvlError | None = None


@dataclass(frozen=True, slots=True)
class Pong:
    """The main thread lives. `stalled_s`: seconds the engine's thread has not come round to a question;
    `preparing_s`: seconds for which the oldest prompt has been prepared."""

    stalled_s: float
    preparing_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the server's log that is not trouble; what is, the process writes to stderr."""

    text: str


ToEngine = Start | Submit | Abort | Tokenize | Detokenize | Ping | Bye
Event = Loading | Ready | Failed | MessageReply | tuple[int, Delta] | End | Pong | Note | Snapshot


# Python pickles frozen dataclasses with slots by a slow path; these cross once a token, or by thousands.
_FAST: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*(field.name for field in fields(kind)))
    for kind in (Delta, Logprob, Message, Text, TokenLogprob, ToolCall, Usage)
}


class _Pickler(pickle.Pickler):
    """Attributes: behind: pixels that follow the message."""

    def __init__(
        self, buffer: BytesIO, put: Callable[[bytes | memoryview], int | None], *, pixels: bool = True
    ) -> None:
        super().__init__(buffer, protocol=5)
        self._put = put
        self._pixels = pixels
        self.behind: list[bytes | memoryview] = []

    def reducer_override(self, value: object) -> Any:
        values = _FAST.get(type(value))
        if values is not None:
            return type(value), values(value)
        if isinstance(value, Image.Image) and not self._pixels:
            return Size, value.size
        if isinstance(value, Image.Image):  # raw pixels, without what the file said besides
            return self._image(value.mode, value.size, value.tobytes())
        if isinstance(value, Picture):  # never its file
            facts = value.max_pixels, value.file, value.name, value.field
            if value.pixels is None or not self._pixels:
                return _picture, (value.image, *facts)
            make, arguments = self._image("RGB", value.image.size, value.pixels)
            return _followed_picture, (make, arguments, *facts)
        return NotImplemented

    def _image(
        self, mode: str, size: tuple[int, int], pixels: bytes | memoryview
    ) -> tuple[Any, tuple[Any, ...]]:
        """The function that makes an image of pixels on the other side, and its arguments."""
        start = self._put(pixels)
        if start is None:
            self.behind.append(pixels)
            return _followed, (mode, size, len(pixels))
        return _shared, (mode, size, start, start + len(pixels))


_region: Region | None = None  # of this process, if it is an engine's
_followers: BinaryIO | None = None  # what follows the message that is being read


def share(region: Region) -> None:
    """Pictures of messages to this process are there."""
    global _region
    _region = region


def _shared(mode: str, size: tuple[int, int], start: int, end: int) -> Image.Image:
    assert _region is not None, "the server knows whether we have one"
    return Image.frombytes(mode, size, _region.view[start:end])


def _followed(mode: str, size: tuple[int, int], count: int) -> Image.Image:
    assert _followers is not None, "only a server sends pixels"
    pixels = _followers.read(count)
    if len(pixels) < count:
        raise EOFError
    return Image.frombytes(mode, size, pixels)


def _picture(
    image: Image.Image, max_pixels: int | None, file: bytes | None, name: str, field: str
) -> Picture:
    return Picture(image, max_pixels, file, name=name, field=field)


def _followed_picture(make: Callable[..., Image.Image], arguments: tuple[Any, ...], *facts: Any) -> Picture:
    return _picture(make(*arguments), *facts)


def encode(message: ToEngine | list[Event]) -> bytes:
    """A message without pictures as it goes over the socket."""
    (data,) = pieces(message)
    assert isinstance(data, bytes)
    return data


def pieces(message: ToEngine | list[Event], arena: Arena | None = None) -> list[bytes | memoryview]:
    """A message as it goes over the socket; its pictures in `arena`, or behind it, uncopied, without room."""
    buffer = BytesIO()
    buffer.write(bytes(_LENGTH.size))
    if arena is None or not isinstance(message, Submit | Tokenize):
        put = _no_room
    else:
        put = partial(arena.put, message.id)
    pixels = not isinstance(message, Tokenize) or message.pixels
    pickler = _Pickler(buffer, put, pixels=pixels)
    pickler.dump(message)
    length = buffer.tell() - _LENGTH.size
    view = buffer.getbuffer()
    _LENGTH.pack_into(view, 0, length)
    view.release()
    return [buffer.getvalue(), *pickler.behind]


def _no_room(_: bytes | memoryview) -> int | None:
    return None


class Channel:
    """The engine process' end: blocking, one thread reads and one writes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = connected.makefile("rb")

    def send(self, events: list[Event]) -> None:
        """Write events as one message."""
        self._socket.sendall(encode(events))

    def receive(self) -> ToEngine | None:
        """The next message; None when the server is gone."""
        header = self._file.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        length = _LENGTH.unpack(header)[0]
        body = self._file.read(length)
        if len(body) < length:
            return None
        global _followers
        _followers = self._file
        try:
            return pickle.loads(body)  # type: ignore[no-any-return]  # noqa: S301 (ours)
        except EOFError:  # the server is gone while pixels came
            return None


async def receive(reader: asyncio.StreamReader) -> list[Event] | None:
    """The next events of an engine process; None when it is gone."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pickle.loads(body)  # type: ignore[no-any-return]  # noqa: S301 (ours, see above)


def portable(error: BaseException) -> SnugvlError:
    """An error as one that crosses: ours as they are, a bug's as an `EngineError` that names it."""
    if isinstance(error, SnugvlError):
        try:
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
        except Exception:
            return EngineError(str(error))
        assert isinstance(copy, SnugvlError)
        return copy  # without the traceback, which would keep tensors alive
    return engine_failed(error)

"""Weights that stay in main memory and pass through a small room on the GPU, one unit after the other.

    main memory  │ block 0 │ block 1 │ … │ block 5 │ merger 0 │ block 6 │ …     every unit in one piece
    room         │ even ones ▸ ─ ─ ─ ─ ─ ◂ odd ones │

Even units lie at the room's beginning, odd ones at its end: while one computes, the next arrives. The room
holds the largest block beside the largest unit; where two neighbours are larger than that, the second waits
until the first is done.

    compute   │ block 0 │ block 1 │ block 2 │
    copies    │ 1 ││ 2 │     │ 3 │               unit i + 1 is copied once i - 1 is done

The modules stay what they are: their tensors are views of the room, and hold what they should between `reach`
and the next one. From memory that isn't pinned a copy holds up who asks for it. So it is asked for a step
later, when there is work in front of the GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

ALIGNMENT: Final = 256  # bytes; that of the allocator is 512, cuBLAS wants 16


class CopyStream:
    """Copies to a GPU beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """The end of all work that was asked for so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def copy(self, room: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy bytes once `after` has come; the end of the copy."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            room.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """What is asked for from now on comes after `event`. Holds nobody up here."""
        torch.cuda.current_stream(self.device).wait_event(event)


class Resident:
    """Weights that are always there: what `WeightStream` is for others."""

    def begin(self) -> "Resident":
        """A pass over all units."""
        return self

    def reach(self, unit: nn.Module) -> None:
        """Go on to a unit."""


class WeightStream:
    """Units in main memory, in the order of their use, and their room on the GPU.

    Attributes:
        ahead: copies run beside the host, so the next is asked for before it is needed.
    """

    def __init__(
        self, units: Sequence[nn.Module], host: Sequence[torch.Tensor], room: torch.Tensor, copies: CopyStream
    ) -> None:
        """`host`: the bytes of each unit, as `to_host` made them and the loader filled them.

        `room`: on the GPU, uint8, of `room_bytes`.
        """
        self.units, self.host, self.room, self.copies = units, host, room, copies
        self.ahead = host[0].is_pinned()
        self.passing: Pass | None = None
        self.places = [
            room[: len(each)] if index % 2 == 0 else room[len(room) - len(each) :]
            for index, each in enumerate(host)
        ]
        for unit, place in zip(units, self.places, strict=True):
            lay_out(unit, place)

    def begin(self) -> "Pass":
        """A pass over all units; the one before it is over."""
        self.passing = Pass(self)
        return self.passing

    def together(self, index: int) -> bool:
        """Whether a unit and the one before fit into the room."""
        return len(self.host[index - 1]) + len(self.host[index]) <= len(self.room)


class Pass:
    """One way through the units. It may pause anywhere between two of them, and be dropped."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._next = 0
        self._free = stream.copies.mark()  # an earlier pass may still compute
        self._arrived: torch.cuda.Event | None = self._copy(0)

    def reach(self, unit: nn.Module) -> None:
        """Go on to the next unit: all work on the one before has been asked for."""
        stream, index = self._stream, self._next
        assert stream.passing is self, "another pass has taken the room"
        assert stream.units[index] is unit, "units come in their order"
        done = stream.copies.mark()  # with all units before this one
        if self._arrived is None:
            if not stream.together(index):
                self._free = done
            self._arrived = self._copy(index)
        stream.copies.wait(self._arrived)
        self._free, self._arrived, self._next = done, None, index + 1
        if self._next < len(stream.units) and stream.ahead and stream.together(self._next):
            self._arrived = self._copy(self._next)

    def _copy(self, index: int) -> torch.cuda.Event:
        stream = self._stream
        return stream.copies.copy(stream.places[index], stream.host[index], self._free)


def unit_bytes(unit: nn.Module) -> int:
    """Bytes of a unit in one piece."""
    return sum(_aligned(tensor.nbytes) for _, _, tensor in _tensors(unit))


def room_bytes(units: Sequence[nn.Module], sizes: Sequence[int]) -> int:
    """The largest unit that occurs again and again (a block) beside the largest of all; 0 of none."""
    if not units:
        return 0
    blocks = [size for unit, size in zip(units, sizes, strict=True) if type(unit) is type(units[0])]
    return max(blocks) + max(sizes)


def to_host(units: Sequence[nn.Module], *, pinned: bool) -> list[torch.Tensor]:
    """Give units without memory their place in main memory; the bytes of each.

    `pinned`: where that can be had; copies run beside the host then.
    """
    host = _allocate([unit_bytes(unit) for unit in units], pinned=pinned)
    for unit, room in zip(units, host, strict=True):
        lay_out(unit, room)
    return host


def _allocate(sizes: list[int], *, pinned: bool) -> list[torch.Tensor]:
    """All of one kind."""
    if pinned:
        try:
            return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        except RuntimeError:
            pass  # the system has no more of it
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def lay_out(unit: nn.Module, room: torch.Tensor) -> None:
    """Make the tensors of a unit views of `room` `[bytes]`, one after the other."""
    start = 0
    for module, name, tensor in list(_tensors(unit)):
        view = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(view, requires_grad=False) if is_parameter else view)
        start += _aligned(tensor.nbytes)


def _tensors(unit: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

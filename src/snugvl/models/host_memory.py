"""Weights that stay in host memory: a tower's, which pass through the GPU; an embedding, read there.

A tower's units go through a small room on the GPU, one after the other:

    host memory  │ block 0 │ block 1 │ … │ block 5 │ merger 0 │ block 6 │ …     every unit in one piece
    room         │ even ones ▸ ─ ─ ─ ─ ─ ◂ odd ones │

Even units lie at the room's beginning, odd ones at its end: while one computes, the next arrives. The room
holds the largest block beside the largest unit; where two neighbours are larger than that, the second waits
until the first is done.

    compute   │ block 0 │ block 1 │ block 2 │
    copies    │ 1 ││ 2 │     │ 3 │               unit i + 1 is copied once i - 1 is done

The modules stay what they are: their tensors are views of the room, and hold what they should between `reach`
and the next one. From memory that isn't pinned a copy holds up who asks for it. So it is asked for a step
later, when there is work in front of the GPU.

An embedding's rows are read where they are:

    host memory  │ row 0 │ row 1 │ …   page-locked, and part of the GPU's addresses
    GPU          reads `ids` rows over PCI Express: 8 KiB a token of an 8B in bf16

The lookup is the kernel of an embedding on the GPU, in the same CUDA graphs: no copy, and no host that waits.
Therefore the memory must be page-locked, and there is no falling back to memory that isn't.

The driver is asked for it, not torch: torch's `pin_memory` takes the next power of two, 2 GiB for 1.2. And it
is made page-locked (`cuMemHostAlloc`), not locked later (`cudaHostRegister`): under WSL2 a GPU can't use the
host's addresses of the latter (`cudaDevAttrCanUseHostPointerForRegisteredMem` is 0 there).
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

from snugvl.layers.device import COPIES, LIBRARY, stream_on
from snugvl.layers.linear import Linear

ALIGNMENT: Final = 256  # bytes; that of the allocator is 512, cuBLAS wants 16
PORTABLE, MAPPED = 1, 2  # CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP: every context's, and in the GPU's addresses


class CopyStream:
    """Copies to a GPU beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = stream_on(device, COPIES)

    def mark(self) -> torch.cuda.Event:
        """The end of all work that was asked for so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def copy(self, room: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy bytes once `after` has come; the end of the copy."""
        return self.copy_all([(room, source)], after)

    def copy_all(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Copy bytes to each place from its source, likewise; the end of all copies."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for room, source in pairs:
                room.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the device's work that is queued from now on wait for `event`; the host doesn't wait."""
        torch.cuda.current_stream(self.device).wait_event(event)


class CopiesAtOnce:
    """Stands for `CopyStream` where the device is the host: a copy is done when it has been asked for."""

    def mark(self) -> None:
        """There is nothing to wait for."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: object) -> None:
        """Copy bytes to each place from its source."""
        for room, source in pairs:
            room.copy_(source)

    def wait(self, event: object) -> None:
        """Return at once: copies on the host are complete when they return."""


class Resident:
    """Weights that are always there: what `WeightStream` is for others."""

    def begin(self) -> "Resident":
        """A pass over all units."""
        return self

    def reach(self, unit: nn.Module) -> None:
        """Go on to a unit."""


class WeightStream:
    """Units in host memory, in the order of their use, and their room on the GPU. `ahead`: copies run beside
    the host, so the next is asked for before it is needed."""

    def __init__(
        self, units: Sequence[nn.Module], host: Sequence[torch.Tensor], room: torch.Tensor, copies: CopyStream
    ) -> None:
        """`host`: the bytes of each unit, as `to_host` made them and the loader filled them.

        `room`: on the GPU, uint8, of `room_bytes`.
        """
        self.units, self.host, self.room, self.copies = units, host, room, copies
        self.ahead = host[0].is_pinned()
        self._passing: weakref.ref[Pass] | None = None  # which refers to this
        self.places = [
            room[: len(each)] if index % 2 == 0 else room[len(room) - len(each) :]
            for index, each in enumerate(host)
        ]
        for unit, place in zip(units, self.places, strict=True):
            lay_out(unit, place)

    def begin(self) -> "Pass":
        """A pass over all units; the one before it is over."""
        made = Pass(self)
        self._passing = weakref.ref(made)
        return made

    def passes(self, which: "Pass") -> bool:
        """Whether a pass is the one that began last."""
        return self._passing is not None and self._passing() is which

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
        assert stream.passes(self), "another pass has taken the room"
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
    return sum(aligned(tensor.nbytes) for _, _, tensor in _tensors(unit))


def room_bytes(units: Sequence[nn.Module], sizes: Sequence[int]) -> int:
    """The largest unit that occurs again and again (a block) beside the largest of all; 0 of none."""
    if not units:
        return 0
    blocks = [size for unit, size in zip(units, sizes, strict=True) if type(unit) is type(units[0])]
    return max(blocks) + max(sizes)


def to_host(units: Sequence[nn.Module], *, pinned: bool) -> list[torch.Tensor]:
    """Give units without memory their place in host memory; the bytes of each.

    `pinned`: where that is possible; copies run beside the host then.
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
        start += aligned(tensor.nbytes)


def _tensors(unit: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def aligned(nbytes: int) -> int:
    """Bytes from one tensor of a piece to the next, for a tensor of `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class NoPageLockedMemory(Exception):
    """The system doesn't give `nbytes` of page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


def to_host_memory(embedding: Linear, device: torch.device) -> None:
    """Give an embedding without memory its place, in one piece, for a GPU to read.

    Raises:
        NoPageLockedMemory: the system doesn't give it.
    """
    lay_out(embedding, page_locked(unit_bytes(embedding), device))


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """`[nbytes]` uint8, given back when no tensor uses it any more.

    Raises:
        NoPageLockedMemory: the system doesn't give it.
    """
    torch.cuda.synchronize(device)  # makes torch's context there, which the driver asks for
    driver, address = ctypes.CDLL(LIBRARY), ctypes.c_void_p()
    with torch.cuda.device(device):
        failed = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), PORTABLE | MAPPED)
    if failed or address.value is None:
        raise NoPageLockedMemory(nbytes)
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    # Tensors keep `memory`, which keeps nothing and has to say when it goes. At exit the system takes all.
    weakref.finalize(memory, driver.cuMemFreeHost, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)

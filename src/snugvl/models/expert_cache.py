"""Experts in host memory, and slots on the GPU that hold copies of some of them.

    host memory   │ expert 0 │ … │ expert 255 │    of each layer, in the format of the plan's weights
    slots         │ 17 │ 4 │ 201 │ …               of each layer, those used often and lately
    room          │ half │ half │                  of all layers, for experts that get no slot

The router of a layer says which experts a step needs, and the host reads that. Those in slots are multiplied
first; the others are copied meanwhile, some at a time, and multiplied as they arrive:

    copies    │ 3, 9 ▸ half │ 12, 40 ▸ half │ 51 ▸ half │
    compute   │ in slots    │ 3, 9          │ 12, 40    │ 51 │

So each expert that a step needs and that is in no slot crosses once, whatever the number of tokens: a
decode step brings a few, a chunk of a prompt nearly all of them. Pairs of a token and an expert are products
of their own (`layers/experts.py`): the result is the same to the bit whatever is in the slots, and with no
slots at all.

Which expert keeps a slot is chosen by recency and frequency at once: an expert's score grows with each step
by the share of its tokens that chose it, and is halved every `HALF_LIFE` steps. One that arrives takes the
slot of the lowest score, if that is below its own.
Source: LRFU, Lee et al. 2001, https://doi.org/10.1109/TC.2001.970573.

Of host memory that isn't page-locked a copy holds up the host. So there it is asked for when the work before
it is on its way to the GPU.

In page-locked memory a step of few tokens needs no host: the GPU gives the experts of the step slots, and
reads those that it misses where they are (`kernels/products/expert_slots.py`). What is in the slots is known
on the GPU alone then, and the host asks for it before a step of many tokens. So a CUDA graph may hold steps
of so few tokens that all their experts have had slots after `EXPERT_ROUNDS` rounds, and no others: there the
host reads the choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from snugvl.core.config import EXPERT_ROUNDS
from snugvl.layers.device import to_device
from snugvl.layers.experts import ExpertRound, Experts
from snugvl.layers.replaced import by_kernels, usable
from snugvl.layers.weights import Weights
from snugvl.models.host_memory import (
    ALIGNMENT,
    CopiesAtOnce,
    CopyStream,
    NoPageLockedMemory,
    aligned,
    lay_out,
    page_locked,
    unit_bytes,
)

HALF: Final = 16  # experts that a half of the room holds, and that are asked for at a time
HALF_LIFE: Final = 16  # steps
LEAST_SLOTS: Final = 2  # that no other program gets: eight experts of a token take `EXPERT_ROUNDS` rounds
REHEARSED: Final = 16  # slots with which kernels are compiled and checked
KERNELS: Final = ("place_experts", "bring_experts")
WORD_BYTES: Final = 8  # that a GPU copies at a time
DECAY: Final = 0.5 ** (1 / HALF_LIFE)
Numbers = NDArray[Any]
Copies = CopyStream | CopiesAtOnce


def copies_to(device: torch.device) -> Copies:
    """Copies from host memory to a device, beside what it computes if it is a GPU."""
    return CopyStream(device) if device.type == "cuda" else CopiesAtOnce()


class InPlace:
    """Experts at their own numbers, but found by a table as in slots: for a network without its memory, whose
    kernels are compiled and checked.

    Attributes:
        device_slots: slots that the GPU gives itself later, or 0. Then steps of few tokens copy experts
            to `REHEARSED` slots here.
    """

    def __init__(self, experts: Experts, device_slots: int = 0) -> None:
        self._experts, self.device_slots = experts, device_slots
        self._slots: DeviceSlots | None = None

    def rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        """One round of all experts."""
        experts = self._experts
        slots = min(self.device_slots, REHEARSED)
        if 0 < ids.numel() <= EXPERT_ROUNDS * slots and by_kernels(ids, *KERNELS):
            if self._slots is None:
                room = torch.empty(_bytes_of(experts, slots), dtype=torch.uint8, device=ids.device)
                state = SlotState.empty(experts.count, slots)
                self._slots = DeviceSlots(
                    state, _Place(experts, slots, room), _host_planes(experts), ids.device
                )
            yield from self._slots.rounds(ids)
            return
        table = torch.arange(experts.count, dtype=torch.int32, device=ids.device)
        yield ExpertRound(experts.gate_up_proj.weights, experts.down_proj.weights, table)


def experts_of(decoder: nn.Module) -> list[Experts]:
    """The experts of each layer that has some, in order."""
    return [module for module in decoder.modules() if isinstance(module, Experts)]


def experts_to_host(layers: Sequence[Experts], device: torch.device, *, pinned: bool) -> bool:
    """Give experts without memory their place in host memory, each layer's in one piece.

    `pinned`: page-locked, as far as a GPU's driver allows. Returns whether all of it is.
    """
    for experts in layers:
        memory = None
        if pinned and device.type == "cuda":
            try:
                memory = page_locked(unit_bytes(experts), device)
            except NoPageLockedMemory:
                pinned = False
        lay_out(experts, torch.empty(unit_bytes(experts), dtype=torch.uint8) if memory is None else memory)
    return pinned


def cache_bytes(layers: Sequence[Experts], slots: int) -> int:
    """Bytes on the GPU of `slots` slots a layer and of the room, all in one piece."""
    return sum(_bytes_of(each, slots) for each in layers) + 2 * _half_bytes(layers) if layers else 0


def _half_bytes(layers: Sequence[Experts]) -> int:
    return max(_bytes_of(each, min(HALF, each.count)) for each in layers)


def _bytes_of(experts: Experts, slots: int) -> int:
    tensors = (*experts.parameters(), *experts.buffers())
    return sum(aligned(tensor.nbytes // experts.count * slots) for tensor in tensors)


class ExpertCache:
    """The slots of all layers, and the room that they share.

    Attributes:
        layers: of each layer with experts; empty after `free`.
        slots: slots of a layer.
        full: slots of a layer where no other program needs memory.
        nbytes: bytes on the device.
        host_nbytes: bytes of all experts in host memory.
    """

    def __init__(
        self, layers: Sequence[Experts], slots: int, place: torch.Tensor, copies: Copies, *, pinned: bool
    ) -> None:
        """`layers`: filled, in host memory; `place`: on the device, uint8, of `cache_bytes`.

        `pinned`: whether all of the host memory is page-locked.
        """
        self._experts, self._copies, self._pinned = tuple(layers), copies, pinned
        self._device, self.full = place.device, slots
        self.host_nbytes = sum(unit_bytes(each) for each in layers)
        self.layers: list[LayerSlots] = []
        self._fill(slots, place)

    def part(self, share: int, whole: int) -> int:
        """Slots of a layer where the cache has `share` of `whole` of its memory."""
        return max(self.full * share // whole, min(LEAST_SLOTS, self.full))

    def bytes_of(self, slots: int) -> int:
        """Bytes on the device with so many slots a layer."""
        return cache_bytes(self._experts, slots)

    def free(self) -> None:
        """Let go of the memory on the device, which nothing may use any more; no step can run then."""
        self.layers.clear()
        self.slots = self.nbytes = 0
        for experts in self._experts:
            experts.places = None

    def resize(self, slots: int) -> None:
        """Have so many slots a layer, all of them empty, after `free`.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        self._fill(slots, torch.empty(self.bytes_of(slots), dtype=torch.uint8, device=self._device))

    def _fill(self, slots: int, place: torch.Tensor) -> None:
        layers, copies, pinned = self._experts, self._copies, self._pinned
        device = place.device if pinned and place.is_cuda else None
        half = _half_bytes(layers)
        self.slots, self.nbytes, start = slots, len(place), 2 * half
        for experts in layers:
            end = start + _bytes_of(experts, slots)
            halves = [
                _Place(experts, min(HALF, experts.count), place[n * half : (n + 1) * half]) for n in (0, 1)
            ]
            own = _Place(experts, slots, place[start:end])
            experts.places = LayerSlots(experts, own, halves, copies, pinned=pinned, device=device)
            self.layers.append(experts.places)
            start = end

    @property
    def device_slots(self) -> int:
        """Slots of a layer that the GPU gives itself in steps of few tokens; 0 where the host does."""
        return min((each.device_slots for each in self.layers), default=0) if usable(*KERNELS) else 0

    def counts(self) -> tuple[int, int, int]:
        """(experts found in slots, experts brought, bytes that crossed) until now; waits for the GPU."""
        found = [(*each.counts, each.expert_bytes) for each in self.layers]
        hits, misses = (sum(each[n] for each in found) for n in (0, 1))
        return hits, misses, sum(missed * nbytes for _, missed, nbytes in found)


class SlotState:
    """Facts of a layer's slots, in one tensor, on the host or on the GPU.

    Attributes:
        flat: all of it, int32.
        counts: `[2]`, experts that steps found in slots, and that were brought.
        where: `[experts]`, the slot of each, or -1.
        scores: `[experts]` float32.
        held: `[slots]`, the expert in each, or -1.
    """

    def __init__(self, flat: torch.Tensor, count: int, slots: int) -> None:
        self.flat, self._sizes = flat, (count, slots)
        self.counts = flat[:2]
        first, *others = ((4 + n * up_to(count)) for n in range(3))  # each begins where 16 bytes do
        self.where = flat[first : first + count]
        self.scores = flat[others[0] : others[0] + count].view(torch.float32)
        self.held = flat[others[1] : others[1] + slots]

    @staticmethod
    def empty(count: int, slots: int) -> "SlotState":
        """State of `slots` empty slots for `count` experts, on the host."""
        flat = torch.full((4 + 2 * up_to(count) + slots,), -1, dtype=torch.int32)
        made = SlotState(flat, count, slots)
        made.counts.zero_()
        made.scores.zero_()
        return made

    def to(self, device: torch.device) -> "SlotState":
        """A copy on `device`."""
        return SlotState(self.flat.to(device, copy=True), *self._sizes)


def up_to(count: int) -> int:
    """The next multiple of four values."""
    return -(-count // 4) * 4


class DeviceSlots:
    """Slots that the GPU gives itself, for steps of few tokens. `state`: what is known of them there."""

    def __init__(
        self, state: SlotState, slots: "_Place", host: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        """`host`: tensors of all experts, `[experts, bytes]` each, that the GPU may read."""
        self.state, self._slots = state.to(device), slots
        self._brought = torch.empty(slots.count, 2, dtype=torch.int32, device=device)
        self._table = torch.empty(2, len(state.where), dtype=torch.int32, device=device)
        planes = [
            (source.data_ptr(), target.data_ptr(), source.shape[1] // WORD_BYTES)
            for source, target in zip(host, slots.planes, strict=True)
        ]
        self._planes = torch.tensor(planes, dtype=torch.int64, device=device)

    def rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        """All experts of `ids` `[tokens, used]`, in one round where it has no more values than slots."""
        from snugvl.layers.kernels.products.expert_slots import take_slots  # needs triton, which GPUs bring

        state = self.state
        parts = state.counts, state.where, state.scores, state.held, self._table
        for first in range(0, ids.numel(), self._slots.count):
            take_slots(ids, parts, self._brought, self._planes, DECAY, later=first > 0)
            yield self._slots.round(self._table[0])


class _Place:
    """Room for some experts on the device.

    Attributes:
        count: experts that it holds.
        matrices: gate and up, and down, of all below one another.
        planes: their tensors, `[count, bytes of an expert]` each.
    """

    def __init__(self, experts: Experts, count: int, room: torch.Tensor) -> None:
        self.count, start = count, 0
        self.matrices: list[Weights] = []
        for weights in _matrices(experts):
            made, start = weights.of_units(experts.count, count, room, start, ALIGNMENT)
            self.matrices.append(made)
        self.planes = _planes(self.matrices, count)

    def round(self, table: torch.Tensor) -> ExpertRound:
        """A round of the experts that `table` `[experts]` int32 says the places of, and -1 of others."""
        gate_up, down = self.matrices
        return ExpertRound(gate_up, down, table)


def _host_planes(experts: Experts) -> list[torch.Tensor]:
    return _planes(_matrices(experts), experts.count)


def _matrices(experts: Experts) -> tuple[Weights, Weights]:
    return experts.gate_up_proj.weights, experts.down_proj.weights


def _planes(matrices: Sequence[Weights], count: int) -> list[torch.Tensor]:
    return [plane for weights in matrices for plane in weights.units(count)] if count else []


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Experts that are brought together, where to, and the places that they take there."""

    experts: Numbers
    place: _Place
    at: Numbers


class LayerSlots:
    """Places of a layer's experts (`ExpertPlaces`). `expert_bytes`: bytes of an expert; `device_slots`: slots
    that the GPU gives itself in steps of few tokens; 0 where the host does."""

    def __init__(
        self,
        experts: Experts,
        slots: _Place,
        halves: Sequence[_Place],
        copies: Copies,
        *,
        pinned: bool,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the memory of experts can be read, and kernels run; None: nowhere."""
        self._slots, self._halves, self._copies, self._pinned = slots, halves, copies, pinned
        self._host = _host_planes(experts)
        self.expert_bytes = sum(plane.shape[1] for plane in self._host)
        self._state = state = SlotState.empty(experts.count, slots.count)
        self._where: Numbers = state.where.numpy()
        self._scores: Numbers = state.scores.numpy()
        self._held: Numbers = state.held.numpy()
        self._counts: Numbers = state.counts.numpy()
        self._table: torch.Tensor | None = None  # `_where` on the device, if it is as the host has it
        whole = all(plane.shape[1] % WORD_BYTES == 0 for plane in self._host)
        self._on_device: DeviceSlots | None = None
        if device is not None and whole and slots.count:
            self._on_device = DeviceSlots(state, slots, self._host, device)
        self.device_slots = 0 if self._on_device is None else slots.count

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of the experts in slots, sorted."""
        self._learn()
        return tuple(sorted(int(each) for each in self._held if each >= 0))

    @property
    def counts(self) -> tuple[int, int]:
        """(experts that steps found in slots, experts that were copied from host memory), numbers so far."""
        self._learn()
        return int(self._counts[0]), int(self._counts[1])

    def _learn(self) -> None:
        """Have the host know what the GPU has chosen; waits for its work."""
        if self._on_device is not None:
            self._state.flat.copy_(self._on_device.state.flat)

    def rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        """Experts in slots first, then the others as they arrive, and the host waits for `ids`; of few tokens
        without waiting."""
        few = ids.numel() <= EXPERT_ROUNDS * self.device_slots
        if self._on_device is not None and few and by_kernels(ids, *KERNELS):
            yield from self._on_device.rounds(ids)
            return
        self._learn()
        try:
            yield from self._rounds(ids)
        finally:
            if self._on_device is not None:
                flat = self._on_device.state.flat
                flat.copy_(to_device(self._state.flat, flat.device))

    def _rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        count = len(self._where)
        # A row of scores that aren't finite may have chosen a number that no expert has.
        chosen = np.bincount(ids.flatten().cpu().numpy(), minlength=count)[:count]
        self._scores *= DECAY
        self._scores += (chosen / len(ids)).astype(np.float32)
        needed = chosen.nonzero()[0]
        absent = self._where[needed] < 0
        missing, present = needed[absent], needed[~absent]
        self._counts += len(present), len(missing)
        if self._on_device is not None:
            self._table = self._on_device.state.where
        if self._table is None:
            self._table = to_device(torch.from_numpy(self._where.copy()), ids.device)
        before = self._slots.round(self._table)
        if not len(missing):
            yield before
            return
        # A slot's old content is in use until here, and a half's until the round after it was launched.
        marks = [self._copies.mark()] * 2
        batches = self._batches(missing, present)
        tables, self._table = to_device(self._tables(batches), ids.device), None
        events = [self._bring(each, marks[0]) for each in batches[: 2 if self._pinned else 0]]
        if len(present):
            yield before
        for number, batch in enumerate(batches):
            if not self._pinned:
                events.append(self._bring(batch, marks[number]))
            self._copies.wait(events[number])
            if batch.place is self._slots:
                self._where[batch.experts], self._held[batch.at] = batch.at, batch.experts
            yield batch.place.round(tables[number])
            marks.append(self._copies.mark())
            if self._pinned and number + 2 < len(batches):
                events.append(self._bring(batches[number + 2], marks[-1]))
        self._table = tables[-1]

    def _batches(self, missing: Numbers, present: Numbers) -> list[_Batch]:
        """Experts to bring to slots and room, some at a time; slots that are written to are empty at once."""
        held, scores = self._held, self._scores
        best = missing[(-scores[missing]).argsort(kind="stable")]
        worth = scores[held]  # a copy; of an empty slot that of another expert, for the moment
        worth[self._where[present]] = np.inf
        worth[held < 0] = -1
        slots = worth.argsort(kind="stable")[: len(best)]
        # The best of those that arrive against the worst of those that are there: true, then false.
        some = int(np.count_nonzero(scores[best[: len(slots)]] > worth[slots]))
        slots = np.sort(slots[:some])
        old = held[slots]
        self._where[old[old >= 0]] = -1
        held[slots] = -1
        arriving, passing = np.sort(best[:some]), np.sort(best[some:])
        made = [
            _Batch(arriving[start : start + HALF], self._slots, slots[start : start + HALF])
            for start in range(0, some, HALF)
        ]
        for start in range(0, len(passing), HALF):
            experts = passing[start : start + HALF]
            # Two batches that follow one another are never in the same half.
            made.append(_Batch(experts, self._halves[len(made) % 2], np.arange(len(experts))))
        return made

    def _tables(self, batches: Sequence[_Batch]) -> torch.Tensor:
        """Where each expert is in the round of each batch, `[batches + 1, experts]` int32; last: in slots."""
        tables = np.full((len(batches) + 1, len(self._where)), -1, np.int32)
        tables[-1] = self._where
        for table, batch in zip(tables[:-1], batches, strict=True):
            table[batch.experts] = batch.at
            if batch.place is self._slots:
                tables[-1][batch.experts] = batch.at
        return torch.from_numpy(tables)

    def _bring(self, batch: _Batch, after: Any) -> Any:
        """Ask for the copies of a batch; the end of the last. Neighbours in both memories are one copy."""
        runs: list[tuple[int, int, int]] = []  # first expert, first place, how many
        for expert, at in zip(batch.experts.tolist(), batch.at.tolist(), strict=True):
            first, start, many = runs[-1] if runs else (expert, at, 0)
            if many and (expert, at) == (first + many, start + many):
                runs[-1] = first, start, many + 1
            else:
                runs.append((expert, at, 1))
        pairs = [
            (to[at : at + many], of[expert : expert + many])
            for expert, at, many in runs
            for to, of in zip(batch.place.planes, self._host, strict=True)
        ]
        return self._copies.copy_all(pairs, after)

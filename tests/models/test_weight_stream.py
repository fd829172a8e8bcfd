"""A streamed tower is the resident one to the last bit, whenever its copies happen, in a room of known size.

The copies here are the worst that a GPU may do: the room is overwritten with NaN as soon as a copy is asked
for, and holds the new bytes only when they are waited for.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import snugvl
from snugvl.checkpoint.architecture import VisionConfig
from snugvl.layers.linear import Linear
from snugvl.models import host_memory, loader
from snugvl.models.batch import patch_reader
from snugvl.models.host_memory import WeightStream, room_bytes, to_host, unit_bytes
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.vision import VisionTower
from tests.models.test_tower_int8 import NARROW, QWEN3, WINDOWS, quantised
from tests.models.test_vision import encode, filled

CPU = torch.device("cpu")
POCKET = Path(snugvl.__file__).parent / "pocket"
APART = VisionConfig(4, 48, 64, 4, 3, 4, 2, 2, 24, 25, (1,), "gelu_pytorch_tanh", 1e4)
MAKERS: dict[str, Callable[[], Any]] = {
    "deepstack": lambda: VisionTower(APART),
    "neighbouring mergers": lambda: VisionTower(QWEN3),
    "narrow": lambda: VisionTower(NARROW),
    "windows": lambda: Qwen25Tower(WINDOWS),
}


@dataclass
class Copy:
    room: torch.Tensor
    source: torch.Tensor
    after: int


class LateCopies:
    """Stands for `CopyStream`: marks are counted, a copy's bytes come when it is waited for."""

    device = CPU

    def __init__(self, device: torch.device = CPU) -> None:
        self.marks = 0
        self.copies: list[Copy] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def copy(self, room: torch.Tensor, source: torch.Tensor, after: int) -> Copy:
        room.fill_(255)  # NaN in any float
        self.copies.append(Copy(room, source, after))
        return self.copies[-1]

    def wait(self, copy: Copy) -> None:
        copy.room.copy_(copy.source)


def streamed(tower: Any, *, ahead: bool = True) -> Any:
    """The same tower with its weights in host memory, as the loader does it."""
    units = tower.units
    before = [[tensor.clone() for _, _, tensor in host_memory._tensors(unit)] for unit in units]
    host = to_host(units, pinned=False)
    for unit, values in zip(units, before, strict=True):
        for (_, _, tensor), value in zip(host_memory._tensors(unit), values, strict=True):
            tensor.copy_(value)
    room = torch.empty(room_bytes(units, [len(each) for each in host]), dtype=torch.uint8)
    stream = WeightStream(units, host, room, LateCopies())  # type: ignore[arg-type]
    stream.ahead = ahead
    tower.weights = stream
    return stream


def pictures(tower: Any) -> list[tuple[torch.Tensor, tuple[int, int, int]]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(math.prod(grid), tower.config.patch_dim, generator=made), grid)
        for grid in ((1, 4, 6), (2, 8, 10))
    ]


@pytest.mark.parametrize("ahead", [True, False], ids=["pinned", "plain"])
@pytest.mark.parametrize("form", ["wide", "int8"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.sample(
    "deepstack-wide-pinned", "narrow-int8-plain", "windows-int8-pinned", "neighbouring mergers-wide-pinned"
)
def test_a_streamed_tower_is_the_resident_one(name: str, form: str, ahead: bool) -> None:
    torch.manual_seed(0)
    tower = filled(MAKERS[name]())
    for module in tower.modules():
        if isinstance(module, Linear) and form == "int8":
            quantised(module)
    with torch.no_grad():
        right = [encode(tower, *picture)[0] for picture in pictures(tower)]
        stream = streamed(tower, ahead=ahead)
        found = [encode(tower, *picture)[0] for picture in pictures(tower)]
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert len(stream.copies.copies) == 2 * len(stream.units), "each unit once a picture"


@pytest.mark.parametrize("ahead", [True, False], ids=["pinned", "plain"])
@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_overwritten_while_the_gpu_may_read_it(name: str, ahead: bool) -> None:
    tower = MAKERS[name]()
    stream = streamed(tower, ahead=ahead)
    stream.begin()
    passing = stream.begin()  # the first one was dropped
    log = stream.copies
    done: list[int] = []  # the mark that has all work on each unit before it
    for unit in stream.units:
        done.append(log.marks + 1)
        passing.reach(unit)
    copies = log.copies[1:]
    for index, copy in enumerate(copies):
        for earlier in range(index):
            if copy.room.data_ptr() < _end(copies[earlier].room) and copies[earlier].room.data_ptr() < _end(
                copy.room
            ):
                assert copy.after >= done[earlier + 1], f"unit {index} comes while {earlier} is in use"
    beside = [copy.after < done[i] for i, copy in enumerate(copies) if i and stream.together(i)]
    assert all(beside), "a unit that has room comes while the one before computes"


def _end(room: torch.Tensor) -> int:
    return room.data_ptr() + room.nbytes


def test_a_pass_pauses_is_dropped_and_begun_again() -> None:
    torch.manual_seed(0)
    tower: Any = filled(VisionTower(APART))
    (first, grid), (second, other) = pictures(tower)
    with torch.no_grad():
        right = encode(tower, second, other)[0]
        streamed(tower)
        steps = tower.encode_in_steps(patch_reader(first, CPU, first.dtype), grid)
        next(steps)
        next(steps)
        found = encode(tower, second, other)[0]
        with pytest.raises(AssertionError, match="another pass"):
            list(itertools.islice(steps, 100))
    assert torch.equal(right, found)


def test_units_come_in_their_order() -> None:
    stream = streamed(VisionTower(APART))
    passing = stream.begin()
    passing.reach(stream.units[0])
    with pytest.raises(AssertionError, match="order"):
        passing.reach(stream.units[2])


def test_the_room_holds_a_block_beside_the_largest_unit() -> None:
    tower: Any = VisionTower(APART)
    block, merger = unit_bytes(tower.blocks[0]), unit_bytes(tower.deepstack_merger_list[0])
    whole = tensor_bytes(tower)
    stream = streamed(tower)
    assert merger > block
    assert len(stream.room) == room_bytes(stream.units, [len(each) for each in stream.host]) == block + merger
    beside = sum(part.weight.nbytes for part in (tower.patch_embed["proj"], tower.pos_embed))
    bias = tower.patch_embed["proj"].bias
    assert tensor_bytes(tower) == len(stream.room) + beside + bias.nbytes < whole


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_checkpoint_is_loaded_with_a_streamed_tower(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CopyStream", LateCopies)
    kind: Any = {"dtype": torch.bfloat16, "device": CPU}
    resident: Any = load_model(POCKET, storage=Storage(tower=form), **kind)  # type: ignore[arg-type]
    ours: Any = load_model(POCKET, storage=Storage(tower=form, streamed="pinned"), **kind)  # type: ignore[arg-type]
    picture = pictures(ours.tower)[0]
    with torch.no_grad():
        patches = picture[0].bfloat16()
        assert torch.equal(
            encode(resident.tower, patches, picture[1])[0], encode(ours.tower, patches, picture[1])[0]
        )
    assert isinstance(ours.tower.weights, WeightStream)
    assert tensor_bytes(ours.tower) < tensor_bytes(resident.tower)

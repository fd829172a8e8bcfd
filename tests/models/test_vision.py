"""The tower in chunks: the same values however it is cut, and a workspace that is what its docstring says."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.models import vision
from snugvl.models.batch import GridTHW, patch_reader
from snugvl.models.patches import chunks, groups
from snugvl.models.vision import VisionTower
from tests.planner.trace import Trace, fused_attention

CPU = torch.device("cpu")
TINY = VisionConfig(3, 48, 64, 4, 3, 4, 2, 2, 24, 25, (0, 2), "gelu_pytorch_tanh", 1e4)


def config(hidden: int, intermediate: int, out: int) -> VisionConfig:
    """A real tower, with fewer blocks."""
    return VisionConfig(
        4, hidden, intermediate, 16, 3, 16, 2, 2, out, 2304, (0, 1, 2), "gelu_pytorch_tanh", 1e4
    )


@pytest.fixture(scope="module")
def tower() -> Iterator[VisionTower]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield filled(VisionTower(TINY))
    torch.set_num_threads(threads)


def filled(tower: nn.Module) -> nn.Module:
    """With random weights of a size that keeps activations moderate."""
    for parameter in tower.requires_grad_(False).parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
    return tower


def encode(tower: VisionTower, patches: torch.Tensor, grid: GridTHW) -> tuple[torch.Tensor, list[int]]:
    """The encoding, and the work at each stop."""
    stops = []
    steps = tower.encode_in_steps(patch_reader(patches, CPU, patches.dtype), grid)
    while True:
        try:
            stops.append(next(steps))
        except StopIteration as end:
            return end.value, stops


GRIDS = [(1, 2, 2), (1, 4, 6), (1, 10, 14), (3, 4, 6), (5, 10, 2), (2, 8, 20)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rows", [4, 20, 64])
def test_chunks_change_nothing(
    tower: VisionTower, grid: GridTHW, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = torch.randn(math.prod(grid), TINY.patch_dim, generator=torch.Generator().manual_seed(1))
    whole, stops = encode(tower, patches, grid)
    monkeypatch.setattr(vision, "ROWS", rows)
    cut, more = encode(tower, patches, grid)
    assert torch.allclose(whole, cut, atol=1e-5, rtol=0)
    assert sum(stops) == sum(more), "the work is the same"
    assert len(more) >= TINY.depth * math.prod(grid) / max(rows, grid[1] * grid[2])


@pytest.mark.parametrize("rows", [8, 2048])
def test_frames_attend_to_themselves_only(
    tower: VisionTower, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "ROWS", rows)
    patches = torch.randn(3 * 24, TINY.patch_dim, generator=torch.Generator().manual_seed(2))
    whole, _ = encode(tower, patches, (3, 4, 6))
    frames = [encode(tower, frame, (1, 4, 6))[0] for frame in patches.split(24)]
    assert torch.allclose(whole, torch.cat(frames), atol=1e-5, rtol=0)


def test_two_images_under_way_do_not_meet(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "ROWS", 8)
    grid = (1, 4, 6)
    images = [torch.randn(24, TINY.patch_dim), torch.randn(24, TINY.patch_dim)]
    right = [encode(tower, image, grid)[0] for image in images]
    under_way = [tower.encode_in_steps(patch_reader(image, CPU, image.dtype), grid) for image in images]
    done: list[torch.Tensor] = []
    while len(done) < 2:
        for steps in under_way:
            try:
                next(steps)
            except StopIteration as end:
                if end.value is not None:  # asked again after its end
                    done.append(end.value)
    assert all(torch.equal(a, b) for a, b in zip(right, done, strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "grid"),
    [
        ((1024, 4096, 2048), torch.bfloat16, (1, 32, 32)),
        ((1024, 4096, 2048), torch.float32, (12, 20, 20)),
        ((1024, 4096, 2560), torch.bfloat16, (1, 188, 252)),
        ((1024, 4096, 2560), torch.float32, (1, 64, 64)),
        ((1152, 4304, 4096), torch.bfloat16, (12, 20, 20)),
        ((1152, 4304, 4096), torch.bfloat16, (1, 256, 256)),
        ((1152, 4304, 4096), torch.float32, (1, 32, 32)),
    ],
)
@pytest.mark.sample(
    "shape0-dtype0-grid0", "shape1-dtype1-grid1", "shape3-dtype3-grid3", "shape4-dtype4-grid4"
)
def test_the_workspace_is_what_the_docstring_says(
    shape: tuple[int, int, int], dtype: torch.dtype, grid: GridTHW
) -> None:
    with torch.device("meta"):
        tower = VisionTower(config(*shape)).to(dtype)
    trace = Trace()
    for parameter in tower.parameters():
        trace.keep(parameter)

    def read(start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, 1536, dtype=dtype, device="meta")

    with torch.no_grad(), trace, fused_attention("snugvl.models.vision_blocks.scaled_dot_product_attention"):
        for _ in tower.encode_in_steps(read, grid):
            pass
    h, i, out = shape
    patches, s, d = math.prod(grid), dtype.itemsize, h // 16
    kept = max(part.end - part.start for part in groups(grid, vision.ROWS))
    chunk = chunks(kept, vision.ROWS, 4)[0].stop
    formula = patches * (h * s + 16) + kept * 2 * h * s + chunk * (h + i) * s
    formula += 2 * d * max(grid[1:]) + patches * 4 * out * s // 4
    assert trace.peak == pytest.approx(formula, rel=1e-4)


@pytest.mark.parametrize("count", [4, 8, 20, 2048, 2052, 4096, 47_376, 65_536])
def test_chunks_are_even_and_cover_everything(count: int) -> None:
    pieces = chunks(count, 2048, 4)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(count))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size % 4 == 0 and size <= 2048 for size in sizes)
    assert len(pieces) == math.ceil(count / 2048)


def test_groups_are_whole_frames() -> None:
    assert [(g.start, g.end, g.frames) for g in groups((5, 4, 6), 50)] == [
        (0, 48, 2),
        (48, 96, 2),
        (96, 120, 1),
    ]
    assert [(g.start, g.end, g.frames) for g in groups((2, 8, 8), 50)] == [(0, 64, 1), (64, 128, 1)]


def test_bytes_are_read_as_what_they_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (6, 3 * 16), dtype=torch.uint8, generator=generator)
    levels = torch.randn(3, 256, generator=generator)
    meant = torch.stack([levels[c][codes.view(6, 3, 16)[:, c].long()] for c in range(3)], 1)
    twice = torch.stack([meant, meant], 2).flatten(1)  # each channel's frame in both slots
    assert torch.equal(patch_reader(codes, CPU, torch.float32, levels, 2)(1, 5), twice[1:5])
    assert torch.equal(patch_reader(codes, CPU, torch.bfloat16, levels)(0, 6), meant.flatten(1).bfloat16())

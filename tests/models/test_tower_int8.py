"""A tower in int8 is the tower with the weights that int8 means, whatever their widths."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import snugvl
from snugvl.backends.native import loading
from snugvl.checkpoint.architecture import VisionConfig
from snugvl.checkpoint.read import facts_of
from snugvl.layers import linear as layers
from snugvl.layers.linear import Linear
from snugvl.layers.weights import to_int8
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.vision import VisionTower
from snugvl.planner.footprint.weights import part_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.models.test_vision import encode, filled

CPU = torch.device("cpu")
POCKET = Path(snugvl.__file__).parent / "pocket"
# Widths that divide into groups of 128 and widths that don't, as those of the 8B's tower (1152, 4304).
QWEN3 = VisionConfig(3, 128, 272, 4, 3, 4, 2, 2, 72, 25, (0, 2), "gelu_pytorch_tanh", 1e4)
NARROW = VisionConfig(2, 48, 128, 4, 3, 4, 2, 2, 24, 25, (), "gelu_pytorch_tanh", 1e4)
WINDOWS = VisionConfig(
    3, 80, 220, 4, 3, 14, 2, 2, 96, 0, (), "silu", 1e4, window=8, full_blocks=(1,)
)  # fmt: skip


def quantised(linear: Linear) -> None:
    """As loading does, but in place."""
    values = linear.weight.clone()
    linear.store_as("int8", linear.columns if linear.columns % 128 else 128)
    linear.put(0, values)


def dequantised(linear: Linear) -> None:
    """The plain weights that int8 means, by its definition."""
    group = linear.columns if linear.columns % 128 else 128
    linear.weight.copy_(to_int8(linear.weight, group).wide(torch.float32))


def towers(
    make: Callable[[], VisionTower | Qwen25Tower],
) -> tuple[VisionTower | Qwen25Tower, VisionTower | Qwen25Tower]:
    """The same random tower, in int8 and wide with the weights of that."""
    made = []
    for change in (quantised, dequantised):
        torch.manual_seed(0)
        tower = filled(make())
        for module in tower.modules():
            if isinstance(module, Linear):
                change(module)
        made.append(tower)
    return made[0], made[1]


@pytest.mark.parametrize(
    "make",
    [lambda: VisionTower(QWEN3), lambda: VisionTower(NARROW), lambda: Qwen25Tower(WINDOWS)],
    ids=["deepstack", "narrow", "windows"],
)
@pytest.mark.parametrize("slice_bytes", [1, 1 << 14, 16 << 20])
def test_int8_is_the_tower_with_dequantised_weights(
    make: Callable[[], VisionTower | Qwen25Tower], slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "SLICE_BYTES", slice_bytes)
    ours, plain = towers(make)
    for grid in ((1, 2, 2), (1, 10, 14), (2, 4, 6)):
        patches = torch.randn(
            math.prod(grid), ours.config.patch_dim, generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            low, right = encode(ours, patches, grid)[0], encode(plain, patches, grid)[0]
        assert torch.allclose(low, right, atol=1e-4, rtol=1e-4)
        assert right.abs().max() > 0.1  # it isn't zeros that agree


def test_int8_is_near_to_the_tower_as_it_was() -> None:
    torch.manual_seed(0)
    plain = filled(VisionTower(QWEN3))
    ours, _ = towers(lambda: VisionTower(QWEN3))
    patches = torch.randn(140, QWEN3.patch_dim, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        right, low = encode(plain, patches, (1, 10, 14))[0], encode(ours, patches, (1, 10, 14))[0]
    error = ((low - right).norm() / right.norm()).item()
    assert 1e-4 < error < 0.03


def test_slices_are_even_and_small_enough() -> None:
    for rows, row_bytes in product((1, 31, 32, 33, 100, 4304, 4608), (2304, 8608, 9216, 64 << 20)):
        step = layers.slice_rows(rows, row_bytes)
        assert 1 <= step <= rows, row_bytes
        assert step * row_bytes <= max(layers.SLICE_BYTES, layers.SLICE_ROWS * row_bytes)
        assert step == rows or step % layers.SLICE_ROWS == 0, row_bytes


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_some_rows_of_a_product(kind: layers.FormatName) -> None:
    linear = Linear(48, 96, bias=True)
    values = torch.randn(96, 48, generator=torch.Generator().manual_seed(0))
    linear.store_as(kind, 48)
    linear.put(0, values)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    x = torch.randn(5, 48)
    whole = torch.nn.functional.linear(x, linear.weights.wide(torch.float32), linear.bias)
    out = torch.empty(5, 64)
    assert linear.wide_product(x, 32, out=out) is out
    assert torch.allclose(out, whole[:, 32:], atol=1e-5)
    assert torch.allclose(linear.wide_product(x, 0, 32), whole[:, :32], atol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "tiny_fp8"])
def test_any_checkpoint_is_loaded_with_a_tower_in_int8(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    stored = load_file(folder / "model.safetensors")
    model = load_model(folder, dtype=torch.float32, device=CPU, storage=Storage(tower="int8"))
    assert isinstance(model.tower, VisionTower)
    linears = {part: each for part, each in model.tower.named_modules() if isinstance(each, Linear)}
    assert {each.format for each in linears.values()} == {"int8"}
    assert len(linears) == 4 * model.tower.config.depth + 2 * (1 + len(model.tower.config.deepstack_layers))
    for part, linear in linears.items():
        values = stored[f"model.visual.{part}.weight"].float()
        error = (linear.weights.wide(torch.float32) - values).norm() / values.norm()
        assert error < 0.012
    for wide in (model.tower.patch_embed["proj"], model.tower.pos_embed):
        assert wide.weight.dtype == torch.float32


def test_what_is_loaded_is_what_was_planned() -> None:
    model = load_model(POCKET, dtype=torch.bfloat16, device=CPU, storage=Storage(tower="int8"))
    assert model.tower is not None
    planned = Settings("native", "bf16", vision_weights="int8")
    assert part_bytes(inventory(facts_of(str(POCKET), offline=True)), planned, "vision") == tensor_bytes(
        model.tower
    )


def test_the_plans_formats_are_those_that_are_loaded() -> None:
    low = Settings("native", "int4", "int8", vision_weights="int8")
    assert loading.storage_of(low) == Storage("int4", "int8", tower="int8")
    pageable = Settings("native", "fp32", page_locked=False)
    assert loading.storage_of(pageable) == Storage(experts_pinned=False)

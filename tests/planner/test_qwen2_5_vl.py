"""Qwen2.5-VL on our engine: weights to the byte, and the tower's workspace traced on the meta device."""

from typing import Any

import pytest
import torch

from snugvl.checkpoint.catalogue import catalogue_facts, find
from snugvl.checkpoint.families import parse_config
from snugvl.models import loader
from snugvl.models.networks import network_of
from snugvl.planner.footprint import vision
from snugvl.planner.footprint.vision import ImageSize
from snugvl.planner.footprint.weights import LABELS, weight_bytes, weight_components
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings
from tests.models.forward import encode_vision
from tests.planner.test_native import held
from tests.planner.test_workspace import dequantized_on_a_gpu, traced
from tests.planner.trace import fused_attention


def network(size: str) -> Any:
    """Ours, without memory."""
    name = f"Qwen/Qwen2.5-VL-{size}-Instruct"
    found = find(name)
    assert found is not None
    with torch.device("meta"):
        return network_of(parse_config(found[0].config, name))


def model_of(size: str) -> Inventory:
    facts = catalogue_facts(f"Qwen/Qwen2.5-VL-{size}-Instruct")
    assert facts is not None
    return inventory(facts)


@pytest.mark.parametrize("size", ["3B", "7B"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_weights_are_planned_to_the_byte(size: str, weights: Any) -> None:
    ours = network(size).to(torch.bfloat16)
    loader.choose_formats(ours, loader.Storage(weights, "int8"), None)
    settings = Settings("native", weights, "int8")
    assert weight_bytes(model_of(size), settings) == held(ours)
    parts = {part.name: part.nbytes for part in weight_components(model_of(size), settings)}
    assert parts[LABELS["vision"]] == held(ours.tower)


@pytest.mark.parametrize(("size", "dtype"), [("3B", torch.float32), ("7B", torch.bfloat16)])
@pytest.mark.sample("3B-dtype0")
def test_the_vision_tower(size: str, dtype: torch.dtype) -> None:
    ours = network(size).to(dtype)
    del ours.tower.blocks[8:]  # seven of windows, one of whole frames: the workspace is that of one
    for high, wide in ((16, 16), (64, 64), (110, 98), (4, 800)):
        patches = torch.empty(high * wide, 1176, dtype=dtype, device="meta")
        with fused_attention("snugvl.models.vision_blocks.scaled_dot_product_attention"):
            grid = [(1, high, wide)]
            peak = traced(lambda: encode_vision(ours, patches, grid), *ours.parameters(), patches)  # noqa: B023
        image = ImageSize(high * wide // 4, high * wide)
        planned = vision.native_workspace(model_of(size), image, dtype.itemsize)
        assert peak <= planned <= peak * 1.02  # the tables are those of the longest image


@pytest.mark.parametrize("size", ["7B"])
def test_the_vision_tower_in_int8(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dequantized_on_a_gpu(monkeypatch)
    ours = network(size).to(torch.bfloat16)
    loader.choose_formats(ours, loader.Storage("int4", "int8", tower="int8"), None)
    settings = Settings("native", "int4", "int8", vision_weights="int8")
    parts = {part.name: part.nbytes for part in weight_components(model_of(size), settings)}
    assert parts[LABELS["vision"]] == held(ours.tower)
    del ours.tower.blocks[8:]
    for high, wide in ((2, 2), (16, 16), (64, 64), (110, 98)):
        patches = torch.empty(high * wide, 1176, dtype=torch.bfloat16, device="meta")
        with fused_attention("snugvl.models.vision_blocks.scaled_dot_product_attention"):
            grid, kept = [(1, high, wide)], (*ours.parameters(), *ours.buffers(), patches)
            peak = traced(lambda: encode_vision(ours, patches, grid), *kept)  # noqa: B023
        image = ImageSize(high * wide // 4, high * wide)
        planned = vision.native_workspace(model_of(size), image, 2, "int8")
        assert peak <= planned <= peak * 1.04

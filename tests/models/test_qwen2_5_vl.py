"""Qwen2.5-VL against Hugging Face transformers on the same weights, in float32; its tower in any chunks."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.checkpoint.families import read_config
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.models import qwen2_5_vision
from snugvl.models.batch import GridTHW, patch_reader
from snugvl.models.loader import load_model
from snugvl.models.networks import Qwen25VL
from snugvl.models.patches import groups, window_chunks, window_order
from snugvl.models.qwen2_5_vision import Qwen25Tower
from tests import qwen2_5_vl
from tests.models.forward import Prompt, encode_vision, logits
from tests.planner.trace import Trace, fused_attention
from tests.qwen2_5_vl import PATCH_DIM

CPU = torch.device("cpu")
GRIDS = {
    "smaller than a window": (1, 2, 6),
    "one window": (1, 8, 8),
    "whole windows": (1, 16, 24),
    "right edge": (1, 16, 10),
    "lower edge": (1, 10, 16),
    "corner": (1, 18, 22),
    "a strip": (1, 2, 60),
    "frames": (3, 10, 12),
    "frames of whole windows": (3, 8, 16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_vl.write(tmp_path_factory.mktemp("hub"), placeholders=qwen2_5_vl.PLACEHOLDERS)


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen25VL:
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(loaded, Qwen25VL)
    return loaded


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def patches_of(grid: GridTHW) -> torch.Tensor:
    return torch.randn(math.prod(grid), PATCH_DIM, generator=torch.Generator().manual_seed(sum(grid)))


@pytest.mark.parametrize("name", GRIDS)
def test_encodings_equal_transformers(name: str, model: Qwen25VL, theirs: Any) -> None:
    grid = GRIDS[name]
    with torch.inference_mode():
        ours = encode_vision(model, patches_of(grid), [grid])
        expected = theirs.model.visual(patches_of(grid), grid_thw=torch.tensor([grid])).pooler_output
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [4, 64, 100])
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.sample(
    "smaller than a window-64",
    "one window-100",
    "lower edge-4",
    "right edge-100",
    "a strip-64",
    "frames of whole windows-64",
    "whole windows-100",
    "frames-64",
    "corner-100",
)
def test_chunks_change_nothing(
    name: str, rows: int, model: Qwen25VL, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = GRIDS[name]
    whole, work = encode(model, grid)
    monkeypatch.setattr(qwen2_5_vision, "ROWS", rows)
    cut, more = encode(model, grid)
    assert torch.allclose(whole, cut, atol=1e-5, rtol=0)
    assert sum(work) == sum(more), "the work is the same"
    assert len(more) >= 4 * math.prod(grid) / max(rows, 120)


def encode(model: Qwen25VL, grid: GridTHW) -> tuple[torch.Tensor, list[int]]:
    """The encoding, and the work at each stop."""
    stops = []
    with torch.inference_mode():
        steps = model.encode_in_steps(patch_reader(patches_of(grid), CPU, torch.float32), grid)
        while True:
            try:
                stops.append(next(steps))
            except StopIteration as end:
                return end.value, stops


@given(
    grid=st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(1, 14)),
    side=st.integers(1, 5),
    rows=st.integers(1, 200),
)
def test_windows_are_squares_of_the_image(grid: GridTHW, side: int, rows: int) -> None:
    t, high, wide = grid
    order, runs = window_order((t, 2 * high, 2 * wide), 2, side, CPU)
    assert sorted(order.tolist()) == list(range(t * high * wide))
    found: set[frozenset[int]] = set()
    for run in runs:
        tokens = order[run.start // 4 : run.end // 4].view(run.count, -1)
        found |= {frozenset(window) for window in tokens.tolist()}
    squares: dict[tuple[int, int, int], set[int]] = {}
    for token in range(t * high * wide):
        row, column = token // wide % high, token % wide
        squares.setdefault((token // (high * wide), row // side, column // side), set()).add(token)
    assert found == {frozenset(square) for square in squares.values()}
    assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
    for piece in window_chunks(runs, rows):
        size = piece[-1].end - piece[0].start
        assert size <= rows or (len(piece) == 1 and piece[0].count == 1)
    flat = [run for piece in window_chunks(runs, rows) for run in piece]
    assert [run.start for run in flat] == [0, *(run.end for run in flat[:-1])]
    assert sum(run.count for run in flat) == len(squares)


def real(text_width: int) -> VisionConfig:
    """The tower of the published models, with fewer blocks."""
    return VisionConfig(
        4, 1280, 3420, 16, 3, 14, 2, 2, text_width, 0, (), "silu", 1e4, 8, (1, 3), 2
    )  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        ((1, 32, 32), torch.float32),
        ((1, 64, 64), torch.bfloat16),
        ((1, 190, 250), torch.bfloat16),
        ((12, 20, 20), torch.float32),
    ],
)
@pytest.mark.sample("grid1-dtype1", "grid3-dtype3")
def test_the_workspace_is_what_the_docstring_says(dtype: torch.dtype, grid: GridTHW) -> None:
    h, i, out = 1280, 3420, 2048
    with torch.device("meta"):
        tower = Qwen25Tower(real(out)).to(dtype)
    trace = Trace()
    for parameter in tower.parameters():
        trace.keep(parameter)

    def read(start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, PATCH_DIM, dtype=dtype, device="meta")

    place = "snugvl.models.vision_blocks.scaled_dot_product_attention"
    with torch.no_grad(), trace, fused_attention(place):
        for _ in tower.encode_in_steps(read, grid):
            pass
    patches, s, d = math.prod(grid), dtype.itemsize, h // 16
    runs = window_order(grid, 2, 4, torch.device("meta"))[1]
    windows = [p[-1].end - p[0].start for p in window_chunks(runs, qwen2_5_vision.ROWS)]
    kept = max(*(part.end - part.start for part in groups(grid, qwen2_5_vision.ROWS)), *windows)
    formula = patches * (h * s + 18) + kept * 2 * h * s + max(windows) * (h + 2 * i) * s
    formula += 2 * d * max(grid[1:]) + patches * out * s // 4
    assert trace.peak == formula


def image(grid: GridTHW, pad: int = qwen2_5_vl.IMAGE) -> list[int]:
    return [qwen2_5_vl.START, *[pad] * (math.prod(grid) // 4), qwen2_5_vl.END]


def prompt(*parts: int | GridTHW) -> Prompt:
    ids: list[int] = []
    for part in parts:
        ids += image(part) if isinstance(part, tuple) else [part]
    grids = [part for part in parts if isinstance(part, tuple)]
    patches = torch.cat([patches_of(grid) for grid in grids]) if grids else torch.empty(0, PATCH_DIM)
    return Prompt(ids, grids, patches)


CASES = {
    "text": prompt(5, 6, 7, 8),
    "one image": prompt(1, (1, 10, 22), 2, 3),
    "three images, some side by side": prompt(1, (1, 4, 6), (1, 18, 2), 2, (1, 2, 2), 3),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, chunked: bool, model: Qwen25VL, theirs: Any) -> None:
    case = CASES[name]
    ids = torch.tensor([case.ids])
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == qwen2_5_vl.IMAGE).int()}
    if case.grids:
        inputs |= {"pixel_values": case.patches, "image_grid_thw": torch.tensor(case.grids)}
    total = len(case.ids)
    chunks = [7] * (total // 7) + [total % 7] * (total % 7 > 0) if chunked else None
    with torch.inference_mode():
        expected = theirs(**inputs).logits[0]
    ours = logits(model, case, chunks)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_both_spellings_are_one_model(tied: bool, tmp_path: Path) -> None:
    states, configs = [], []
    for spelling in get_args(qwen2_5_vl.Spelling):
        (tmp_path / spelling).mkdir()
        folder = qwen2_5_vl.write(tmp_path / spelling, spelling, tied=tied)
        states.append(load_model(folder, dtype=torch.float32, device=CPU).state_dict())
        configs.append(read_config(folder))
    assert configs[0] == configs[1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def edited(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    copy = Path(shutil.copytree(folder, target / "copy"))
    state = load_file(copy / "model.safetensors")
    change(state)
    save_file(state, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.2.mlp.gate_proj.bias",
        "visual.merger.ln_q.weight",
        "model.layers.1.self_attn.k_proj.bias",
    ],
)
def test_a_missing_tensor_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    copy = edited(folder, tmp_path, lambda state: state.pop(name))
    with pytest.raises(CheckpointError, match=name.removeprefix("visual.").removeprefix("model.")):
        load_model(copy, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["visual.patch_embed.proj.bias", "model.layers.0.self_attn.q_norm.weight"])
def test_a_foreign_tensor_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    copy = edited(folder, tmp_path, lambda state: state.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=f"'{name}' does not belong to a Qwen2_5_VL"):
        load_model(copy, dtype=torch.float32, device=CPU)


def test_language_only(folder: Path, theirs: Any) -> None:
    alone = load_model(folder, dtype=torch.float32, device=CPU, language_only=True)
    assert alone.tower is None
    case = CASES["text"]
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([case.ids])).logits[0]
    torch.testing.assert_close(logits(alone, case), expected, atol=1e-4, rtol=0)


def test_quantised_files_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    values = json.loads((copy / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "awq", "bits": 3, "group_size": 128}
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match="'awq'"):
        load_model(copy, dtype=torch.float32, device=CPU)

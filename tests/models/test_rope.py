"""Positions against the oracle's `get_rope_index`, and refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from snugvl.models.rope import mrope_positions
from tests import checkpoints, qwen2_5_vl
from tests.checkpoints import END, IMAGE, START, VIDEO

grids = st.tuples(
    st.sampled_from(["image", "video"]), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)
)
parts = st.lists(st.one_of(st.integers(1, 299), grids), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def oracle() -> Qwen3VLModel:
    with torch.device("meta"):
        return Qwen3VLModel(Qwen3VLConfig(**checkpoints.config(checkpoints.Options())))


@given(parts=parts)
def test_positions_equal_transformers(
    oracle: Qwen3VLModel, parts: list[int | tuple[str, int, int, int]]
) -> None:
    ids: list[int] = []
    all_grids, by_kind = [], {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        kind, t, h, w = part
        t = t if kind == "video" else 1
        all_grids.append((t, 2 * h, 2 * w))
        by_kind[kind].append((t, 2 * h, 2 * w))
        pad = IMAGE if kind == "image" else VIDEO
        for frame in range(t):
            ids += [frame + 1, START, *[pad] * (h * w), END]
    kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in ids]
    expected, delta = oracle.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(by_kind["image"]) if by_kind["image"] else None,
        video_grid_thw=torch.tensor(by_kind["video"]) if by_kind["video"] else None,
    )
    positions, ours = mrope_positions(ids, all_grids, placeholders=(IMAGE, VIDEO), merge_size=2)
    assert torch.equal(positions, expected[:, 0])
    assert ours == int(delta)


@pytest.fixture(scope="module")
def oracle_of_times() -> Qwen2_5_VLModel:
    with torch.device("meta"):
        return Qwen2_5_VLModel(Qwen2_5_VLConfig(**qwen2_5_vl.config()))


@given(
    parts=parts,
    seconds=st.integers(0, 30).map(float) if qwen2_5_vl.WHOLE_SECONDS else st.floats(0, 30, width=32),
)
def test_positions_of_one_run_equal_transformers(
    oracle_of_times: Qwen2_5_VLModel, parts: list[int | tuple[str, int, int, int]], seconds: float
) -> None:
    """Qwen2.5-VL: a video is one run, its frames apart in time."""
    ids: list[int] = []
    grids, steps, by_kind = [], [], {"image": [], "video": []}
    per_second = qwen2_5_vl.VISION["tokens_per_second"]
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        kind, t, h, w = part
        grid = (t if kind == "video" else 1, 2 * h, 2 * w)
        grids.append(grid)
        by_kind[kind].append(grid)
        steps.append(float(per_second * torch.tensor(seconds)) if kind == "video" else None)
        ids += [START, *[IMAGE if kind == "image" else VIDEO] * (grid[0] * h * w), END]
    kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in ids]
    expected, delta = oracle_of_times.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(by_kind["image"]) if by_kind["image"] else None,
        video_grid_thw=torch.tensor(by_kind["video"]) if by_kind["video"] else None,
        second_per_grid_ts=torch.tensor([seconds] * len(by_kind["video"])),
    )
    positions, ours = mrope_positions(ids, grids, placeholders=(IMAGE, VIDEO), merge_size=2, time_steps=steps)
    assert torch.equal(positions, expected[:, 0])
    assert ours == int(delta)


@pytest.mark.parametrize(
    ("ids", "grids"),
    [
        ([1, IMAGE, 2], [(1, 4, 4)]),  # too few placeholders
        ([1, IMAGE, IMAGE, 2], [(1, 2, 2)]),  # too many
        ([1, 2], [(1, 2, 2)]),  # none
        ([1, IMAGE], []),  # no image
    ],
)
def test_placeholders_that_match_no_image_are_refused(
    ids: list[int], grids: list[tuple[int, int, int]]
) -> None:
    with pytest.raises(ValueError, match="placeholder"):
        mrope_positions(ids, grids, placeholders=(IMAGE, VIDEO), merge_size=2)

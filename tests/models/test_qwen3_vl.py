"""Our network against Hugging Face transformers on the same weights, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from snugvl.models.loader import load_model
from snugvl.models.networks import Qwen3VL
from tests import checkpoints
from tests.checkpoints import END, IMAGE, START, VIDEO
from tests.models.forward import Prompt, logits

CPU = torch.device("cpu")


def image(grid: tuple[int, int, int], pad: int = IMAGE) -> list[int]:
    return [START, *[pad] * (grid[0] * grid[1] * grid[2] // 4), END]


def prompt(*parts: int | tuple[int, int, int]) -> Prompt:
    """Token ids and grids in order; random pixels."""
    ids: list[int] = []
    grids = [part for part in parts if isinstance(part, tuple)]
    for part in parts:
        ids += image(part) if isinstance(part, tuple) else [part]
    count = sum(t * h * w for t, h, w in grids)
    return Prompt(ids, grids, torch.randn(count, 1536, generator=torch.Generator().manual_seed(len(ids))))


def oracle(folder: Path, case: Prompt, *, video: bool = False) -> torch.Tensor:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in case.ids]
    inputs = {"input_ids": torch.tensor([case.ids]), "mm_token_type_ids": torch.tensor([kinds])}
    if case.grids:
        name, grid = (
            ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        )
        inputs |= {name: case.patches, grid: torch.tensor(case.grids)}
    with torch.inference_mode():
        result: torch.Tensor = model(**inputs).logits[0]
    return result


CASES = {
    "text": prompt(5, 6, 7, 8),
    "one image": prompt(1, (1, 4, 6), 2, 3),
    "three images, some side by side": prompt(1, (1, 4, 6), (1, 8, 2), 2, (1, 2, 2), 3),
    "image last": prompt(1, 2, (1, 6, 6)),
    "larger than the position grid": prompt(1, (1, 18, 4), 2),
}


@pytest.fixture(scope="module")
def model(tiny: Path) -> Qwen3VL:
    return load_model(tiny, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, model: Qwen3VL, tiny: Path) -> None:
    ours, theirs = logits(model, CASES[name]), oracle(tiny, CASES[name])
    assert theirs.abs().max() > 0.5  # random weights must not make the comparison trivial
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_video_frames_equal_transformers(model: Qwen3VL, tiny: Path) -> None:
    """Each frame stands in its own vision markers, with its timestamp as text before it."""
    frame = image((1, 4, 4), VIDEO)
    case = Prompt([1, 9, *frame, 10, *frame, 2], [(2, 4, 4)], torch.randn(32, 1536))
    torch.testing.assert_close(logits(model, case), oracle(tiny, case, video=True), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 1, 13, 19], [39, 1]])
def test_chunks_of_a_prefill_equal_the_whole(chunks: list[int], tiny: Path) -> None:
    """In float64, where sums in another order don't show."""
    model = load_model(tiny, dtype=torch.float64, device=CPU)
    case = prompt(1, (1, 8, 8), 2, (1, 4, 10), 3, 4, 5, 6, 7, *range(8, 8 + 3))
    case = Prompt([*case.ids, *range(20, 20 + sum(chunks) - len(case.ids))], case.grids, case.patches)
    whole = logits(model, case)
    torch.testing.assert_close(logits(model, case, chunks), whole, atol=1e-10, rtol=0)


def test_an_untied_checkpoint_in_shards_equals_transformers(tiny_untied: Path) -> None:
    ours = logits(load_model(tiny_untied, dtype=torch.float32, device=CPU), CASES["one image"])
    torch.testing.assert_close(ours, oracle(tiny_untied, CASES["one image"]), atol=1e-4, rtol=0)


def test_fp8_blocks_equal_transformers_on_dequantised_weights(tiny_fp8: Path) -> None:
    """transformers' own FP8 path needs a kernel from the Hub, so it gets the plain product of the blocks."""
    values = checkpoints.config(checkpoints.Options())
    oracle_model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values)).eval()
    state = checkpoints.dequantised(tiny_fp8)
    oracle_model.load_state_dict(state)
    ours = load_model(tiny_fp8, dtype=torch.float32, device=CPU)
    case = CASES["text"]
    with torch.inference_mode():
        theirs = oracle_model(torch.tensor([case.ids])).logits[0]
    torch.testing.assert_close(logits(ours, case), theirs, atol=1e-4, rtol=0)


def test_bf16_stays_close_to_transformers_in_bf16(tiny: Path) -> None:
    ours = load_model(tiny, dtype=torch.bfloat16, device=CPU)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.bfloat16)
    case = CASES["text"]
    with torch.inference_mode():
        expected = theirs(torch.tensor([case.ids])).logits[0].float()
    error = (logits(ours, case) - expected).norm() / expected.norm()
    assert error < 2e-2

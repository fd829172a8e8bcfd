"""Qwen3.5 on our network against Hugging Face transformers on the same weights, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from snugvl.models.loader import load_model
from snugvl.models.qwen3_5 import Qwen35
from tests import hybrid
from tests.checkpoints import IMAGE, VIDEO
from tests.models.forward import Prompt, logits
from tests.models.test_qwen3_vl import CASES, image, prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid.write(tmp_path_factory.mktemp("hybrid"), hybrid.Options(predictor=True))


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen35:
    made = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(made, Qwen35)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Qwen3_5ForConditionalGeneration:
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def oracle(model: Qwen3_5ForConditionalGeneration, case: Prompt, *, video: bool = False) -> torch.Tensor:
    kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in case.ids]
    inputs = {"input_ids": torch.tensor([case.ids]), "mm_token_type_ids": torch.tensor([kinds])}
    if case.grids:
        kind = "video" if video else "image"
        name = "pixel_values_videos" if video else "pixel_values"
        inputs |= {name: case.patches.to(model.dtype), f"{kind}_grid_thw": torch.tensor(case.grids)}
    with torch.inference_mode():
        result: torch.Tensor = model(**inputs).logits[0].float()
    return result


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, model: Qwen35, theirs: Qwen3_5ForConditionalGeneration) -> None:
    right = oracle(theirs, CASES[name])
    assert right.abs().max() > 0.5  # random weights must not make the comparison trivial
    torch.testing.assert_close(logits(model, CASES[name]), right, atol=1e-4, rtol=0)

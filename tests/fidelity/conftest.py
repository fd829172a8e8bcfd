"""Pocket and a tiny checkpoint of random weights, with what compares them and transformers beside."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

import snugvl
from snugvl.core.options import LoadOptions
from snugvl.fidelity.comparison import Comparison, comparison_of
from snugvl.fidelity.stages import Item
from snugvl.fidelity.variants import Question, variants_of
from snugvl.fidelity.work import Work
from tests import checkpoints
from tests.inputs.conftest import whole_options, write_whole

POCKET = Path(snugvl.__file__).parent / "pocket"
CAPTION = Question("caption", max_tokens=12)
Tokens = tuple[int, ...]


@pytest.fixture(scope="session")
def tiny_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a real tokenizer and template."""
    return write_whole(tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="session")
def tiny_other(tiny_whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens, other weights."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(tiny_whole, folder, dirs_exist_ok=True)
    return checkpoints.write(folder, whole_options(folder, seed=1))


def scene(number: int, size: tuple[int, int] = (224, 160)) -> Image.Image:
    """A drawn scene that pocket can describe."""
    image = Image.new("RGB", size, ("white", "lightyellow", "lightblue")[number % 3])
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 30, 90, 90), fill=("red", "green", "blue")[number % 3])
    draw.rectangle((120, 70, 190, 130), fill=("orange", "purple", "black")[number % 3])
    return image


def items(count: int, question: Question = CAPTION, size: tuple[int, int] = (224, 160)) -> list[Item]:
    """A question about so many scenes."""

    def read(number: int) -> Callable[[], Image.Image]:
        return lambda: scene(number, size)

    return [Item(f"{number}.png", size, read(number), question) for number in range(count)]


def compared(
    model: Path | str,
    some: Sequence[Item],
    *,
    passes: int = 2,
    said: dict[str, Any] | None = None,
    **axes: Any,
) -> tuple[Comparison, Work]:
    """A comparison on the CPU, all in memory. `said`: more of `comparison_of`."""
    base = LoadOptions(str(model), device="cpu", dtype="float32", context=1024)
    return comparison_of(
        base,
        variants_of(base, **axes),
        some,
        passes=passes,
        tell=lambda _stage, _detail, _done, _left: None,
        pictures={},
        **(said or {}),
    )


def answers_of(work: Work, variant: int) -> dict[int, Tokens]:
    """What a variant answered, by question."""
    return {each["number"]: tuple(each["tokens"]) for each in work.records(f"answers-{variant}")}


def oracle_logits(
    model: Any, comparison: Comparison, item: Item, answer: Tokens, **given: Any
) -> torch.Tensor:
    """transformers' logits where each token of an answer is chosen, `[tokens, vocab]`, in one forward.

    `given`: more for the forward; `side`: whose prompt it is, the reference's by default.
    """
    side = given.pop("side", comparison.reference)
    prompt = side.prepared(item.question, item.read()).prompt
    ids = torch.tensor([[*prompt.ids, *answer]])
    kinds = sum(index * (ids == token).long() for index, token in enumerate(side.config.placeholders, 1))
    pixels = torch.cat([each.values() for each in prompt.vision])
    grids = torch.tensor([each.grid_thw for each in prompt.vision])
    with torch.inference_mode():
        out = model(
            input_ids=ids, mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grids, **given
        )
    logits: torch.Tensor = out.logits[0, len(prompt.ids) - 1 : -1].double()
    return logits


def divergence(right: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL a token, straight from its definition."""
    a, b = right.log_softmax(-1), ours.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)

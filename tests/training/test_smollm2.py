"""Real weights: our network against transformers on SmolLM2, and that the written costs are today's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results/smollm2/format_cost.json"
WRITTEN = json.loads(RESULTS.read_text())["formats"]
CPU = torch.device("cpu")
TOKENS = 400  # of the text: enough to tell formats apart

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def cost() -> Any:
    """The script; what it imports is no business of tests that aren't run."""
    sys.path.insert(0, str(BENCHMARKS))
    from training import format_cost

    return format_cost


@pytest.fixture(scope="module")
def folder(cost: Any) -> Path:
    made: Path = cost.SMOLLM2.shuffled()
    return made


@pytest.fixture(scope="module")
def prompt(cost: Any, folder: Path) -> Any:
    whole = cost.text(cost.Processor.from_folder(folder, cost.read_config(folder)))
    return cost.PreparedPrompt(whole.prompt_ids[:TOKENS], (), 0, bare=True)


def logits(cost: Any, folder: Path, prompt: Any, way: Any) -> torch.Tensor:
    """Of every token of the prompt, `[tokens, vocab]`."""
    from gpu_oracle import our_logits

    with torch.inference_mode():
        model = cost.load_model(folder, dtype=way.dtype, device=CPU, storage=way.storage)
        found: torch.Tensor = our_logits(model, prompt, way.kv).float()
    return found


@pytest.fixture(scope="module")
def exact(cost: Any, folder: Path, prompt: Any) -> torch.Tensor:
    return logits(cost, folder, prompt, cost.Way("fp32", dtype=torch.float32))


def test_real_weights_say_what_transformers_says(folder: Path, prompt: Any, exact: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt.prompt_ids])).logits[0]
    assert (exact - expected).norm() < 1e-4 * expected.norm()
    assert (exact.argmax(-1) == expected.argmax(-1)).float().mean() > 0.99


@pytest.mark.parametrize("name", WRITTEN)
def test_a_formats_cost_is_as_written(
    cost: Any, folder: Path, prompt: Any, exact: torch.Tensor, name: str
) -> None:
    """Within a factor of three: it is another part of the text."""
    way = next(way for way in cost.WAYS if way.name == name)
    found = cost.compared(logits(cost, folder, prompt, way), exact)["kl_nats"]
    assert WRITTEN[name]["text_kl_nats"] / 3 < found < WRITTEN[name]["text_kl_nats"] * 3

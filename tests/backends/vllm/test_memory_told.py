"""A start of vLLM that fails for memory is told with what it counted, of the card that the plan knows."""

import pytest

from snugvl.backends.child.service import Ending, understand
from snugvl.backends.child.settings import Facts
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.diagnose.facts import Card
from snugvl.errors import DoesNotFit
from tests.diagnose.test_card import TENSOR_PARALLEL

LINES = tuple(TENSOR_PARALLEL.splitlines()[1:])
ARGUMENTS = ("--max-model-len", "4096", "--gpu-memory-utilization", "0.76", "--kv-cache-dtype", "fp8")
VLLM = ("vLLM", ("vllm", "serve", "org/model"))
CARD = Card(8151 << 20, 7200 << 20)


@pytest.mark.parametrize(
    ("weights", "told"), [("5.29", "of a ceiling of 6.05 GiB"), ("3.80", "too much with no KV")]
)
def test_what_it_counted_is_told(weights: str, told: str) -> None:
    lines = tuple(line.replace("5.29", weights) for line in LINES)
    choice = VllmChoice("org/model", ARGUMENTS, facts=Facts(card=CARD), replan=lambda *_: None)
    failure = understand(Ending("it ended", lines), choice, *VLLM)
    assert isinstance(failure.error, DoesNotFit)
    assert f"{weights} GiB" in str(failure.error)
    assert told in str(failure.error)
    assert "--max-pixels" in str(failure.error)
    assert "snugvl plan" in str(failure.error)
    assert "leaves memory of the card unused" not in str(failure.error)


def test_a_smaller_plan_is_tried_before_it_is_given_up() -> None:
    smaller = VllmChoice("org/model", ("--max-model-len", "2048"))
    choice = VllmChoice("org/model", ARGUMENTS, facts=Facts(card=CARD), replan=lambda *_: smaller)
    assert understand(Ending("it ended", LINES), choice, *VLLM).retry == smaller

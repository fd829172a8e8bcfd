"""The interpreter that `tests/interpreter.py` makes quicker checks and restores what Triton's own does."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

pytestmark = pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="kernels run on a GPU")


@triton.jit
def twice(values):  # type: ignore[no-untyped-def]
    return values + values


@triton.jit
def sums(out, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    places = tl.arange(0, SIZE)
    values = twice(tl.load(out + places, mask=places < n, other=0))
    tl.store(out + places, values, mask=places < n)
    tl.store(out + SIZE, tl.sum(values, axis=0))


def test_calls_within_a_launch_and_the_language_afterwards() -> None:
    load = tl.load
    for _ in range(2):
        out = torch.tensor([1, 2, 3, 0, 0], dtype=torch.int32)
        sums[(1,)](out, 3, SIZE=4)
        assert out.tolist() == [2, 4, 6, 0, 12]
        assert tl.load is load


def test_a_shape_that_no_card_takes_is_refused() -> None:
    with pytest.raises(InterpreterError, match="power of 2"):
        sums[(1,)](torch.zeros(7, dtype=torch.int32), 3, SIZE=6)

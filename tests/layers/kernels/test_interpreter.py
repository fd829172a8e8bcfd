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


@triton.jit
def mixed(out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    whole = tl.arange(0, SIZE)
    tl.store(out + whole, whole.to(tl.float32) / 2)
    tl.store(out + SIZE + whole, whole * 1.5)
    tl.store(out + 2 * SIZE + whole, (whole + whole) // 2)
    tl.store(out + 3 * SIZE + whole, (whole.to(tl.int64) + whole) * 2147483648 // 2147483648 - 2)


@triton.jit
def beyond(out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(out) + 1099511627776)


def test_numbers_beside_values_are_of_their_type() -> None:
    for _ in range(2):
        out = torch.full((4, 4), torch.nan)
        mixed[(1,)](out, SIZE=4)
        halves, more = [0, 0.5, 1, 1.5], [0, 1.5, 3, 4.5]
        assert out.tolist() == [halves, more, [0, 1, 2, 3], [-2, 0, 2, 4]]
    with pytest.raises(InterpreterError, match="out of range"):
        beyond[(1,)](torch.zeros(1, dtype=torch.int32))

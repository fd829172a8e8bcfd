"""A layer of a layer's first rows: all that its weights mean goes along."""

import pytest
import torch

from snugvl.core.formats import FORMATS
from snugvl.layers.ggml import LAYOUTS
from snugvl.layers.linear import Linear
from snugvl.layers.weights import FormatName

COLUMNS, ROWS, FIRST = 256, 12, 5


def linear_of(kind: FormatName, *, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(3)
    layer = Linear(COLUMNS, ROWS, bias=bias)
    layer.store_as(kind, FORMATS[kind].group)
    values = torch.randn(ROWS, COLUMNS, generator=generator)
    if kind == "fp8":
        layer.put_blocks(0, values.to(torch.float8_e4m3fn), torch.full((1, COLUMNS // 128), 0.5))
    else:
        layer.put(0, values)
    if layer.bias is not None:
        layer.bias.copy_(torch.arange(ROWS))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_first_rows_mean_what_they_meant(kind: FormatName, bias: bool) -> None:
    layer = linear_of(kind, bias=bias)
    part = layer.first(FIRST)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(part(x)[:, :FIRST], layer(x)[:, :FIRST])
    assert part is layer or part.rows == FIRST
    assert (part is layer) == (kind == "fp8")
    assert part.weight.data_ptr() == layer.weight.data_ptr()
    assert layer.first(ROWS) is layer


def test_first_rows_of_a_ggufs_matrix_are_the_matrix() -> None:
    layer = Linear(COLUMNS, ROWS)
    layer.store_blocks([("Q6_K", 4), ("Q4_K", ROWS - 4)])
    for kind, start, count in (("Q6_K", 0, 4), ("Q4_K", 4, ROWS - 4)):
        size = COLUMNS // LAYOUTS[kind].block * LAYOUTS[kind].nbytes  # type: ignore[index]
        layer.put_bytes(start, torch.zeros(count, size, dtype=torch.uint8))
    x = torch.ones(1, COLUMNS)
    torch.testing.assert_close(layer.first(FIRST)(x), layer(x))


def test_first_rows_have_the_order_of_the_columns() -> None:
    layer = linear_of("int4")
    layer.order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(5))[None]
    x = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(layer.first(FIRST)(x), layer(x)[:, :FIRST])

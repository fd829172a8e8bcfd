"""Products with a GGUF's blocks against torch on the values that ggml itself reads."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear, silu

from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.layers.kernels.device import Hardware, described
from snugvl.layers.kernels.products import ggml
from snugvl.layers.kernels.products.linear import product
from snugvl.layers.kernels.products.tiles import Fragments
from tests.ggml_blocks import stored
from tests.layers.kernels.ptx import assembled
from tests.layers.kernels.test_linear import as_torchs, close

COLUMNS = {
    "Q4_0": 288,
    "Q4_1": 96,
    "Q8_0": 1056,
    "Q5_0": 288,
    "Q5_1": 96,
    "IQ4_NL": 96,
    "MXFP4": 288,
}  # some in several steps, some in less than one
EVERYTHING = {"norm", "bias", "swiglu", "residual"}


def columns(kind: GgmlType) -> int:
    return COLUMNS.get(kind, 768)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.sample("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")
def test_a_product_is_torchs(kind: GgmlType, device: torch.device) -> None:
    """One row of input, a few, many; of two kinds with everything that stands around a product, too."""
    weights, wide = stored([(kind, 40)], columns(kind), device)
    assert torch.equal(weights.wide(torch.float32), wide)
    for tokens in (1, 3, 70):
        x = torch.randn(tokens, weights.columns, device=device)
        close(product(x, weights), linear(x, wide))
        if kind in ("Q4_0", "Q6_K"):
            as_torchs(weights, torch.float32, tokens, EVERYTHING)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q3_K"])
def test_a_product_before_ampere_is_torchs(kind: GgmlType, device: torch.device) -> None:
    """Where products are multiplied in loops, by tiles of fewer columns: a scale, or two, each."""
    weights, wide = stored([(kind, 40)], columns(kind), device)
    x = torch.randn(3, weights.columns, device=device)
    with described(Hardware((7, 5), 46)):
        close(product(x, weights), linear(x, wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_float16s_digits(dtype: torch.dtype, device: torch.device) -> None:
    weights, wide = stored([("Q6_K", 32)], 512, device)
    for tokens in (1, 4):
        x = torch.randn(tokens, 512, device=device).to(dtype)
        y = product(x, weights, dtype=torch.float32)
        expected = linear(x.float(), wide)
        assert (y - expected).norm() < 5e-4 * expected.norm()


LONE_TILES = {
    "half a slice": (768, Fragments(16, 2)),
    "more slices than are loaded at once": (1280, Fragments(16, 1)),
    "many rows": (512, Fragments(32, 2)),
}


@pytest.mark.parametrize("tile", LONE_TILES)
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind in ggml.LONE])
@pytest.mark.sample(
    *(f"{kind}-half a slice" for kind in LAYOUTS if kind in ggml.LONE),
    *(f"{kind}-{tile}" for kind in ("Q8_0", "Q5_K") for tile in LONE_TILES),
)
def test_one_row_by_assembly(
    kind: GgmlType, tile: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is the matrix unit's way, which bf16 goes here, too: `ptx.py` runs the instructions."""
    columns, fragments = LONE_TILES[tile]
    weights, wide = stored([(kind, 40)], columns, device)
    x = torch.randn(1, columns, device=device).bfloat16()
    bias, residual = (torch.randn(*shape, 40, device=device).bfloat16() for shape in ((), (1,)))
    monkeypatch.setattr(ggml, "lone_tile", lambda *_, **__: fragments)
    if device.type == "cpu":
        monkeypatch.setattr(ggml, "capability", lambda _: (9, 0))
    with assembled() if device.type == "cpu" else nullcontext():
        alone = product(x, weights, dtype=torch.float32)
        added = product(x, weights, bias=bias, residual=residual, dtype=torch.float32)
        gated = None
        if fragments.rows == 16:
            gated = product(x, weights, swiglu=True, dtype=torch.float32)
    expected = linear(x.float(), wide)
    close(alone, expected)
    # Rounded to bf16 on the way.
    assert (added - (expected + bias + residual)).norm() < 0.02 * added.norm()
    if gated is not None:
        gate, up = expected.chunk(2, -1)
        assert (gated - silu(gate) * up).norm() < 0.02 * gated.norm()


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_rows_of_several_types(tokens: int, device: torch.device) -> None:
    """Queries and keys in four bits, values in six; a gate beside an up of another type."""
    weights, _ = stored([("Q4_K", 24), ("Q4_K", 8), ("Q6_K", 16)], 512, device)
    assert len(weights.parts) == 2
    for parts in ({"norm", "bias"}, {"bias", "residual"}, {"swiglu"}):
        as_torchs(weights, torch.float32, tokens, parts)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_embedding_is_its_rows(kind: GgmlType, device: torch.device) -> None:
    weights, wide = stored([(kind, 40)], columns(kind), device)
    ids = torch.tensor([7, 39, 0, 7], device=device)
    assert torch.equal(ggml.lookup(ids, weights, torch.float32), wide[ids])
    assert not len(ggml.lookup(ids[:0], weights, torch.float32))


def test_rows_that_fill_up_a_step_reach_no_other(device: torch.device) -> None:
    weights, _ = stored([("Q5_K", 32)], 256, device)
    x = torch.randn(7, 256, device=device)
    right = product(x, weights)
    x[2:] = torch.nan
    assert torch.equal(product(x, weights)[:2], right[:2])

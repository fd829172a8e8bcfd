"""Products with weights of 5 and 6 bits against torch on the wide form, and what becomes of the codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from snugvl.core.formats import FORMATS
from snugvl.layers.kernels.products import dequantize, planes
from snugvl.layers.kernels.products import linear as kernels
from snugvl.layers.kernels.products.linear import product
from snugvl.layers.kernels.products.tiles import Fragments
from snugvl.layers.weights import FormatName, to_few_bits
from tests.draws import draws
from tests.layers.kernels.test_linear import PARTS, as_torchs, close, for_skinny, stored
from tests.layers.kernels.test_unpack import halves, run

KINDS: tuple[FormatName, ...] = ("int5", "int6")


@pytest.mark.parametrize("kind", KINDS)
def test_the_assembly_joins_both_planes(kind: FormatName) -> None:
    bits, chosen = FORMATS[kind].bits, torch.Generator().manual_seed(5)
    assembly = {"int5": planes._INT5_BF16, "int6": planes._INT6_BF16}[kind].value
    for _ in range(4):
        codes = torch.randint(0, 1 << bits, (2, 8), generator=chosen).tolist()
        words = [sum((code & 15) << 4 * i for i, code in enumerate(eight)) for eight in codes]
        upper = [sum((code >> 4) << (bits - 4) * i for i, code in enumerate(eight)) for eight in codes]
        upper[0] |= 0xFFFF << 16  # sign-extended; `prmt` takes the lower half alone
        found = halves(run(assembly, 8, *words, *upper))
        assert found == [codes[word][place] - (1 << (bits - 1)) for place in range(8) for word in range(2)]


@draws(6)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(16, 70),
    groups=st.integers(1, 9),
    group=st.sampled_from([32, 64, 128]),
    tokens=st.sampled_from([1, 2, 5, 20]),
    outputs=st.sampled_from([16, 1 << 20]),
)
def test_a_product_is_torchs(
    kind: FormatName, rows: int, groups: int, group: int, tokens: int, outputs: int
) -> None:
    """By the kernel for one row, for few (also where one has too few outputs), and dequantized."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = stored(kind, rows, 128 * groups, device, group)
    x = torch.randn(tokens, 128 * groups, device=device).to(for_skinny(device))
    bias = torch.randn(rows, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LONE_OUTPUTS", outputs)
        patch.setattr(kernels, "PLANES_ROWS", 16)
        patch.setattr(kernels, "planes_tile", lambda *_, **__: Fragments(8, 2))
        patch.setattr(kernels, "skinny_tile", lambda *_, **__: (16, 2, 2, True))
        y = product(x, weights, bias=bias, dtype=torch.float32)
    close(y, linear(x.float(), weights.wide(torch.float32), bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_norm_bias_swiglu_and_residual(
    kind: FormatName, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LONE_OUTPUTS", 16)
    monkeypatch.setattr(kernels, "planes_tile", lambda *_, **__: Fragments(8, 2))
    monkeypatch.setattr(kernels, "skinny_tile", lambda *_, **__: (16, 2, 2, True))
    weights = stored(kind, 36, 640, device, 64)
    for parts in PARTS:
        as_torchs(weights, for_skinny(device), tokens, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_dequantize_the_weights_slice_by_slice(
    kind: FormatName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PLANES_ROWS", 4)
    monkeypatch.setattr(dequantize, "WIDE_BYTES", 64 * 256 * 4)  # several slices, the last one smaller
    weights = stored(kind, 300, 256, device, 64)
    x, residual = torch.randn(9, 256, device=device), torch.randn(9, 150, device=device)
    gate, up = linear(x, weights.wide(torch.float32)).chunk(2, -1)
    close(product(x, weights, residual=residual, swiglu=True), silu(gate) * up + residual)


def test_a_bit_more_halves_the_error() -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    kinds: tuple[FormatName, ...] = ("int4", "int5", "int6")
    errors = [(to_few_bits(values, kind, 64).wide(torch.float32) - values).norm().item() for kind in kinds]
    assert errors[1] < 0.52 * errors[0]
    assert errors[2] < 0.52 * errors[1]

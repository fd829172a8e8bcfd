"""Products with stored weights against torch on the wide form."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from snugvl.core.formats import FEW_BITS
from snugvl.layers import linear as layers
from snugvl.layers.kernels.products import dequantize
from snugvl.layers.kernels.products import linear as kernels
from snugvl.layers.kernels.products.dequantize import dequantize_int8
from snugvl.layers.kernels.products.epilogue import Epilogue
from snugvl.layers.kernels.products.linear import product
from snugvl.layers.linear import RMSNorm
from snugvl.layers.weights import FormatName, Weights, to_few_bits, to_int8
from tests.draws import draws

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for more rows, and for what the skinny and the lone one do not take, also for few rows."""
    monkeypatch.setattr(kernels, "SKINNY_ROWS", 0)
    monkeypatch.setattr(kernels, "LONE", frozenset())


def stored(kind: FormatName, rows: int, columns: int, device: torch.device, group: int = 128) -> Weights:
    values = torch.randn(rows, columns) * 0.05
    if kind == "bf16":
        return Weights("bf16", rows, columns, values.to(device))
    if kind == "int8":
        weights = to_int8(values)
    elif kind in FEW_BITS:
        weights = to_few_bits(values, kind, group)
    else:
        scale = (torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1) * 1e-3
        codes = (torch.randn(rows, columns) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes[0, :4] = torch.tensor([2**-9, -(2**-9), 448.0, 0.0]).to(
            torch.float8_e4m3fn
        )  # subnormal, largest
        weights = Weights("fp8", rows, columns, codes, scale)
    parts = (weights.data, weights.scale, weights.zero, weights.upper)
    data, scale_, zero, upper = (None if part is None else part.to(device) for part in parts)
    assert data is not None
    return Weights(weights.format, rows, columns, data, scale_, zero, weights.group, upper=upper)


def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    error = (ours.double() - reference.double()).norm() / reference.double().norm()
    # On a GPU dequantized weights are multiplied in bf16, off by up to 0.0038 (an H200, 30 draws a format).
    assert error < (TOLERANCE if ours.device.type == "cpu" else 5e-3), error


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("rows", "columns"), [(40, 256), (136, 384)])
@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
def test_a_product_is_torchs(
    kind: FormatName, rows: int, columns: int, tokens: int, device: torch.device
) -> None:
    weights = stored(kind, rows, columns, device)
    x = torch.randn(tokens, columns, device=device)
    close(product(x, weights), linear(x, weights.wide(torch.float32)))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("tokens", [7, 64, 70])
def test_rows_that_fill_up_a_step_reach_no_other(kind: FormatName, tokens: int, device: torch.device) -> None:
    """A recorded step has tokens of nobody at its end; what is in their rows may be anything."""
    weights = stored(kind, 64, 256, device)
    x = torch.randn(tokens, 256, device=device)
    right = product(x, weights, swiglu=True)
    x[tokens - 5 :] = torch.nan
    assert torch.equal(product(x, weights, swiglu=True)[: tokens - 5], right[: tokens - 5])


# What stands around a product: in Qwen2.5's attention, in Qwen3.5's MLP, everything at once.
PARTS = ({"norm", "bias"}, {"norm", "offset", "swiglu", "residual"}, {"norm", "bias", "swiglu", "residual"})


def as_torchs(weights: Weights, dtype: torch.dtype, tokens: int, parts: set[str]) -> None:
    """Multiply by whatever kernel takes it, and compare with the same from torch, rounded where it rounds."""
    device = weights.data.device
    outputs = weights.rows // 2 if "swiglu" in parts else weights.rows
    x = torch.randn(tokens, weights.columns, device=device).to(dtype)
    norm = RMSNorm(weights.columns, 1e-6, float("offset" in parts)).to(device)
    torch.nn.init.normal_(norm.weight)
    norm = norm.to(dtype)
    bias = torch.randn(weights.rows, device=device).to(dtype) if "bias" in parts else None
    residual = torch.randn(tokens, outputs, device=device).to(dtype) if "residual" in parts else None
    y = product(
        x,
        weights,
        bias=bias,
        norm=norm.weight.detach() if "norm" in parts else None,
        eps=1e-6,
        offset=norm.offset,
        residual=residual,
        swiglu="swiglu" in parts,
        dtype=torch.float32,
    )
    wide, shift = weights.wide(torch.float32), None if bias is None else bias.float()
    expected = linear((norm(x) if "norm" in parts else x).float(), wide, shift)
    if "swiglu" in parts:
        gate, up = expected.to(dtype).chunk(2, -1)
        expected = silu(gate).float() * up.float()
    close(y, expected if residual is None else expected.to(dtype).float() + residual.float())


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_norm_bias_swiglu_and_residual(
    kind: FormatName, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector, a matrix, and weights that are dequantized first."""
    monkeypatch.setattr(kernels, "WIDE_TOKENS", 20)
    weights = stored(kind, 64, 256, device)
    for parts in PARTS:
        as_torchs(weights, torch.float32, tokens, parts)


def test_what_is_dequantized_may_have_another_type_of_result(device: torch.device) -> None:
    """As logits have, of a head that many tokens ask at once."""
    weights, x = stored("int4", 64, 256, device), torch.randn(20, 256, device=device)
    out = torch.empty(20, 64, dtype=torch.float64, device=device)
    dequantize.multiply_dequantized(x, weights, Epilogue(), out)
    close(out, linear(x, weights.wide(torch.float32)))


@pytest.mark.parametrize("group", [32, 64])
def test_smaller_groups(group: int, device: torch.device) -> None:
    weights = stored("int4", 24, 256, device, group=group)
    for tokens in (1, 4):
        x = torch.randn(tokens, 256, device=device)
        close(product(x, weights), linear(x, weights.wide(torch.float32)))


@pytest.mark.parametrize("tokens", [1, 4, 200])
def test_scales_of_prequantized_weights_are_float16(tokens: int, device: torch.device) -> None:
    made = stored("int4", 32, 256, device, group=32)
    assert made.scale is not None
    assert made.zero is not None
    scale, zero = made.scale.to(torch.float16), made.zero.round().to(torch.float16)
    weights = Weights("int4", 32, 256, made.data, scale, zero, 32)
    x = torch.randn(tokens, 256, device=device)
    close(product(x, weights), linear(x, weights.wide(torch.float32)))


@pytest.mark.parametrize("group", [64, 128])
def test_int4_keeps_most_of_a_matrix(group: int) -> None:
    values = torch.randn(64, 256) * 0.02
    error = (to_few_bits(values, "int4", group).wide(torch.float32) - values).norm() / values.norm()
    plain = values.view(64, -1, group)
    low, high = plain.amin(-1, keepdim=True), plain.amax(-1, keepdim=True)
    step = (high - low) / 15
    rounded = ((plain - low) / step).round() * step + low
    rough = (rounded - plain).norm() / plain.norm()
    assert error <= rough * 1.02


def test_int8_keeps_nearly_all_of_a_matrix() -> None:
    values = torch.randn(64, 256)
    assert (to_int8(values).wide(torch.float32) - values).norm() / values.norm() < 0.008


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not to_int8(torch.zeros(8, 128)).wide(torch.float32).any()
    assert to_few_bits(torch.zeros(8, 128), "int4").wide(torch.float32).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("swiglu", [False, True])
def test_many_rows_dequantize_the_weights_slice_by_slice(
    kind: FormatName, swiglu: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WIDE_TOKENS", 9)
    monkeypatch.setattr(dequantize, "WIDE_BYTES", 64 * 256 * 4)  # several slices, the last one smaller
    weights = stored(kind, 320, 256, device)
    outputs = 160 if swiglu else 320
    x, residual = torch.randn(9, 256, device=device), torch.randn(9, outputs, device=device)
    bias = None if swiglu else torch.randn(320, device=device)
    expected = linear(x, weights.wide(torch.float32), bias)
    if swiglu:
        gate, up = expected.chunk(2, -1)
        expected = silu(gate) * up
    close(product(x, weights, bias=bias, residual=residual, swiglu=swiglu), expected + residual)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_no_rows_launch_nothing(
    kind: FormatName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk in the middle of a prompt needs no logits: a kernel would read an address that isn't there."""
    monkeypatch.setattr(kernels, "gemv", None)
    weights = stored(kind, 40, 256, device)
    assert product(torch.randn(0, 256, device=device), weights).shape == (0, 40)


@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(37, 72, 72), (48, 256, 128), (50, 430, 430), (9, 640, 64)]
)
@pytest.mark.parametrize("first", [0, 5])
def test_int8_of_any_width_is_dequantized(
    rows: int, columns: int, group: int, first: int, device: torch.device
) -> None:
    made = to_int8(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), group)
    assert made.scale is not None
    weights = Weights("int8", rows, columns, made.data.to(device), made.scale.to(device), group=group)
    for count in (rows - first, 3):
        room = torch.full((count + 1, columns), 7.0, device=device)
        dequantize_int8(weights, first, room[:count])
        assert torch.equal(room[:count], weights.wide(torch.float32, first, first + count))
        assert (room[count] == 7).all(), "rows beyond are left alone"


def test_a_product_of_odd_widths_by_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower's: rows and columns that no tile divides, slice by slice."""
    monkeypatch.setattr(layers, "SLICE_BYTES", 32 * 430 * 4)
    if device.type == "cpu":
        monkeypatch.setattr(
            layers.Linear, "_dequantize", lambda self, *args: dequantize_int8(self.weights, *args)
        )
    layer = layers.Linear(430, 72, bias=True).to(device)
    values = torch.randn(72, 430, device=device) * 0.05
    layer.store_as("int8", 430)
    layer.put(0, values)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(21, 430, device=device)
    expected = linear(x, layer.weights.wide(torch.float32), layer.bias)
    close(layer.wide_product(x), expected)
    close(layer.wide_product(x, 10, 51), expected[:, 10:51])


def small_skinny_tiles(
    patch: pytest.MonkeyPatch, tile: tuple[int, int, int, bool] = (32, 2, 2, True)
) -> None:
    for other in ("_vector", "_matrix"):  # what is not for this kernel must fail, not pass by another
        patch.setattr(kernels, other, None)
    patch.setattr(kernels, "SKINNY_ROWS", 32)
    patch.setattr(kernels, "SKINNY_BYTES", 0)
    patch.setattr(kernels, "skinny_tile", lambda *_, **__: tile)


def for_skinny(device: torch.device) -> torch.dtype:
    """What that kernel takes: bf16, which its unpacking is written for; in the interpreter anything."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def stored_for_skinny(kind: FormatName, rows: int, columns: int, device: torch.device) -> Weights:
    """Weights that are stored as numbers have the type of the input."""
    weights = stored(kind, rows, columns, device)
    return replace(weights, data=weights.data.to(for_skinny(device))) if kind == "bf16" else weights


@draws(8)
@given(
    kind=st.sampled_from(["bf16", "fp8", "int8", "int4"]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 20),
    tile=st.tuples(st.sampled_from([16, 32]), st.just(2), st.sampled_from([2, 4]), st.booleans()),
)
def test_a_skinny_product_is_torchs(
    kind: FormatName, rows: int, groups: int, tokens: int, tile: tuple[int, int, int, bool]
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = stored_for_skinny(kind, rows, 128 * groups, device)
    x = torch.randn(tokens, 128 * groups, device=device).to(for_skinny(device))
    bias = torch.randn(rows, device=device)
    with pytest.MonkeyPatch.context() as patch:
        small_skinny_tiles(patch, tile)
        y = product(x, weights, bias=bias, dtype=torch.float32)
    close(y, linear(x.float(), weights.wide(torch.float32), bias))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_skinny_norm_bias_swiglu_and_residual(
    kind: FormatName, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_skinny_tiles(monkeypatch)
    weights = stored_for_skinny(kind, 80, 384, device)
    for parts in PARTS:
        as_torchs(weights, for_skinny(device), tokens, parts)


@pytest.mark.parametrize("group", [32, 64])
def test_skinny_groups(group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small_skinny_tiles(monkeypatch)
    weights = stored("int4", 24, 256, device, group=group)
    for tokens in (1, 4):
        x = torch.randn(tokens, 256, device=device).to(for_skinny(device))
        y = product(x, weights, dtype=torch.float32)
        close(y, linear(x.float(), weights.wide(torch.float32)))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
def test_a_rows_product_does_not_depend_on_the_others(
    kind: FormatName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_skinny_tiles(monkeypatch)
    weights = stored_for_skinny(kind, 40, 256, device)
    # Tiles of 8, 16 and 32 rows; in the interpreter of 8 alone, since numpy's sums depend on the width.
    most, fewer = (7, (1, 3)) if device.type == "cpu" else (20, (1, 3, 7, 12))
    x = torch.randn(most, 256, device=device).to(for_skinny(device))
    together = product(x, weights)
    for rows in fewer:
        assert torch.equal(together[:rows], product(x[:rows], weights))


def test_which_products_are_skinny(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SKINNY_ROWS", 16)
    taken: list[tuple[str, int]] = []
    for other in ("_vector", "_matrix"):
        monkeypatch.setattr(kernels, other, lambda *_, **__: None)
    monkeypatch.setattr(
        kernels, "_skinny", lambda x, weights, *_, **__: taken.append((weights.format, len(x)))
    )
    kinds: tuple[FormatName, ...] = ("bf16", "fp8", "int8", "int4")
    for kind in kinds:
        weights = stored(kind, 16, 128, device)
        for tokens in (0, 1, 16, 17):
            product(torch.randn(tokens, 128, device=device, dtype=torch.bfloat16), weights)
    assert taken == [(kind, 16) for kind in kinds]
    monkeypatch.setattr(kernels, "SKINNY_BYTES", weights.data.nbytes)
    product(torch.randn(1, 128, device=device, dtype=torch.bfloat16), weights)
    assert taken[-1] == ("int4", 1)

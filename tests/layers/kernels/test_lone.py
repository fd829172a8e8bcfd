"""The kernels for one row of input against torch on the wide form, and what goes to them."""

from dataclasses import replace
from itertools import product as product_of
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from snugvl.layers.kernels.products import linear as kernels
from snugvl.layers.kernels.products import tiles
from snugvl.layers.kernels.products.linear import product, product_with_tail
from snugvl.layers.kernels.products.tiles import Fragments
from snugvl.layers.weights import FormatName, Weights
from tests.draws import draws
from tests.layers.kernels.test_linear import PARTS, as_torchs, close, for_skinny, stored


def lone_tiles(patch: pytest.MonkeyPatch, tile: tuple[int, int, int, bool] = (8, 2, 0, False)) -> None:
    """One row of every format goes to the kernels by fragments, in this tile."""
    patch.setattr(kernels, "LONE", frozenset({"bf16", "fp8", "int8", "int6", "int5", "int4"}))
    patch.setattr(kernels, "LONE_OUTPUTS", tile[0])
    for name in ("bf16_tile", "byte_tile", "planes_tile"):
        patch.setattr(kernels, name, lambda *_, **__: Fragments(*tile))
    codes = Fragments(32 if tile[0] == 16 else 16, *tile[1:])  # whose tiles have no other numbers of rows
    patch.setattr(kernels, "codes_tile", lambda *_, **__: codes)


@draws(8)
@given(
    kind=st.sampled_from(["fp8", "int8"]),
    rows=st.integers(16, 300),  # of FP8 across blocks of 128
    groups=st.integers(1, 10),  # one, two and three slices of a warp
    tile=st.sampled_from([(4, 1, 0), (8, 2, 0), (16, 4, 0), (2, 1, 0), (4, 2, 1), (8, 1, 1), (16, 2, 1)]),
    soon=st.booleans(),
)
def test_a_byte_by_fragments_is_torchs(
    kind: FormatName, rows: int, groups: int, tile: tuple[int, int, int], soon: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = stored(kind, rows, 128 * groups, device)
    x = torch.randn(1, 128 * groups).to(device, for_skinny(device))
    bias = torch.randn(rows, device=device)
    with pytest.MonkeyPatch.context() as patch:
        lone_tiles(patch, (*tile, soon))
        y = product(x, weights, bias=bias, dtype=torch.float32)
    close(y, linear(x.float(), weights.wide(torch.float32), bias))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e30])
def test_an_input_may_have_any_size(size: float, kind: FormatName, device: torch.device) -> None:
    """int8's kernel multiplies float16, which has fewer exponents than bf16, and int4's integers."""
    weights = stored(kind, 64, 512, device)
    x = (torch.randn(1, 512) * size).to(device, for_skinny(device))
    x[0, 64:128] = 0  # a unit without a largest number
    y = product(x, weights, dtype=torch.float32)
    close(y / size, linear(x.float() / size, weights.wide(torch.float32)))


def test_int4_hides_no_input_that_is_not_a_number(device: torch.device) -> None:
    """Its kernel makes integers of the input, which have no NaN."""
    x = torch.randn(1, 512).to(device, for_skinny(device))
    x[0, 70] = float("nan")
    y = product(x, stored("int4", 64, 512, device), dtype=torch.float32)
    assert y is not None
    assert y.isnan().all()


@draws(12)
@given(
    kind=st.sampled_from(["int4", "int5", "int6"]),
    rows=st.integers(16, 40),
    groups=st.integers(1, 18),  # one, two and three slices of a warp
    group=st.sampled_from([64, 128]),
    tile=st.sampled_from([(4, 1, 0), (8, 2, 0), (16, 4, 0), (4, 2, 1), (8, 1, 1), (16, 2, 1)]),
    soon=st.booleans(),
)
def test_codes_by_fragments_are_torchs(
    kind: FormatName, rows: int, groups: int, group: int, tile: tuple[int, int, int], soon: bool
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = stored(kind, rows, group * groups, device, group=group)
    x = torch.randn(1, group * groups).to(device, for_skinny(device))
    bias = torch.randn(rows, device=device)
    with pytest.MonkeyPatch.context() as patch:
        lone_tiles(patch, (*tile, soon))
        y = product(x, weights, bias=bias, dtype=torch.float32)
    close(y, linear(x.float(), weights.wide(torch.float32), bias))


@draws(8)
@given(
    rows=st.integers(16, 40),
    columns=st.integers(1, 90).map(lambda count: 8 * count),  # up to three slices of a warp
    tile=st.sampled_from([(2, 1, 0), (4, 1, 0), (8, 2, 0), (16, 4, 0), (4, 2, 1), (2, 1, 1), (16, 2, 1)]),
    soon=st.booleans(),
)
def test_bf16_by_fragments_is_torchs(rows: int, columns: int, tile: tuple[int, int, int], soon: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = for_skinny(device)
    weights = torch.randn(rows, columns).to(device, dtype)
    x, bias = torch.randn(1, columns).to(device, dtype), torch.randn(rows, device=device)
    with pytest.MonkeyPatch.context() as patch:
        lone_tiles(patch, (*tile, soon))
        patch.setattr(kernels, "_vector", None)
        y = product(x, Weights("bf16", rows, columns, weights), bias=bias, dtype=torch.float32)
    close(y, linear(x.float(), weights.float(), bias))


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        ("fp8", (8, 2, 0, False)),
        ("int8", (4, 1, 1, True)),
        ("int4", (8, 2, 0, False)),
        ("int4", (4, 1, 1, True)),
        ("int4", (16, 4, 1, False)),
        ("int5", (8, 2, 0, False)),
        ("int6", (4, 1, 1, True)),
        ("bf16", (8, 2, 0, True)),
        ("bf16", (2, 1, 1, False)),
    ],
)
@pytest.mark.sample("fp8-tile0", "int4-tile3", "int6-tile6", "bf16-tile7")
def test_lone_norm_bias_swiglu_and_residual(
    kind: FormatName, tile: tuple[int, int, int, bool], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone_tiles(monkeypatch, tile)
    monkeypatch.setattr(kernels, "_vector", None)
    weights = stored(kind, 36, 640, device)
    if kind == "bf16":
        weights = replace(weights, data=weights.data.to(for_skinny(device)))
    for parts in PARTS:
        as_torchs(weights, for_skinny(device), 1, parts)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        ("fp8", (8, 2, 0, False)),
        ("int4", (8, 2, 0, False)),
        ("int4", (4, 2, 1, True)),
        ("int6", (4, 1, 0, True)),
    ],
)
def test_few_wide_rows_go_along_with_a_lone_product(
    kind: FormatName,
    tile: tuple[int, int, int, bool],
    normed: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lone_tiles(monkeypatch, tile)
    dtype = for_skinny(device)
    weights = stored(kind, 28, 640, device)
    tail, norm = torch.randn(6, 640).to(device, dtype), torch.randn(640).to(device, dtype)
    x = torch.randn(1, 640).to(device, dtype)
    beside = {"norm": norm, "eps": 1e-6} if normed else {}
    found = product_with_tail(x, weights, tail, **beside)
    assert found is not None
    assert torch.equal(found[0], product(x, weights, **beside))
    close(found[1], product(x, Weights("bf16", *tail.shape, tail, None, None, 128), **beside))


def test_wide_rows_go_along_with_nothing_else(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lone_tiles(monkeypatch)
    dtype = for_skinny(device)
    weights = stored("int4", 28, 640, device)
    tail = torch.randn(6, 640).to(device, dtype)
    assert product_with_tail(torch.randn(2, 640).to(device, dtype), weights, tail) is None
    one = torch.randn(1, 640).to(device, dtype)
    assert product_with_tail(one, weights, tail[:5]) is None
    assert product_with_tail(one, weights, tail.double()) is None


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "tokens", "lone"),
    [
        ("int4", 64, 256, 1, True),
        ("int4", 64, 256, 2, False),
        ("int4", 64, 27648, 1, False),
        ("int4", 63, 256, 1, False),
        ("bf16", 64, 2048, 1, True),
        ("bf16", 64, 2048, 2, False),
        ("fp8", 64, 2048, 1, True),
        ("fp8", 64, 2560, 1, True),
        ("int8", 64, 9728, 1, True),
    ],
)
def test_which_products_are_lone(
    kind: FormatName, rows: int, columns: int, tokens: int, lone: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    taken: list[str] = []
    for name in ("_lone", "_skinny", "_vector", "_matrix"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name, **__: taken.append(name))
    monkeypatch.setattr(kernels, "LONE", frozenset({"bf16", "fp8", "int8", "int6", "int5", "int4"}))
    weights = stored(kind, rows, columns, device)
    if kind == "bf16":  # wide weights are of the input's type, or another kernel takes them
        weights = replace(weights, data=weights.data.to(for_skinny(device)))
    product(torch.randn(tokens, columns).to(device, for_skinny(device)), weights)
    assert (taken == ["_lone"]) is lone


def test_int4_at_odd_addresses_is_left_to_other_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the compiler lays words out in another way, and the kernel would be wrong."""
    lone_tiles(monkeypatch)
    weights = stored("int4", 16, 512, device)
    room = torch.empty(weights.data.numel() + 1, dtype=torch.int32, device=device)
    room[1:] = weights.data.flatten()
    odd = replace(weights, data=room[1:].view(weights.data.shape))
    monkeypatch.setattr(kernels, "_lone", None)
    x = torch.randn(1, 512).to(device, for_skinny(device))
    close(product(x, odd, dtype=torch.float32), linear(x.float(), weights.wide(torch.float32)))


WIDTHS = (512, 2048, 2560, 3584, 4096, 9728, 12288, 18944)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("int4", 64), ("int4", 128), ("bf16", 128), ("fp8", 128)])
def test_a_tile_of_fragments_fits_into_a_threads_registers(
    kind: FormatName, group: int, swiglu: bool
) -> None:
    widths = (*WIDTHS, 5120, 17408, 27648, 29568)
    for outputs, columns, units in product_of((1024, 2560, 4096, 6144, 12288, 151936), widths, (20, 132)):
        weights = Weights(kind, outputs, columns, torch.empty(0), group=group)
        if kind == "int4" and columns > tiles.widest_codes(weights):
            assert columns > 20480, "another kernel multiplies wider ones"
            continue
        given = () if kind == "bf16" else (units,)
        make = {"int4": tiles.codes_tile, "bf16": tiles.bf16_tile, "fp8": tiles.byte_tile}[kind]
        tile = make(outputs, weights, *given, swiglu=swiglu)
        assert tile.rows in {"int4": (16, 32), "bf16": (2, 4, 8)}.get(kind, (2, 4, 8, 16))
        assert tile.warps in (1, 2, 4, 8)
        of_row, wide = {"bf16": (4, 256), "fp8": (4, 512)}.get(kind, (group / 64 + 0.25, 4 * group))
        slices = -(-columns // (wide * tile.warps))
        assert slices * of_row * tile.rows * (2 if tile.rounds else 1) <= 200


@pytest.mark.parametrize(
    ("kind", "outputs", "columns", "swiglu", "few", "many"),
    [
        ("fp8", 6144, 2048, True, (4, 2, 8, False), (16, 4, 0, True)),
        ("fp8", 6144, 2560, False, (4, 1, 8, False), (4, 4, 4, False)),
        ("int8", 12288, 4096, True, (8, 4, 8, False), (4, 4, 4, False)),
        ("int4", 6144, 2560, False, (16, 4, 2, False), (32, 4, 0, False)),
        ("int4", 2560, 4096, False, (16, 8, 0, False), (16, 8, 0, True)),
    ],
)
def test_cards_with_few_multiprocessors_have_tiles_of_their_own(
    kind: FormatName, outputs: int, columns: int, swiglu: bool, few: Any, many: Any
) -> None:
    """As they were measured on an H200, held to 30 of its multiprocessors and whole."""
    weights = Weights(kind, outputs, columns, torch.empty(0))
    make = tiles.codes_tile if kind == "int4" else tiles.byte_tile
    assert make(outputs, weights, 30, swiglu=swiglu) == Fragments(*few)
    assert make(outputs, weights, 132, swiglu=swiglu) == Fragments(*many)


def test_weights_of_another_type_than_the_input_are_left_to_other_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read as pairs of the input's type."""
    monkeypatch.setattr(kernels, "LONE", frozenset({"bf16"}))
    x, weights = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(64, 512)
    assert not kernels._fits_lone(x, Weights("bf16", 64, 512, weights), 64, None)
    assert kernels._fits_lone(x, Weights("bf16", 64, 512, weights.bfloat16()), 64, None)


def test_bf16_at_odd_addresses_is_left_to_other_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone_tiles(monkeypatch)
    dtype = for_skinny(device)
    room = torch.randn(16 * 512 + 1).to(device, dtype)
    odd = Weights("bf16", 16, 512, room[1:].view(16, 512))
    monkeypatch.setattr(kernels, "_lone", None)
    x = torch.randn(1, 512).to(device, dtype)
    close(product(x, odd, dtype=torch.float32), linear(x.float(), odd.data.float()))

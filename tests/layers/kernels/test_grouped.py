"""The kernels of a mixture's experts against plain torch (`layers/experts.py`)."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from snugvl.layers.experts import ExpertRound, Experts, added, chosen, scored
from snugvl.layers.ggml import GgmlType
from snugvl.layers.kernels.products import grouped
from snugvl.layers.kernels.products.grouped import Groups, add, choose_experts, score
from snugvl.layers.linear import Linear
from snugvl.layers.weights import FormatName, Weights
from tests.ggml_blocks import stored as blocks
from tests.layers.kernels.test_linear import close, stored

COUNT, USED, HIDDEN, WIDTH = 5, 2, 256, 128


def layer(kind: FormatName, device: torch.device, group: int = 128) -> Experts:
    """Experts with random weights in a format."""
    made = Experts(HIDDEN, COUNT, WIDTH)
    for linear in (made.gate_up_proj, made.down_proj):
        linear.store_as(kind, group)
        weights = stored(kind, linear.rows, linear.columns, device, group)
        linear.weight = torch.nn.Parameter(weights.data, requires_grad=False)
        linear.scale, linear.zero = weights.scale, weights.zero
    return made


def choices(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and shares of random tokens; nobody chooses the fourth expert."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.stack([torch.randperm(COUNT - 1, generator=generator) for _ in range(tokens)])
    ids = torch.where(order == 3, 4, order)[:, :USED].int()
    return ids.to(device), torch.rand(tokens, USED, generator=generator).to(device)


def by_kernels(experts: Experts, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*ids.shape, HIDDEN, dtype=x.dtype, device=x.device)
    for part in experts._rounds(ids):
        Groups(ids, COUNT).multiply(x, part, shares, out)
    return out


def plain(experts: Experts, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*ids.shape, HIDDEN, dtype=x.dtype, device=x.device)
    for part in experts._rounds(ids):
        experts._plain(x, part, ids, shares, out)
    return out


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.sample("1-int4", "70-bf16", "7-fp8", "70-int4", "70-int8")
def test_experts_are_torchs(kind: FormatName, tokens: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    experts = layer(kind, device)
    x = torch.randn(tokens, HIDDEN, device=device)
    ids, shares = choices(tokens, device)
    close(by_kernels(experts, x, ids, shares), plain(experts, x, ids, shares))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS", "MXFP4"])
@pytest.mark.sample("Q6_K")
def test_experts_in_a_ggufs_blocks(kind: GgmlType, device: torch.device) -> None:
    experts = Experts(HIDDEN, COUNT, 256)
    for linear in (experts.gate_up_proj, experts.down_proj):
        weights, _ = blocks([(kind, linear.rows)], linear.columns, device)
        linear.format, linear.parts = "ggml", weights.parts
        linear.weight = torch.nn.Parameter(weights.data, requires_grad=False)
    for tokens in (3, 70) if kind == "Q4_K" else (3,):
        x = torch.randn(tokens, HIDDEN, device=device)
        ids, shares = choices(tokens, device)
        close(by_kernels(experts, x, ids, shares), plain(experts, x, ids, shares))


def test_groups_of_32_columns(device: torch.device) -> None:
    experts = layer("int4", device, 32)
    x = torch.randn(3, HIDDEN, device=device)
    ids, shares = choices(3, device)
    close(by_kernels(experts, x, ids, shares), plain(experts, x, ids, shares))


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize(("tokens", "most"), [(2, 20), (9, 20), (70, 90)])
@pytest.mark.sample("9-20-bf16", "70-90-int4")
def test_a_row_depends_on_no_company(kind: FormatName, tokens: int, most: int, device: torch.device) -> None:
    """Whatever else a step of its size has, and wherever its row stands in a tile: bit by bit on a GPU.

    The interpreter's products are numpy's, whose order of sums follows the CPU and the row's place.
    """
    torch.manual_seed(0)
    experts = layer(kind, device)
    x = torch.randn(most, HIDDEN, device=device)
    ids, shares = choices(most, device)
    whole = by_kernels(experts, x, ids, shares)
    some = torch.arange(most - 1, most - 1 - tokens, -1, device=device)  # the last ones, in another order
    found = by_kernels(experts, x[some], ids[some], shares[some])
    tolerance = 0.0 if device.type == "cuda" else 1e-5
    torch.testing.assert_close(found, whole[some], rtol=tolerance, atol=tolerance)


def test_it_doesnt_show_where_experts_are(device: torch.device) -> None:
    """In one round or in several, in whatever slots."""
    experts = layer("int8", device)
    x = torch.randn(6, HIDDEN, device=device)
    ids, shares = choices(6, device)
    whole = by_kernels(experts, x, ids, shares)
    few, places = Experts(HIDDEN, 2, WIDTH), [[1, -1, 0, -1, -1], [-1, 1, -1, -1, 0]]

    class Rounds:
        def rounds(self, _: torch.Tensor) -> Iterator[ExpertRound]:
            for slots in places:
                for into, linear in (
                    (few.gate_up_proj, experts.gate_up_proj),
                    (few.down_proj, experts.down_proj),
                ):
                    _copy(into, linear, slots)
                where = torch.tensor(slots, dtype=torch.int32, device=device)
                yield ExpertRound(few.gate_up_proj.weights, few.down_proj.weights, where)

    experts.places = Rounds()
    assert torch.equal(by_kernels(experts, x, ids, shares), whole)
    close(plain(experts, x, ids, shares), whole)


def _copy(into: Linear, linear: Linear, slots: list[int]) -> None:
    """Rows of the experts that have a slot."""
    into.store_as("int8")
    assert linear.scale is not None
    order = [slots.index(slot) for slot in range(2)]
    rows = linear.rows // COUNT
    data, scale = (each.view(COUNT, rows, -1)[order].flatten(0, 1) for each in (linear.weight, linear.scale))
    into.weight = torch.nn.Parameter(data.clone(), requires_grad=False)
    into.scale = scale.clone()


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("shared", [False, True])
def test_routes_are_torchs(tokens: int, shared: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    scores = Linear(64, COUNT + shared)
    torch.nn.init.normal_(scores.weight)
    x = torch.randn(tokens, 64)
    right = scored(x, scores)
    found = score(x.to(device), scores.weight.to(device))
    torch.testing.assert_close(found.cpu(), right, atol=2e-5, rtol=1e-5)
    assert torch.equal(score(x[-1:].to(device), scores.weight.to(device))[0], found[-1])
    ids, shares = chosen(found.cpu(), COUNT, USED, torch.float32)
    mine = choose_experts(found, COUNT, USED, torch.float32)
    assert torch.equal(mine[0].cpu(), ids)
    torch.testing.assert_close(mine[1].cpu(), shares, atol=1e-6, rtol=1e-5)


def test_equal_scores_are_taken_in_order(device: torch.device) -> None:
    ids, shares = choose_experts(torch.ones(2, COUNT, device=device), COUNT, 3, torch.float32)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares.cpu(), torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_sums_are_torchs(dtype: torch.dtype, shared: bool, residual: bool, device: torch.device) -> None:
    parts, scores = torch.randn(3, USED, 80, dtype=dtype), torch.randn(3, COUNT + shared)
    beside = torch.randn(3, 80, dtype=dtype) if shared else None
    stream = torch.randn(3, 80, dtype=dtype) if residual else None
    right = added(parts, beside, scores, stream)
    moved = [None if each is None else each.to(device) for each in (parts, beside, scores, stream)]
    found = add(*moved)  # type: ignore[arg-type]
    wide = dtype == torch.float32  # bf16 rounds thrice
    torch.testing.assert_close(found.cpu(), right, atol=1e-6 if wide else 2e-2, rtol=1e-5 if wide else 2e-2)


def test_a_step_without_tokens(device: torch.device) -> None:
    experts = layer("bf16", device)
    ids = torch.empty(0, USED, dtype=torch.int32, device=device)
    assert experts(torch.empty(0, HIDDEN, device=device), ids, ids.float()).shape == (0, USED, HIDDEN)


@pytest.mark.parametrize(
    ("kind", "tokens", "cores", "gated", "tile", "high"),
    [
        ("fp8", 1, True, True, (32, 4), 16),
        ("fp8", 4, True, True, (64, 2), 16),
        ("fp8", 32, True, False, (128, 2), 16),
        ("int8", 256, True, True, (64, 2), 16),
        ("fp8", 257, True, True, (64, 4), 64),
        ("fp8", 2048, True, False, (128, 4), 64),
        ("int4", 32, True, True, (32, 4), 16),
        ("bf16", 2048, True, False, (64, 4), 64),
        ("fp8", 32, False, True, (16, 4), 16),
        ("int4", 2048, False, True, (32, 8), 16),
    ],
)
def test_tiles_are_those_that_were_measured(
    kind: FormatName, tokens: int, cores: bool, gated: bool, tile: tuple[int, int], high: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of 256 experts, 8 a token, on an H200; without tensor cores those whose operands fit the registers."""
    monkeypatch.setattr(grouped, "tensor_cores", lambda _: cores)
    launched: Any = defaultdict(lambda: lambda *_, **__: None)
    monkeypatch.setattr(grouped, "sort_pairs", launched)
    groups = Groups(torch.zeros(tokens, 8, dtype=torch.int32), 256)
    stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16}.get(kind, torch.int32)
    weights = Weights(kind, 1024, 2048, torch.empty(0, dtype=stored))
    assert groups._tile(weights, gated=gated) == tile
    assert groups.high == high

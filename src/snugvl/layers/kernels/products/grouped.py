"""A mixture's experts on a GPU: who goes where, and one product over tiles of one expert each.

    x [tokens, hidden] ─ gemm ─ scores ─ choose ─ ids, shares [tokens, used]
    ids ─ sort_pairs ─ counts [experts], order [pairs]: pairs of a token and an expert, by expert
    grouped: gate, up, SwiGLU of each pair [pairs, width] ─ grouped: down, · share [pairs, hidden] ─ add

No number comes back to the host: there are as many programs as there can be tiles, those beyond the last one
end at once, and each finds its expert from the counts. A tile's height follows from how many tokens a step
has, never from how many chose the expert, and every row of it is summed in the same order: so what a token
becomes depends on nothing that is beside it. What the product reads of weights is `gemm.py`'s.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from snugvl.layers.experts import ExpertRound
from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.device import native_fp8, tensor_cores
from snugvl.layers.kernels.products import ggml
from snugvl.layers.kernels.products.epilogue import add_residual, swiglu
from snugvl.layers.kernels.products.gemm import gemm, product_of
from snugvl.layers.kernels.products.weights import STORED_AS, operands
from snugvl.layers.weights import GROUP, Weights

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FEW_EACH = 8  # pairs of an expert, if all had as many, up to which tiles are low
FEW_TOKENS = (
    4  # of a step, from which there are tiles enough for all multiprocessors though they have more rows
)
ROUTER_COLUMNS = 512  # at a time: with less a router's few programs wait for one load after the other
STEP = 1024  # pairs that a program looks at, and values of a row that one adds, at a time


@launched
@triton.jit(do_not_specialize=["ROWS"])
def choose(
    scores, ids, shares, ROWS, COUNT: tl.constexpr, WIDE: tl.constexpr, USED: tl.constexpr,
    WIDE_USED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The `USED` largest of the first `COUNT` of a row of `scores` `[tokens, ROWS]`, equals by their number,
    and their softmax, normalised."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    left = tl.load(scores + token * ROWS + column, mask=column < COUNT, other=float("-inf"))
    place = tl.arange(0, WIDE_USED)
    chosen = tl.zeros([WIDE_USED], tl.int32)
    weight = tl.zeros([WIDE_USED], tl.float32)
    highest = tl.max(left, 0)
    for rank in range(USED):
        best = tl.max(left, 0)
        number = tl.min(tl.where(left == best, column, WIDE), 0)
        chosen = tl.where(place == rank, number, chosen)
        weight = tl.where(place == rank, tl.exp(best - highest), weight)
        left = tl.where(column == number, float("-inf"), left)
    weight = weight / tl.sum(weight, 0)
    at = token * USED + place
    tl.store(ids + at, chosen, mask=place < USED)
    tl.store(shares + at, weight.to(KIND).to(tl.float32), mask=place < USED)


def score(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[tokens, columns]` times `weight` in float32; of a row the same whatever rows are beside it."""
    tokens, (rows, columns) = len(x), weight.shape
    out = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    wide = x.element_size() == 2 and tensor_cores(x.device)  # else operands are in registers as a whole
    if tokens:
        gemm[(triton.cdiv(tokens, 16) * triton.cdiv(rows, 16), 1)](
            x, weight, weight, weight, x, x, out, x, x, tokens, rows, K=columns, FORMAT=STORED_AS["bf16"],
            GROUP=gcd(columns, ROUTER_COLUMNS if wide else GROUP), BM=16, BN=16, SPLIT=1, BAND=8,
            HAS_BIAS=False, HAS_RESIDUAL=False, SWIGLU=False, NATIVE=False, KIND=KINDS[x.dtype],
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def choose_experts(
    scores: torch.Tensor, count: int, used: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `layers/experts.py`."""
    tokens, rows = scores.shape
    ids = torch.empty(tokens, used, dtype=torch.int32, device=scores.device)
    shares = torch.empty(tokens, used, dtype=torch.float32, device=scores.device)
    if tokens:
        choose[(tokens,)](
            scores, ids, shares, rows, COUNT=count, WIDE=triton.next_power_of_2(count), USED=used,
            WIDE_USED=triton.next_power_of_2(used), KIND=KINDS[dtype], num_warps=4,
        )  # fmt: skip
    return ids, shares


@launched
@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(ids, counts, order, pairs, STEP: tl.constexpr):
    """How many of `ids` `[pairs]` are those of one expert, and which, behind those of experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros([STEP], tl.int32)
    mine = tl.zeros([STEP], tl.int32)
    for first in range(0, pairs, STEP):
        at = first + tl.arange(0, STEP)
        found = tl.load(ids + at, mask=at < pairs, other=0x7FFFFFFF)
        before += (found < expert).to(tl.int32)
        mine += (found == expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(counts + expert, tl.sum(mine, 0))
    for first in range(0, pairs, STEP):
        at = first + tl.arange(0, STEP)
        equal = (tl.load(ids + at, mask=at < pairs, other=0x7FFFFFFF) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(equal, 0) - equal, at, mask=equal > 0)
        start += tl.sum(equal, 0)


@triton.jit
def tile_of(counts, order, slots, BM: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,
            HAS_SLOTS: tl.constexpr):  # fmt: skip
    """Which slot's rows the tile of this program multiplies, or -1, which pairs `[BM]`, and how many."""
    tile = tl.program_id(0)
    number = tl.arange(0, WIDE)
    many = tl.load(counts + number, mask=number < COUNT, other=0)
    tiles = (many + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    here = number == expert
    within = (tile - tl.sum(tl.where(here, ends - tiles, 0), 0)) * BM + tl.arange(0, BM)
    mine = tl.sum(tl.where(here, many, 0), 0)
    first = tl.sum(tl.where(number < expert, many, 0), 0)
    has = within < mine
    pairs = tl.load(order + first + within, mask=has, other=0)
    slot = expert
    if HAS_SLOTS:
        slot = tl.load(slots + expert, mask=expert < COUNT, other=-1)
    return tl.where(expert < COUNT, slot, -1), pairs, has


@launched
@triton.jit(do_not_specialize=["M"])
def grouped(
    x, w, scale, zero, factors, out, counts, order, slots, M, N, K: tl.constexpr, COUNT: tl.constexpr,
    WIDE: tl.constexpr, EACH: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SWIGLU: tl.constexpr, HAS_SLOTS: tl.constexpr, NATIVE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """`out[p, n] = X[p / EACH] · W[slot, n]`, of gate and up as one; else times `factors[p]`.

    Args:
        M: rows of `x`.
        N: columns of `out`.
        EACH: pairs of each row of `x`.
    """
    slot, pairs, has = tile_of(counts, order, slots, BM, COUNT, WIDE, HAS_SLOTS)
    if slot < 0:
        return
    local = tl.program_id(1) * BN + tl.arange(0, BN)
    live = local < N
    tokens = tl.where(has, pairs // EACH, M)
    groups: tl.constexpr = K // GROUP
    if SWIGLU:  # a row of gate beside that of up which it opens, in one product
        row = tl.program_id(1) * BN + tl.arange(0, 2 * BN) // 2
        rows = slot.to(tl.int64) * (2 * N) + row + tl.arange(0, 2 * BN) % 2 * N
        both = product_of(
            x, w, scale, zero, tokens, rows, 0, groups, M, row < N, K, FORMAT, GROUP, BM, 2 * BN, NATIVE, KIND
        )
        gate, up = tl.split(tl.permute(tl.reshape(both, [BN, 2, BM]), [0, 2, 1]))
        acc = swiglu(gate, up, KIND)
    else:
        rows = slot.to(tl.int64) * N + local
        acc = product_of(
            x, w, scale, zero, tokens, rows, 0, groups, M, live, K, FORMAT, GROUP, BM, BN, NATIVE, KIND
        )
        acc = acc.to(KIND).to(tl.float32) * tl.load(factors + pairs, mask=has, other=0)[None, :]
    y = tl.trans(acc)  # [BM, BN]: written along the rows of the output
    at = pairs.to(tl.int64)[:, None] * N + local[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=has[:, None] & live[None, :])


@launched
@triton.jit(do_not_specialize=["M"])
def grouped_blocks(
    x, w, factors, out, counts, order, slots, M, stored, N, K: tl.constexpr, COUNT: tl.constexpr,
    WIDE: tl.constexpr, EACH: tl.constexpr, TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWIGLU: tl.constexpr, HAS_SLOTS: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`grouped` with a GGUF's blocks, `stored` rows in all."""
    slot, pairs, has = tile_of(counts, order, slots, BM, COUNT, WIDE, HAS_SLOTS)
    if slot < 0:
        return
    local = tl.program_id(1) * BN + tl.arange(0, BN)
    live = local < N
    rows = slot.to(tl.int64) * (2 * N if SWIGLU else N) + local
    tokens = tl.where(has, pairs // EACH, M)
    stored = stored.to(tl.int64)
    acc = ggml.product_of(x, w, stored, rows, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
    if SWIGLU:
        up = ggml.product_of(x, w, stored, rows + N, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
        acc = swiglu(acc, up, KIND)
    else:
        acc = acc.to(KIND).to(tl.float32) * tl.load(factors + pairs, mask=has, other=0)[None, :]
    at = pairs.to(tl.int64)[:, None] * N + local[None, :]
    tl.store(out + at, tl.trans(acc).to(out.dtype.element_ty), mask=has[:, None] & live[None, :])


class Groups:
    """The pairs of a step, by expert. `tiles`: how many there can be."""

    def __init__(self, ids: torch.Tensor, count: int) -> None:
        """`ids` `[tokens, used]` int32 of `count` experts."""
        pairs, device = ids.numel(), ids.device
        self.count, self.low = count, pairs <= FEW_EACH * count
        self.few, self.loops = len(ids) < FEW_TOKENS, not tensor_cores(device)
        self.high = 16 if self.low or self.loops else 64
        self.counts = torch.empty(count, dtype=torch.int32, device=device)
        self.order = torch.empty(pairs, dtype=torch.int32, device=device)
        self.tiles = min(pairs, count) + pairs // self.high
        sort_pairs[(count,)](ids, self.counts, self.order, pairs, STEP=STEP, num_warps=4)

    def _tile(self, weights: Weights, *, gated: bool) -> tuple[int, int]:
        """Outputs of a tile, and warps; measured for FP8 on an H200. `gated`: an output has two rows."""
        if weights.format == "ggml":  # its values take more registers on their way, and it is two products
            return (16, 4) if self.low else (32, 8 if gated else 4)
        if self.loops:  # operands are in registers as a whole
            return (16 if gated else 32, 4) if self.low else (32 if gated else 64, 8 if gated else 4)
        if weights.data.element_size() == 1 and not self.few:  # FP8 and int8
            return 64 if gated else 128, 2 if self.low else 4
        return 32 if gated or self.low else 64, 4

    def multiply(self, x: torch.Tensor, part: ExpertRound, shares: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` `[tokens, used, hidden]` what a round's experts make of `x` `[tokens, hidden]`."""
        width = part.down.columns
        inner = torch.empty(shares.numel(), width, dtype=x.dtype, device=x.device)
        self._product(x, part.gate_up, part.slots, None, inner, shares.shape[1])
        self._product(inner, part.down, part.slots, shares, out.view(-1, out.shape[-1]), 1)

    def _product(
        self, x: torch.Tensor, weights: Weights, slots: torch.Tensor | None, factors: torch.Tensor | None,
        out: torch.Tensor, each: int,
    ) -> None:  # fmt: skip
        """`factors`: of each pair; None where gate and up become one."""
        outputs, columns = out.shape[1], weights.columns
        gated = factors is None
        rows, warps = self._tile(weights, gated=gated)
        pairs = (factors if factors is not None else x, out, self.counts, self.order)
        chosen = {
            "K": columns, "COUNT": self.count, "WIDE": triton.next_power_of_2(self.count), "EACH": each,
            "BM": self.high, "BN": rows, "SWIGLU": gated, "HAS_SLOTS": slots is not None,
            "KIND": KINDS[x.dtype],
            "num_warps": warps,
            "num_stages": 3 if x.element_size() == 2 else 1,
        }  # fmt: skip
        where = self.counts if slots is None else slots
        grid = (self.tiles, triton.cdiv(outputs, rows))
        if weights.format == "ggml":
            (part,) = weights.parts
            grouped_blocks[grid](
                x, weights.data, *pairs, where, len(x), part.rows, outputs, TYPE=ggml.TYPES[part.type],
                BK=ggml.DEEP, EVEN=columns % ggml.DEEP == 0 and outputs % rows == 0, **chosen,
            )  # fmt: skip
            return
        group = gcd(columns, GROUP) if weights.scale is None else weights.group
        grouped[grid](
            x, *operands(weights), *pairs, where, len(x), outputs, FORMAT=STORED_AS[weights.format],
            GROUP=group, NATIVE=native_fp8(x.device), **chosen,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["rows"])
def add_pairs(
    parts, shared, scores, residual, out, rows, N: tl.constexpr, USED: tl.constexpr, STEP: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One (token, part of its row): the sum of its pairs, in their order, and what stands beside it.
    `scores`: `[tokens, rows]`; the last of a row opens the gate of `shared`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = column < N
    total = tl.zeros([STEP], tl.float32)
    for rank in range(USED):
        total += tl.load(parts + (token * USED + rank) * N + column, mask=mask, other=0).to(tl.float32)
    total = total.to(KIND).to(tl.float32)
    at = token * N + column
    if HAS_SHARED:
        gate = tl.sigmoid(tl.load(scores + token * rows + rows - 1)).to(KIND).to(tl.float32)
        total += (gate * tl.load(shared + at, mask=mask, other=0).to(tl.float32)).to(KIND).to(tl.float32)
    if HAS_RESIDUAL:
        total = add_residual(total, tl.load(residual + at, mask=mask, other=0), KIND)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def add(
    parts: torch.Tensor, shared: torch.Tensor | None, scores: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `layers/experts.py`: to the residual's place, where there is one."""
    tokens, used, columns = parts.shape
    out = residual
    if out is None:
        out = torch.empty(tokens, columns, dtype=parts.dtype, device=parts.device)
    if tokens:
        add_pairs[(tokens, triton.cdiv(columns, STEP))](
            parts, parts if shared is None else shared, scores, out, out, scores.shape[1], N=columns,
            USED=used, STEP=STEP, HAS_SHARED=shared is not None, HAS_RESIDUAL=residual is not None,
            KIND=KINDS[parts.dtype], num_warps=4,
        )  # fmt: skip
    return out

"""Which tokens top_k, top_p and min_p leave of a long row, without sorting it and without asking the host.

A row's filters leave the scores above a threshold, and of those equal to it the ones with the lowest ids. The
threshold is found by halving: a float32 and its bits, read as an integer of the same order, so 32 passes over
the row find the one of top_k, and 32 more the one of top_p among what top_k left.

    scores   ───────────────── threshold ══════════════════ highest
              out               lowest ids of equals stay     stay

What this computes is `engine.sampling.filters._support_of_all`, up to the rounding of a sum of probabilities.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched

STEP = 4096  # scores read at a time


@triton.jit
def _order(x):
    """int32 in the order of float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(row, vocab, threshold, floor, highest, WEIGH: tl.constexpr, STEP: tl.constexpr):
    """How many scores are above a threshold, and no lower than a floor; or the sum of their weights."""
    total = tl.zeros([STEP], tl.float32)
    for first in range(0, vocab, STEP):
        at = first + tl.arange(0, STEP)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        there = (at < vocab) & (_order(x) > threshold) & (_order(x) >= floor)
        value = tl.full([STEP], 1.0, tl.float32)
        if WEIGH:
            value = tl.exp(x - highest)
        total += tl.where(there, value, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _value(key):
    """float32 of an integer in its order."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@launched
@triton.jit(do_not_specialize=["sure", "top_k", "top_p", "min_p"])
def search_support(scores, kept, sure, top_k, top_p, min_p, vocab, STEP: tl.constexpr):
    """One row of `scores` `[n, vocab]` float32 to `kept` `[n, vocab]` bool, if it is not sure already."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(sure + index) != 0:
        return
    row, target = scores + index * vocab, kept + index * vocab
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    lowest_weight = tl.load(min_p + index)
    best = tl.full([STEP], float("-inf"), tl.float32)
    for first in range(0, vocab, STEP):
        at = first + tl.arange(0, STEP)
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    highest = tl.max(best, 0)
    top = _order(highest)
    floor = _order(tl.full([], float("-inf"), tl.float32))
    ties = vocab.to(tl.float32)  # of those at the floor that stay
    if k > 0:
        low, high = floor, top
        while low < high:
            middle = (low & high) + ((low ^ high) >> 1)
            if _above(row, vocab, middle, floor, highest, False, STEP) < k.to(tl.float32):
                high = middle
            else:
                low = middle + 1
        floor = low
        ties = k.to(tl.float32) - _above(row, vocab, floor, floor, highest, False, STEP)
    at_floor = _above(row, vocab, floor - 1, floor, highest, False, STEP)
    at_floor -= _above(row, vocab, floor, floor, highest, False, STEP)
    ties = tl.minimum(ties, at_floor)
    total = _above(row, vocab, floor, floor, highest, True, STEP) + ties * tl.exp(_value(floor) - highest)
    if p < 1.0:
        low, high = floor, top
        while low < high:
            middle = (low & high) + ((low ^ high) >> 1)
            if _above(row, vocab, middle, floor, highest, True, STEP) < p * total:
                high = middle
            else:
                low = middle + 1
        rest = p * total - _above(row, vocab, low, floor, highest, True, STEP)
        enough = tl.maximum(tl.ceil(rest / tl.exp(_value(low) - highest)), 1.0)
        ties = tl.where(low > floor, enough, tl.minimum(ties, enough))
        floor = low
    before = tl.zeros([], tl.float32)  # equals of the floor with lower ids
    for first in range(0, vocab, STEP):
        at = first + tl.arange(0, STEP)
        inside = at < vocab
        x = tl.load(row + at, mask=inside, other=float("-inf"))
        equal = ((_order(x) == floor) & inside).to(tl.float32)
        rank = before + tl.cumsum(equal, 0) - equal
        stays = (_order(x) > floor) | ((equal > 0) & (rank < ties))
        stays = stays & (tl.exp(x - highest) >= lowest_weight)
        tl.store(target + at, stays, mask=inside)
        before += tl.sum(equal, 0)


def search(
    scores: torch.Tensor,
    kept: torch.Tensor,
    sure: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Write to `kept` `[n, vocab]` bool what filters leave of each row that is not `sure` `[n]` yet.

    Args:
        scores: `[n, vocab]` float32, logits after temperature.
        top_k: `[n, 1]` int64, 0 for off.
        top_p: `[n, 1]` float32, 1 or more for off.
        min_p: `[n, 1]` float32, 0 for off.
    """
    search_support[(len(scores),)](
        scores.contiguous(),
        kept.view(torch.uint8),
        sure.view(torch.uint8),
        top_k,
        top_p,
        min_p,
        scores.shape[1],
        STEP=STEP,
        num_warps=16,
    )

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel by which `expert_cache.py` draws experts on a GPU, in place of a router."""

import triton
import triton.language as tl


@triton.jit
def draw(where, step, rate, ids, COUNT: tl.constexpr, WIDE: tl.constexpr, USED: tl.constexpr):
    """Each of `ids` `[USED]` int32 becomes, as often as `rate` `[1]` says, an expert that has a slot by
    `where` `[COUNT]`, else one that has none; no two are the same. Below 0 they stay. `step` `[1]` counts."""
    share = tl.load(rate)
    if share >= 0:
        number = tl.arange(0, WIDE)
        now = tl.load(step)
        chance = tl.rand(17, now * WIDE + number)
        has = tl.load(where + number, mask=number < COUNT, other=-1) >= 0
        free = number < COUNT
        for rank in range(USED):
            wants = tl.rand(31, now * USED + rank) < share
            here = free & (has == wants)
            here = here | (free & (tl.sum(here.to(tl.int32), 0) == 0))
            key = tl.where(here, chance, -1.0)
            chosen = tl.min(tl.where(key == tl.max(key, 0), number, WIDE), 0)
            free = free & (number != chosen)
            tl.store(ids + rank, chosen)
        tl.store(step, now + 1)

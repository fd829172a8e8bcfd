# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel by which `expert_cache.py` draws experts on a GPU, in place of a router."""

import triton
import triton.language as tl


@triton.jit
def draw(
    where, step, rate, places, kept, ids, rows, COUNT: tl.constexpr, WIDE: tl.constexpr, USED: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Each of `ids` `[rows, USED]` int32 becomes, as often as `rate` `[1]` says, an expert that has a slot by
    `where` `[COUNT]`, else one that has none; no two of a row are the same. Below 0 they stay. `step` `[1]`
    counts. `places` `[2]`: places in the sequence of the first row and of the newest token; rows before that
    were drawn already, and `kept` `[KEPT, USED]` has their experts."""
    share = tl.load(rate)
    if share >= 0:
        number = tl.arange(0, WIDE)
        has = tl.load(where + number, mask=number < COUNT, other=-1) >= 0
        begun = tl.load(step)
        first, newest = tl.load(places), tl.load(places + 1)
        for row in range(rows):
            now, line = begun + row, (first + row) % KEPT * USED
            chance = tl.rand(17, now * WIDE + number)
            free = number < COUNT
            for rank in range(USED):
                wants = tl.rand(31, now * USED + rank) < share
                here = free & (has == wants)
                here = here | (free & (tl.sum(here.to(tl.int32), 0) == 0))
                key = tl.where(here, chance, -1.0)
                chosen = tl.min(tl.where(key == tl.max(key, 0), number, WIDE), 0)
                if first + row < newest:
                    chosen = tl.load(kept + line + rank)
                free = free & (number != chosen)
                tl.store(kept + line + rank, chosen)
                tl.store(ids + row * USED + rank, chosen)
        tl.store(step, begun + rows)

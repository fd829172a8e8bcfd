"""Slots for experts in host memory, given by the GPU, which fetches what it misses by itself.

    ids of a step ─ place_experts ─ slot of each expert; list of (expert, slot) ─ bring_experts ─ slots filled

An expert that has no slot takes that of the lowest score, and none of those that the step needs. It is read
where it is: page-locked host memory is part of the GPU's addresses. No number goes to the host, so the
experts of a step are known to nobody else, and a CUDA graph may hold both kernels.

A step that may need more experts than there are slots has several rounds. In each of them as many experts get
a slot as there are, of those that no round before it had, so every expert crosses once. How many rounds there
are follows from the number of pairs: the last ones often have nothing to do.

Which expert has which slot is kept in `models/expert_cache.py`'s `SlotState`.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched

STEP = 16  # pairs that are compared at a time
WORDS = 1024  # words of 8 bytes that a program copies at a time
PROGRAMS = 16  # of a tensor of an expert


@launched
@triton.jit(do_not_specialize=["pairs", "tokens", "slots", "later"])
def place_experts(
    ids, counts, where, scores, held, table, brought, pairs, tokens, slots, later, COUNT: tl.constexpr,
    WIDE: tl.constexpr, DECAY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Give experts of `ids` `[pairs]` slots, all of them if there are enough; one program.

    Args:
        counts: `[2]` int32, experts found in slots and brought until now.
        where: `[COUNT]` int32, slot of each expert or -1.
        scores: `[COUNT]` float32.
        held: `[slots]` int32, expert in each slot or -1.
        table: `[2, COUNT]` int32, written: the slot that each expert has in this round, or -1; and whether
            it had one in this round or one before it.
        brought: `[pairs or slots, 2]` int32, the fewer, written: experts to bring and their slots, then -1.
        later: 0 in the first round of a step, then 1.
    """
    number = tl.arange(0, WIDE)
    expert_there, slot_there = number < COUNT, number < slots
    place = tl.load(where + number, mask=expert_there, other=0)
    score = tl.load(scores + number, mask=expert_there, other=0)
    owner = tl.load(held + number, mask=slot_there, other=-1)
    had = tl.load(table + COUNT + number, mask=expert_there & (later > 0), other=0)
    worth = tl.load(scores + owner, mask=owner >= 0, other=-1) * DECAY
    times = tl.zeros([WIDE], tl.int32)
    busy = tl.zeros([WIDE], tl.int32)
    for first in range(0, pairs, STEP):
        at = first + tl.arange(0, STEP)
        each = tl.load(ids + at, mask=at < pairs, other=-2)
        times += tl.sum((number[:, None] == each[None, :]).to(tl.int32), 1)
        busy += tl.sum((owner[:, None] == each[None, :]).to(tl.int32), 1)
        tl.store(brought + 2 * at, -1, mask=at < tl.minimum(pairs, slots))
    needed = (times > 0) & expert_there & (had == 0)
    absent = needed & (place < 0)
    missing = tl.sum(absent.to(tl.int32), 0)
    hits = tl.load(counts) + tl.sum(needed.to(tl.int32), 0) - missing
    misses = tl.load(counts + 1) + tl.where(later > 0, 0, missing)
    free = slot_there & ((busy == 0) | (later > 0))  # later none that is in a slot is needed any more
    worth = tl.where(free, worth, float("inf"))
    tl.debug_barrier()  # all is read before any of it is written
    for index in range(tl.minimum(missing, tl.sum(free.to(tl.int32), 0))):
        expert = tl.min(tl.where(absent, number, WIDE), 0)
        slot = tl.min(tl.where(worth == tl.min(worth, 0), number, WIDE), 0)
        old = tl.sum(tl.where(number == slot, owner, 0), 0)
        place = tl.where(number == old, -1, tl.where(number == expert, slot, place))
        owner = tl.where(number == slot, expert, owner)
        worth = tl.where(number == slot, float("inf"), worth)
        absent = absent & (number != expert)
        tl.store(brought + 2 * index, expert)
        tl.store(brought + 2 * index + 1, slot)
    tl.store(counts, hits)
    tl.store(counts + 1, misses)
    tl.store(where + number, place, mask=expert_there)
    tl.store(table + number, tl.where(had == 0, place, -1), mask=expert_there)
    tl.store(table + COUNT + number, had | (place >= 0).to(tl.int32), mask=expert_there)
    used = score * DECAY + times.to(tl.float32) / tokens
    tl.store(scores + number, tl.where(later > 0, score, used), mask=expert_there)
    tl.store(held + number, owner, mask=slot_there)


@launched
@triton.jit
def bring_experts(brought, planes, WORDS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Copy an expert's share of one tensor to its slot; a program copies a part of it.

    Args:
        brought: see `place_experts`.
        planes: `[tensors, 3]` int64, addresses of the first expert and of the first slot, words of an expert.
    """
    pair, plane = tl.program_id(0), tl.program_id(1)
    expert = tl.load(brought + 2 * pair)
    if expert < 0:
        return
    slot = tl.load(brought + 2 * pair + 1)
    words = tl.load(planes + 3 * plane + 2)
    source = tl.load(planes + 3 * plane).to(tl.pointer_type(tl.int64)) + expert * words
    target = tl.load(planes + 3 * plane + 1).to(tl.pointer_type(tl.int64)) + slot * words
    for first in range(tl.program_id(2) * WORDS, words, PROGRAMS * WORDS):
        at = first + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


def take_slots(
    ids: torch.Tensor, parts: tuple[torch.Tensor, ...], brought: torch.Tensor, planes: torch.Tensor,
    decay: float, *, later: bool,
) -> None:  # fmt: skip
    """Give experts of `ids` `[tokens, used]` slots, as many as there are, and fill those that were given.

    Args:
        parts: counts, slots of experts, scores, experts of slots, table, as `place_experts` has them.
        brought: `[slots, 2]` int32, written over.
        planes: see `bring_experts`.
        decay: by which scores are multiplied.
        later: whether it isn't the first round of the step.
    """
    count, slots, pairs = len(parts[1]), len(parts[3]), ids.numel()
    place_experts[(1,)](
        ids, *parts, brought, pairs, len(ids), slots, int(later), COUNT=count,
        WIDE=triton.next_power_of_2(count), DECAY=decay, STEP=STEP, num_warps=4,
    )  # fmt: skip
    grid = (min(pairs, slots), len(planes), PROGRAMS)
    bring_experts[grid](brought, planes, WORDS=WORDS, PROGRAMS=PROGRAMS, num_warps=4)

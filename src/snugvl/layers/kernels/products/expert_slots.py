"""Slots for experts in host memory, given by the GPU, which fetches what it misses by itself.

    ids of a step ─ place_experts ─ slot of each expert; list of (expert, slot) ─ bring_experts ─ slots filled

An expert that has no slot takes that of the lowest score, and none of those that the step needs. It is read
where it is: page-locked host memory is part of the GPU's addresses. No number goes to the host, so the
experts of a step are known to nobody else, and a CUDA graph may hold both kernels.

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
@triton.jit(do_not_specialize=["pairs", "tokens", "slots"])
def place_experts(
    ids, counts, where, scores, held, brought, pairs, tokens, slots, COUNT: tl.constexpr, WIDE: tl.constexpr,
    DECAY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Give each expert of `ids` `[pairs]` a slot; one program.

    Args:
        counts: `[2]` int32, experts found in slots and brought until now.
        where: `[COUNT]` int32, slot of each expert or -1.
        scores: `[COUNT]` float32.
        held: `[slots]` int32, expert in each slot or -1; at least as many as pairs.
        brought: `[pairs, 2]` int32, written: experts to bring and their slots, then -1.
    """
    number = tl.arange(0, WIDE)
    expert_there, slot_there = number < COUNT, number < slots
    place = tl.load(where + number, mask=expert_there, other=0)
    score = tl.load(scores + number, mask=expert_there, other=0)
    owner = tl.load(held + number, mask=slot_there, other=-1)
    worth = tl.load(scores + owner, mask=owner >= 0, other=-1) * DECAY
    times = tl.zeros([WIDE], tl.int32)
    busy = tl.zeros([WIDE], tl.int32)
    for first in range(0, pairs, STEP):
        at = first + tl.arange(0, STEP)
        each = tl.load(ids + at, mask=at < pairs, other=-2)
        times += tl.sum((number[:, None] == each[None, :]).to(tl.int32), 1)
        busy += tl.sum((owner[:, None] == each[None, :]).to(tl.int32), 1)
        tl.store(brought + 2 * at, -1, mask=at < pairs)
    needed = (times > 0) & expert_there
    absent = needed & (place < 0)
    missing = tl.sum(absent.to(tl.int32), 0)
    hits = tl.load(counts) + tl.sum(needed.to(tl.int32), 0) - missing
    misses = tl.load(counts + 1) + missing
    worth = tl.where(slot_there & (busy == 0), worth, float("inf"))
    tl.debug_barrier()  # all is read before any of it is written
    for index in range(missing):
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
    tl.store(scores + number, score * DECAY + times.to(tl.float32) / tokens, mask=expert_there)
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
    decay: float,
) -> None:  # fmt: skip
    """Give each expert of `ids` `[tokens, used]` a slot, and fill those of experts that had none.

    Args:
        parts: counts, slots of experts, scores, experts of slots, as `place_experts` has them.
        brought: `[pairs or more, 2]` int32, written over.
        planes: see `bring_experts`.
        decay: by which scores are multiplied.
    """
    count, slots, pairs = len(parts[1]), len(parts[3]), ids.numel()
    place_experts[(1,)](
        ids, *parts, brought, pairs, len(ids), slots, COUNT=count, WIDE=triton.next_power_of_2(count),
        DECAY=decay, STEP=STEP, num_warps=4,
    )  # fmt: skip
    grid = (pairs, len(planes), PROGRAMS)
    bring_experts[grid](brought, planes, WORDS=WORDS, PROGRAMS=PROGRAMS, num_warps=4)

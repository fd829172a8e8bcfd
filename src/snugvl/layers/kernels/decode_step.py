"""The work of a decode step before and after its network, in three launches instead of some twenty.

    lengths, deltas, tables ─ place_tokens ─► positions, slots ─► network ─► logits ─ highest_parts ─►
    a few candidates a row ─ take_highest ─► tokens, the next step's ids, lengths + 1

At one sequence each launch costs more than its work: a few microseconds, in a step of one millisecond. So a
step of a few drafts sets them apart, to attend as those of a decode step do, in one launch, too.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.places import most_sequences

PART = 4096  # scores that a program looks at


@launched
@triton.jit(do_not_specialize=["table_width", "sequences"])
def place_tokens(
    lengths, deltas, tables, positions, slots, table_width, sequences, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One sequence: the M-RoPE position of its newest token, on three axes, and its slot in the cache.

    Args:
        lengths: `[sequences]` int32, tokens with the newest; 0 for a padding row, whose slot is −1.
        deltas: `[sequences]` int64, from a token's place to its position.
        tables: `[sequences, table_width]` int32.
        positions: `[3, sequences]` int64, slots: `[sequences]` int64.
    """
    wait_for_others(PDL)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    live = length > 0
    place = tl.maximum(length - 1, 0)
    block = tl.load(tables + row.to(tl.int64) * table_width + place // BLOCK, mask=live, other=0)
    slot = block.to(tl.int64) * BLOCK + place % BLOCK
    tl.store(slots + row, tl.where(live, slot, -1))
    position = place.to(tl.int64) + tl.load(deltas + row)
    for axis in tl.static_range(3):
        tl.store(positions + axis * sequences + row, position)


@launched
@triton.jit(do_not_specialize=["sequences", "width"])
def set_apart(
    starts, lengths, tables, seen, rows, sequences, width, MAX: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token: what it sees of its sequence, and that sequence's table.

    Args:
        starts: `[sequences + 1]` int32, lengths: `[sequences]` int32, tables: `[sequences, width]` int32.
        seen: `[tokens]` int32, tokens up to it; 0 for padding.
        rows: `[tokens, width]` int32.
    """
    wait_for_others(PDL)
    token = tl.program_id(0)
    line = tl.arange(0, MAX)
    ends = tl.load(starts + 1 + line, mask=line < sequences, other=0x7FFFFFFF)
    owner = tl.minimum(tl.sum((ends <= token).to(tl.int32), 0), sequences - 1)
    left = tl.load(starts + owner + 1) - token - 1
    mine = token < tl.load(starts + sequences)
    tl.store(seen + token, tl.where(mine, tl.load(lengths + owner) - left, 0))
    for first in tl.range(0, width, WIDE):
        block = first + tl.arange(0, WIDE)
        inside = block < width
        value = tl.load(tables + owner.to(tl.int64) * width + block, mask=inside, other=0)
        tl.store(rows + token.to(tl.int64) * width + block, value, mask=inside)


@launched
@triton.jit(do_not_specialize=["vocabulary", "parts", "words"])
def highest_parts(
    logits, bits, values, ids, vocabulary, parts, words, PART: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (row, part) of `logits` `[rows, vocabulary]`: its highest score, NaN if one is, and whose it is.

    `values` float32 and `ids` int32, the first of equals, are `[rows, parts]`. MASKED: of the tokens that are
    allowed, bit `t % 32` of word `t // 32` of `bits` `[rows, words]` int32; infinite scores are NaN then.
    """
    wait_for_others(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    inside = at < vocabulary
    score = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf"))
    if MASKED:
        score = tl.where(score == float("inf"), float("nan"), score)
    broken = tl.max((score != score).to(tl.int32), 0) > 0
    score = tl.where(score != score, float("-inf"), score)
    if MASKED:
        word = tl.load(bits + row * words + at // 32, mask=inside, other=0)
        score = tl.where(((word >> (at % 32)) & 1) != 0, score, float("-inf"))
    best = tl.max(score, 0)
    first = tl.min(tl.where((score == best) & inside, at, 0x7FFFFFFF), 0)
    tl.store(values + row * parts + part, tl.where(broken, float("nan"), best))
    tl.store(ids + row * parts + part, first)


@launched
@triton.jit(do_not_specialize=["parts"])
def take_highest(
    values, ids, tokens, following, lengths, parts, PARTS: tl.constexpr, GOES_ON: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: the first of its highest scores.

    Args:
        values, ids: `[rows, parts]`, see `highest_parts`.
        tokens: `[rows]` int64, that id; −1 where the highest score is not finite, or any is NaN.
        following: `[rows]` int64, the id whatever its score.
        lengths: `[rows]` int32; a row that isn't padding grows by one.
        PARTS: a power of two that holds `parts`.
        GOES_ON: whether `following` and `lengths` are there.
    """
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    value = tl.load(values + row * parts + part, mask=inside, other=float("-inf"))
    id_ = tl.load(ids + row * parts + part, mask=inside, other=0x7FFFFFFF)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    value = tl.where(value != value, float("-inf"), value)
    best = tl.max(value, 0)
    first = tl.min(tl.where((value == best) & inside, id_, 0x7FFFFFFF), 0).to(tl.int64)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens + row, tl.where(broken | (finite == 0), -1, first))
    if GOES_ON:
        tl.store(following + row, first)
        length = tl.load(lengths + row)
        tl.store(lengths + row, tl.where(length > 0, length + 1, length))


def places(
    lengths: torch.Tensor, deltas: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `[3, sequences]` and slots `[sequences]`, both int64, of the newest tokens."""
    sequences = len(lengths)
    positions = torch.empty(3, sequences, dtype=torch.int64, device=lengths.device)
    slots = torch.empty(sequences, dtype=torch.int64, device=lengths.device)
    place_tokens[(sequences,)](
        lengths,
        deltas,
        tables,
        positions,
        slots,
        tables.shape[1],
        sequences,
        BLOCK=block_size,
        num_warps=1,
        **pdl(lengths.device),
    )
    return positions, slots


def apart(
    starts: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Length of the context of each of `tokens`, and its sequence's table: see `set_apart`."""
    sequences, width = tables.shape
    seen = torch.empty(tokens, dtype=torch.int32, device=tables.device)
    rows = torch.empty(tokens, width, dtype=torch.int32, device=tables.device)
    set_apart[(tokens,)](
        starts, lengths, tables, seen, rows, sequences, width, MAX=most_sequences(sequences), WIDE=256,
        num_warps=1, **pdl(tables.device),
    )  # fmt: skip
    return seen, rows


def choose(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    following: torch.Tensor,
    lengths: torch.Tensor,
    bits: torch.Tensor | None = None,
) -> None:
    """The likeliest tokens of `logits` `[rows, vocabulary]` float32, as `take_highest` writes them.

    `bits`: see `choose_allowed`.
    """
    _choose(logits, bits, tokens, following, lengths)


def choose_allowed(logits: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """The likeliest tokens, `[rows]` int64, of those that `bits` `[rows, ceil(vocabulary / 32)]` int32 allow.

    None: all are.

    −1 where none is, or one of the row's `logits`, forbidden or not, is NaN or infinite.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _choose(logits, bits, tokens)
    return tokens


def _choose(
    logits: torch.Tensor,
    bits: torch.Tensor | None,
    tokens: torch.Tensor,
    following: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> None:
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    turn = pdl(logits.device)
    highest_parts[(rows, parts)](
        logits,
        ids if bits is None else bits,  # a kernel takes a tensor for what it doesn't read
        values,
        ids,
        vocabulary,
        parts,
        0 if bits is None else bits.shape[1],
        PART=PART,
        MASKED=bits is not None,
        num_warps=8,
        **turn,
    )
    take_highest[(rows,)](
        values,
        ids,
        tokens,
        tokens if following is None else following,
        ids if lengths is None else lengths,
        parts,
        PARTS=triton.next_power_of_2(parts),
        GOES_ON=following is not None,
        num_warps=1,
        **turn,
    )

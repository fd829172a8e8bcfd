"""A step's tensors: the network's inputs, all numbers in one, and the likeliest tokens on their way back.

chunks        [ s0: tokens 16 … 31 | s1: token 40 | s2: token 7 ]
ids           [ 5 8 ▒ ▒ ▒ ▒ 9 …    | 17           | 3           ]     ▒ placeholder
vision_rows         2 3 4 5                                           rows of the batch
vision_embeds       rows 10 … 13 of the image's encoding              its rows 0 … 9 came a chunk earlier

The host writes the numbers with numpy, and one copy brings them to the device:

    ids │ positions × 3 │ slots │ logit rows │ placeholders │ tables
        │ state_slots │ landings │ unsure │ hidden rows │ following │ starts │ lengths

One copy, because each takes the host as long as a kernel of the step does. Every part begins at a multiple of
16 bytes and tables are as wide as a multiple of 16: Triton compiles another kernel for those that are not.

A `Shape` may be larger than its step. Its padding is never read: tokens that are written nowhere
(slot −1) and belong to no sequence, and sequences of no tokens at the end.

Where each sequence has one token, batches are made on the device (`graphs/decode.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from snugvl.core.config import RECENT
from snugvl.engine.request import Sampled
from snugvl.engine.sampling.masks import unpacked
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import slot_of
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.device import HostCopy, to_device, upload
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.replaced import by_kernels
from snugvl.models.batch import DraftBatch, ForwardBatch, Scoring

T = TypeVar("T")
Array = NDArray[Any]

_ALIGNED = 2  # values of 8 bytes
TABLE = 16  # blocks, of which a table's width is a multiple
ROWS = 32  # chosen at a time: bounds the workspace for n = 128 choices, 128 × 150,000 × 40 bytes otherwise


class Shape(NamedTuple):
    """Sizes of a step. A tuple, as one is made and looked up while the GPU waits for the step.

    Attributes:
        blocks: of a block table.
        logits: rows whose logits are wanted.
        pictured: placeholders.
        hidden: rows of a draft model's hidden states (`DraftBatch`), the last one unused; 0 without one.
    """

    tokens: int
    sequences: int
    blocks: int
    logits: int
    pictured: int
    hidden: int = 0

    @property
    def size(self) -> int:
        """Number of values of 8 bytes in all."""
        return _size_of(self)

    def split(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of `flat` `[size]` int64, in their order."""
        start = 0
        for count in self.counts:
            yield flat[start : start + count]
            start += _aligned(count)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values of 8 bytes in each part, in their order."""
        lines = self.sequences
        ends = (_halves(lines + 1), _halves(lines))
        return (
            self.tokens,
            3 * self.tokens,
            self.tokens,
            self.logits,
            self.pictured,
            _halves(lines * self.blocks),
            lines,
            lines,
            lines,
            self.tokens if self.hidden else 0,
            self.tokens if self.hidden else 0,
            *ends,
        )


@lru_cache(256)
def _size_of(shape: Shape) -> int:
    return sum(map(_aligned, shape.counts))


class Numbers(NamedTuple, Generic[T]):
    """The parts of a flat tensor, as views; int64, but int32 what attention reads.

    Attributes:
        ids: `[tokens]`.
        positions: `[3, tokens]`.
        slots: `[tokens]`, −1 where nothing is written.
        logit_rows: `[logits]`, among the tokens.
        pictured: `[pictured]`, tokens that are placeholders.
        tables: `[sequences, blocks]` int32, as in the graphs of decode steps: for another type kernels would
            be compiled again.
        state_slots: `[sequences]`.
        landings: `[sequences]`, number of the step's tokens after which a recurrent state is saved; 0:
            nowhere.
        unsure: `[sequences]`, number of its last tokens that aren't taken into a recurrent state.
        hidden_rows: `[tokens]`, where its hidden state goes (`DraftBatch.rows`); or `[0]`.
        following: `[tokens]`, the token after it, below 0 that of the next row; or `[0]`. One that isn't
            known yet is 0, and its result is computed again.
        starts: `[sequences + 1]`, int32, where each begins among the tokens.
        lengths: `[sequences]` int32, tokens in the cache once these are written.
    """

    ids: T
    positions: T
    slots: T
    logit_rows: T
    pictured: T
    tables: T
    state_slots: T
    landings: T
    unsure: T
    hidden_rows: T
    following: T
    starts: T
    lengths: T


@dataclass(frozen=True, slots=True)
class Unread:
    """Tokens that are on the device, and that the host has not read, in a step whose chunks all sample.

    Attributes:
        rows: the chunks whose last token it is.
        tokens: `[chunks]` int64; below 0 for a broken sequence, whose next token is dropped.
    """

    rows: list[int]
    tokens: torch.Tensor

    def put(self, numbers: Numbers[torch.Tensor]) -> None:
        """Write the tokens to the ids of a step on the device."""
        rows = upload(self.rows, torch.int64, self.tokens.device)
        ids = self.tokens.index_select(0, rows).clamp(min=0)
        numbers.ids.index_copy_(0, numbers.logit_rows.index_select(0, rows), ids)


def put_drafts(numbers: Numbers[torch.Tensor], chunks: Sequence[Chunk]) -> None:
    """Write the drafts that the host doesn't know to the ids of a step on the device."""
    end = 0
    for chunk in chunks:
        end += chunk.end - chunk.start
        if chunk.unseen is not None:
            chunk.unseen.put(numbers.ids[end - len(chunk.drafts) : end])


def shape_of(chunks: Sequence[Chunk], hidden: int = 0) -> Shape:
    """The shape that chunks need, without padding; `hidden`: see `Shape`."""
    return Shape(
        tokens=sum(chunk.end - chunk.start for chunk in chunks),
        sequences=len(chunks),
        blocks=table_width(max(len(chunk.sequence.table) for chunk in chunks)),
        logits=sum(chunk.logits for chunk in chunks),
        pictured=sum(len(chunk.placeholders) for chunk in chunks),
        hidden=hidden,
    )


def table_width(blocks: int) -> int:
    """Width of tables that hold `blocks` blocks."""
    return -(-blocks // TABLE) * TABLE


def numbers_of(flat: torch.Tensor, shape: Shape) -> Numbers[torch.Tensor]:
    """The parts of `flat` `[shape.size]` int64."""
    ids, positions, slots, logit_rows, pictured, tables, *rest = shape.split(flat)
    state_slots, landings, unsure, hidden_rows, following, starts, lengths = rest
    lines = shape.sequences
    return Numbers(
        ids,
        positions.view(3, shape.tokens),
        slots,
        logit_rows,
        pictured,
        tables.view(torch.int32).view(lines, shape.blocks),
        state_slots,
        landings,
        unsure,
        hidden_rows,
        following,
        starts.view(torch.int32)[: lines + 1],
        lengths.view(torch.int32)[:lines],
    )


def pack(chunks: Sequence[Chunk], shape: Shape, block_size: int) -> torch.Tensor:
    """The numbers of `chunks` on the host, `[shape.size]` int64."""
    flat = torch.zeros(shape.size, dtype=torch.int64)
    fill(lines_of(flat, shape), chunks, shape, block_size)
    return flat


def lines_of(flat: torch.Tensor, shape: Shape) -> Numbers[Array]:
    """The parts of `flat` `[shape.size]` int64 of the host, for numpy."""
    return Numbers[Array](*(part.numpy() for part in numbers_of(flat, shape)))


def fill(lines: Numbers[Array], chunks: Sequence[Chunk], shape: Shape, block_size: int) -> None:
    """Write the numbers of `chunks`; all are zero."""
    lines.slots[:] = -1
    lines.hidden_rows[:] = shape.hidden - 1
    lines.following[:] = -1
    end = logits = pictured = 0
    for row, chunk in enumerate(chunks):
        sequence, start = chunk.sequence, end
        end += chunk.end - chunk.start
        ids = [*sequence.ids(chunk.start, chunk.end - len(chunk.drafts)), *chunk.drafts]
        lines.ids[start : start + len(ids)] = ids  # the host may not have read the last one: `Unread`
        _positions(chunk, lines.positions[:, start:end])
        table = np.asarray(sequence.table)
        places = np.arange(chunk.start, chunk.end)
        lines.slots[start:end] = table[places // block_size] * block_size + places % block_size
        if found := chunk.placeholders:
            lines.pictured[pictured : pictured + len(found)] = found
            lines.pictured[pictured : pictured + len(found)] += start - chunk.start
            pictured += len(found)
        lines.tables[row, : len(table)] = table
        lines.state_slots[row] = slot_of(sequence)
        lines.landings[row] = max(chunk.landing - chunk.start, 0)
        lines.unsure[row] = chunk.unsure
        lines.starts[row] = start
        lines.lengths[row] = chunk.end
        if shape.hidden:
            known = max(end - RECENT, start)  # the last ones, each of a place of its own
            lines.hidden_rows[known:end] = slot_of(sequence) * RECENT + places[known - start :] % RECENT
            lines.following[end - 1] = next(iter(sequence.ids(chunk.end, chunk.end + 1)), 0)
        lines.logit_rows[logits : logits + chunk.logits] = np.arange(end - chunk.logits, end)
        logits += chunk.logits
    lines.starts[len(chunks) :] = end


def _positions(chunk: Chunk, out: Array) -> None:
    """Write a chunk's M-RoPE positions to `out` `[3, tokens]`: the prompt's own, then counted on."""
    prompt = chunk.sequence.prompt
    own = max(min(chunk.end, len(prompt.ids)) - chunk.start, 0)
    if own:
        out[:, :own] = prompt.positions[:, chunk.start : chunk.start + own].numpy()
    out[:, own:] = np.arange(chunk.start + own, chunk.end) + prompt.delta


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _halves(count: int) -> int:
    """Number of values of 8 bytes that hold `count` of 4 bytes."""
    return -(-count // 2)


def batch_of(
    chunks: Sequence[Chunk],
    cache: KVCache,
    embeds: Sequence[torch.Tensor] = (),
    scoring: Scoring | None = None,
    unread: Unread | None = None,
    hidden: torch.Tensor | None = None,
) -> ForwardBatch:
    """The batch of chunks, packed and brought to the cache's device.

    Args:
        embeds: the encoder rows of all placeholders, in their order, in pieces.
        scoring: rows whose logits are also read, for log-probabilities of prompts.
        unread: tokens that only the device knows.
        hidden: hidden states that a draft model has; see `DraftBatch`.
    """
    device, shape = cache.storage.device, shape_of(chunks, 0 if hidden is None else len(hidden))
    numbers = numbers_of(to_device(pack(chunks, shape, cache.block_size), device), shape)
    put_drafts(numbers, chunks)
    if unread is not None:
        unread.put(numbers)
    joined = embeds[0] if len(embeds) == 1 else torch.cat(list(embeds)) if embeds else None
    return packed_batch(
        numbers,
        cache,
        tuple(chunk.end - chunk.start for chunk in chunks),
        tuple(chunk.end for chunk in chunks),
        kernels=device.type == "cuda",
        vision=None if joined is None else (numbers.pictured, joined),
        scoring=scoring,
        hidden=hidden,
    )


def packed_batch(
    numbers: Numbers[torch.Tensor],
    cache: KVCache,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    kernels: bool = True,
    apart: bool = False,
    vision: tuple[torch.Tensor, torch.Tensor] | None = None,
    scoring: Scoring | None = None,
    hidden: torch.Tensor | None = None,
) -> ForwardBatch:
    """The batch of numbers on the device.

    Args:
        query_lens: tokens of each sequence, and `context_lens` with those before; at most, in a CUDA graph.
        kernels: whether they read `starts` and `lengths` on the device.
        apart: whether they attend token by token (`AttentionMetadata.apart`).
        vision: rows that hold a placeholder, and their embeddings (`ForwardBatch.vision_rows`).
        scoring: rows whose logits are looked at besides.
        hidden: hidden states that a draft model has; see `DraftBatch`.
    """
    attention = AttentionMetadata(
        query_lens,
        context_lens,
        numbers.slots,
        numbers.tables,
        cache.block_size,
        starts=numbers.starts if kernels else None,
        lengths=numbers.lengths if kernels else None,
        state_slots=numbers.state_slots if cache.states is not None else None,
        landings=numbers.landings if cache.states is not None else None,
        unsure=numbers.unsure if cache.states is not None else None,
    )
    return ForwardBatch(
        input_ids=numbers.ids,
        positions=numbers.positions,
        attention=attention.token_by_token(len(numbers.ids)) if apart else attention,
        logit_rows=numbers.logit_rows,
        vision_rows=None if vision is None else vision[0],
        vision_embeds=None if vision is None else vision[1],
        scoring=scoring,
        drafts=None if hidden is None else DraftBatch(hidden, numbers.hidden_rows, numbers.following),
    )


class PendingTokens:
    """Chosen tokens that may still be under way to the host. `tokens`: `[n]` int64 on the device; below 0
    where logits or grammar are broken."""

    def __init__(self, tokens: torch.Tensor, packed: torch.Tensor | None = None) -> None:
        """`packed`: what the host gets in place of the tokens."""
        self.tokens = tokens
        self._copy = HostCopy(tokens if packed is None else packed)

    def results(self) -> list[Sampled]:
        """A token for each row, waiting for them."""
        return [Sampled(token if token >= 0 else None) for token in self._copy.read().tolist()]


def begin_rows(logits: torch.Tensor) -> list[PendingTokens]:
    """Start choosing the likeliest token of each row of `logits` `[n, vocab]`, `ROWS` at a time."""
    return [begin_likeliest(logits[at : at + ROWS].float(), None) for at in range(0, len(logits), ROWS)]


def begin_likeliest(logits: torch.Tensor, bits: torch.Tensor | None) -> PendingTokens:
    """Start choosing the likeliest token of each row of `logits` `[n, vocab]` float32.

    Equal to a `Sampler` whose choices are all greedy and move no score, in two launches.

    Args:
        bits: `[n, ceil(vocab / 32)]` int32 of the host, the tokens that are allowed; None: all are.
    """
    here = None if bits is None else bits.to(logits.device, non_blocking=True)
    return PendingTokens(likeliest(logits, here))


def likeliest(logits: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """The likeliest token of each row, `[n]` int64; −1 where there is none, or the logits are not finite.

    Args:
        logits: `[n, vocab]` float32.
        bits: `[n, ceil(vocab / 32)]` int32, the tokens that are allowed; None: all are.
    """
    if by_kernels(logits, "highest_parts", "take_highest"):
        from snugvl.layers.kernels import decode_step  # needs triton, which only GPUs bring

        return decode_step.choose_allowed(logits, bits)
    scores = logits if bits is None else logits.masked_fill(~unpacked(bits, logits.shape[1]), -torch.inf)
    highest, tokens = scores.max(-1)
    sound = (logits < torch.inf).all(-1)  # NaN is not lower, either
    return torch.where(sound & (highest > -torch.inf), tokens, -1)

"""CUDA graphs of a decode step, one for each of a few batch sizes.

A graph holds a whole step: positions and slots from the block tables, the network, the most likely tokens,
and the inputs of the step after it. So a batch that goes on as it is needs nothing from the host but the
replay, and the host may read the tokens of one step while the next one runs.

    ids, lengths, tables ─► positions, slots ─► network ─► logits ─► tokens ─► ids, lengths + 1
         ▲                                                                          │
         └──────────────────────────────────────────────────────────────────────────┘

A batch smaller than its graph is filled up with rows of length 0: they read nothing and write nowhere, or to
the unused slot of recurrent states.

Where a sequence has a grammar the tokens are chosen once more, from the same logits, by a graph of its own
that reads the masks, which are made while the network runs: they replace the next step's ids.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache, partial

import torch

from snugvl.core.config import RECENT
from snugvl.engine.batch import Array, PendingTokens
from snugvl.engine.batch import likeliest as likeliest_of
from snugvl.engine.graphs.cache import GraphCache, GraphKey
from snugvl.engine.request import Sampled
from snugvl.engine.sequence import Sequence, slot_of
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.device import HostCopy, upload
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.replaced import by_kernels
from snugvl.models.batch import DraftBatch, ForwardBatch, Network

SIZES = (1, 2, 4, 8, 16, 32)
ROW_FIELDS = 4  # of a row before its block table: token, length, delta, slot


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence of a decode batch.

    Attributes:
        token: the id whose successor is wanted.
        length: tokens in the cache once this one is written.
        delta: a token's M-RoPE position minus its index in the sequence.
        table: its KV blocks.
        slot: slot of its recurrent state, in a model that has one.
    """

    token: int
    length: int
    delta: int
    table: Rows[int]
    slot: int = 0


def rows_of(sequences: list[Sequence]) -> list[DecodeRow]:
    """Inputs of a graph for sequences whose newest token is to be computed.

    The token is 0 where the host has not read it.
    """
    return [
        DecodeRow(
            token=next(iter(sequence.ids(length - 1, length)), 0),
            length=length,
            delta=sequence.prompt.delta,
            table=sequence.table,
            slot=slot_of(sequence),
        )
        for sequence in sequences
        for length in (max(sequence.length, sequence.computed),)
    ]


def pack_rows(lines: Array, rows: Rows[DecodeRow]) -> None:
    """Write rows to `lines` `[rows or more, ROW_FIELDS + blocks]` int32; those beyond become padding."""
    lines[:, :ROW_FIELDS] = 0
    for index, row in enumerate(rows):
        lines[index, :ROW_FIELDS] = (row.token, row.length, row.delta, row.slot)
        lines[index, ROW_FIELDS : ROW_FIELDS + len(row.table)] = row.table


class Replay(PendingTokens):
    """A replay that may still be running; what it leaves is valid until the next one starts. `logits`:
    `[rows, vocab]`; `tokens`: `[rows]` int64, the most likely ones; below 0 where there is none."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, rows: int, into: torch.Tensor) -> None:
        """`tokens` `[size]` are copied to `into` of the host; the first `rows` of them count."""
        self.logits, self.tokens = logits[:rows], tokens[:rows]
        self._copy = HostCopy(tokens, into)

    def results(self) -> list[Sampled]:
        """The token of each row, waiting for them; None where the logits are not finite, or all forbidden."""
        return super().results()[: len(self.tokens)]


class DecodeGraphs:
    """Decode steps of each size: their buffers, and their graphs in the engine's `GraphCache`.

    `sizes`: numbers of sequences, ascending; they change only where no graph is captured.
    """

    def __init__(
        self,
        model: Network,
        cache: KVCache,
        max_model_len: int,
        graphs: GraphCache,
        sizes: Rows[int] = SIZES,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """`hidden`: hidden states that a draft model has (`DraftBatch`)."""
        self._model = model
        self._cache = cache
        self._hidden = hidden
        self._table_width = -(-max_model_len // cache.block_size)
        self.sizes = tuple(sizes)
        self._graphs = graphs
        self._batches: dict[int, _DecodeBatch] = {}
        self._allowed: torch.Tensor | None = None  # masks of the largest size; made when there are some
        graphs.on_void("lasting", self._forget)

    @property
    def largest(self) -> int:
        """Sequences of the largest graph."""
        return max(self.sizes)

    def ensure(self, sequences: int) -> bool:
        """Capture the graph for `sequences` sequences if it is missing; returns whether there is one."""
        size = self._size(sequences)
        return self._graphs.ensure(_key(size), partial(self._capture, size))

    def capture_next(self, sequences: int) -> bool:
        """Capture the smallest missing graph for up to `sequences` sequences; returns whether more are."""
        missing = [size for size in self.sizes if size < 2 * sequences and self._graphs.lacks(_key(size))]
        if missing:
            self.ensure(missing[0])
        return len(missing) > 1

    def start(self, rows: Rows[DecodeRow], tokens: torch.Tensor | None = None) -> Replay:
        """Run the graph for that number of `rows` with their batch; call it after `ensure`.

        `tokens`: `[rows]` int64 on the device, in place of those of the rows; below 0 as for `feed`.
        """
        size = self._size(len(rows))
        self._batches[size].fill(rows)
        if tokens is not None:
            self.feed(tokens)
        return self._replay(size, len(rows))

    def advance(self, rows: int, grown: Mapping[int, tuple[int, Rows[int]]]) -> Replay:
        """Replay the last batch one token further.

        `grown`: of tables that have become longer, by row, how many blocks they had, and which are new.
        """
        size = self._size(rows)
        if grown:
            self._batches[size].grow(grown)
        return self._replay(size, rows)

    def choose(self, bits: torch.Tensor) -> Replay | None:
        """Choose once more after a replay, among the tokens that are allowed; the next `advance` reads them.

        None where memory is short of that, which is tried once until the graphs are cleared.

        Args:
            bits: `[rows, ceil(vocab / 32)]` int32 in page-locked memory, as `GrammarState.fill` makes them.
        """
        size = self._size(len(bits))
        batch, key = self._batches[size], GraphKey("choose", (size,))
        new = self._graphs.lacks(key)

        def choose_and_capture() -> None:
            work = partial(batch.choose, self._allow(bits)[:size])
            work()
            self._graphs.capture(key, work)

        if not self._graphs.ensure(key, choose_and_capture):
            return None
        if not new:
            self._allow(bits)
            self._graphs.replay(key)
        return batch.chosen(len(bits))

    def feed(self, tokens: torch.Tensor) -> None:
        """Let the next `advance` go on from these tokens `[rows]` int64, on the device.

        Below 0: for a broken row, whose next token is dropped.
        """
        batch = self._batches[self._size(len(tokens))]
        torch.clamp(tokens, min=0, out=batch.ids[: len(tokens)])

    def _replay(self, size: int, rows: int) -> Replay:
        self._graphs.replay(_key(size))
        return self._batches[size].likeliest(rows)

    def _capture(self, size: int) -> None:
        batch = _DecodeBatch(self._model, self._cache, size, self._table_width, self._hidden)
        batch.step()  # on the stream of all other work, whose workspace it may use
        self._graphs.capture(_key(size), batch.step)
        self._batches[size] = batch

    def _allow(self, bits: torch.Tensor) -> torch.Tensor:
        """The masks at their fixed address; those of `bits` are on their way there."""
        if self._allowed is None:
            shape = self.largest, bits.shape[1]
            self._allowed = torch.empty(shape, dtype=torch.int32, device=self._model.device)
        self._allowed[: len(bits)].copy_(bits, non_blocking=True)
        return self._allowed

    def _forget(self) -> None:
        self._batches.clear()
        self._allowed = None

    def _size(self, sequences: int) -> int:
        return next(size for size in self.sizes if size >= sequences)


@cache
def _key(size: int) -> GraphKey:
    return GraphKey("decode", (size,))


class _DecodeBatch:
    """The buffers of one size's graphs, at fixed addresses. `ids`: `[size]` int64, the newest tokens."""

    def __init__(
        self, model: Network, cache: KVCache, size: int, table_width: int, hidden: torch.Tensor | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._hidden = hidden
        device = model.device
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self._deltas = torch.zeros(size, dtype=torch.int64, device=device)
        self._state_slots = torch.zeros(size, dtype=torch.int64, device=device)
        self._tables = torch.zeros(size, table_width, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(size * (ROW_FIELDS + table_width), dtype=torch.int32, device=device)
        # Two of each: one may still be on its way while the other is filled or read.
        pinned = device.type == "cuda"
        self._staging, self._results, self._chosen = (
            [torch.zeros(count, dtype=dtype, pin_memory=pinned) for _ in range(2)]
            for count, dtype in ((len(self._arrived), torch.int32), (size, torch.int64), (size, torch.int64))
        )
        self._logits = torch.empty(0)
        self._picked = torch.zeros_like(self._tokens)
        self._still = torch.zeros_like(self._lengths)  # in place of lengths that have grown already

    def fill(self, rows: Rows[DecodeRow]) -> None:
        """Copy rows to where the graph reads them."""
        size, width = len(self.ids), ROW_FIELDS + max(len(row.table) for row in rows)
        self._staging.reverse()
        staging, arrived = (flat[: size * width] for flat in (self._staging[0], self._arrived))
        lines = staging.view(size, width).numpy()
        pack_rows(lines, rows)
        arrived.copy_(staging, non_blocking=True)
        columns = arrived.view(size, width)
        self.ids.copy_(columns[:, 0])
        self._lengths.copy_(columns[:, 1])
        self._deltas.copy_(columns[:, 2])
        self._state_slots.copy_(columns[:, 3])
        self._tables[:, : width - ROW_FIELDS].copy_(columns[:, ROW_FIELDS:])

    def grow(self, grown: Mapping[int, tuple[int, Rows[int]]]) -> None:
        """Append blocks to tables; see `DecodeGraphs.advance`."""
        width, device = self._tables.shape[1], self._tables.device
        new = [
            (row * width + at, b) for row, (first, ids) in grown.items() for at, b in enumerate(ids, first)
        ]
        places, blocks = zip(*new, strict=True)
        where = upload(places, torch.int64, device)
        self._tables.view(-1).index_copy_(0, where, upload(blocks, torch.int32, device))

    def step(self) -> None:
        """Compute one token of each row: what is captured."""
        self._logits = torch.empty(0)  # those of the run before it was captured go first
        batch = single_tokens(
            self.ids,
            self._lengths,
            self._deltas,
            self._tables,
            self._cache,
            state_slots=self._state_slots,
            hidden=self._hidden,
        )
        self._logits = self._model.forward(batch, self._cache)
        choose(self._logits, self._tokens, self.ids, self._lengths)

    def choose(self, allowed: torch.Tensor) -> None:
        """Choose once more, among allowed tokens `[size, ceil(vocab / 32)]` int32: what is captured."""
        choose(self._logits, self._picked, self.ids, self._still, allowed)

    def likeliest(self, rows: int) -> Replay:
        """The tokens of `step`, on their way to the host."""
        return self._leaving(self._tokens, self._results, rows)

    def chosen(self, rows: int) -> Replay:
        """The tokens of `choose`, on their way to the host."""
        return self._leaving(self._picked, self._chosen, rows)

    def _leaving(self, tokens: torch.Tensor, places: list[torch.Tensor], rows: int) -> Replay:
        places.reverse()
        return Replay(self._logits, tokens, rows, places[0])


def choose(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    following: torch.Tensor,
    lengths: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> None:
    """The likeliest tokens, in place of `tokens` and `following` `[sequences]`; lengths above 0 grow by one.

    In `tokens` −1 stands where the highest of `logits` `[sequences, vocab]` is not finite, or any is NaN.

    Args:
        allowed: `[sequences, ceil(vocab / 32)]` int32, bits of the tokens to choose from; None: all are.
    """
    if by_kernels(logits, "highest_parts", "take_highest"):
        from snugvl.layers.kernels import decode_step  # needs triton, which only GPUs bring

        decode_step.choose(logits, tokens, following, lengths, allowed)
        return
    likeliest = likeliest_of(logits, allowed)
    tokens.copy_(likeliest)
    following.copy_(likeliest.clamp(min=0))
    lengths.add_((lengths > 0).int())


def single_tokens(
    ids: torch.Tensor,
    lengths: torch.Tensor,
    deltas: torch.Tensor,
    tables: torch.Tensor,
    cache: KVCache,
    *,
    state_slots: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> ForwardBatch:
    """The batch of one token of each sequence, made on the device, with logits of all.

    A sequence of length 0 is padding: it reads nothing, and writes nowhere or to unused places.

    Args:
        ids: `[sequences]` int64, the tokens.
        lengths: `[sequences]` int32, tokens in the cache once these are written.
        deltas: `[sequences]` int64, from a token's index in its sequence to its position.
        tables: `[sequences, blocks]` int32, KV blocks.
        state_slots: `[sequences]` int64, where recurrent and hidden states are; None: neither is touched.
        hidden: hidden states that a draft model has; see `DraftBatch`.
    """
    size, states, drafts = len(ids), cache.states, None
    positions, slots = places(lengths, deltas, tables, cache.block_size)
    recurrent = None
    if states is not None and state_slots is not None:
        recurrent = torch.where(slots >= 0, state_slots, states.scratch)
    if hidden is not None and state_slots is not None:
        rows = state_slots * RECENT + (lengths.long() - 1) % RECENT
        drafts = DraftBatch(hidden, torch.where(slots >= 0, rows, len(hidden) - 1))
    ones = (1,) * size  # the true lengths are on the device
    attention = AttentionMetadata(
        ones, ones, slots, tables, cache.block_size, lengths=lengths, state_slots=recurrent
    )
    return ForwardBatch(ids, positions, attention, logit_rows=None, drafts=drafts)


def places(
    lengths: torch.Tensor, deltas: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `[3, sequences]` and slots `[sequences]` of the newest tokens; −1 where the length is 0."""
    if by_kernels(lengths, "place_tokens"):
        from snugvl.layers.kernels import decode_step  # needs triton, which only GPUs bring

        return decode_step.places(lengths, deltas, tables, block_size)
    place = (lengths.long() - 1).clamp(min=0)
    blocks = tables.gather(1, (place // block_size)[:, None])[:, 0].long()
    slots = torch.where(lengths > 0, blocks * block_size + place % block_size, -1)
    return (place + deltas).expand(3, -1), slots

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

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from traceback import clear_frames
from typing import Any

import torch

from snugvl.engine.batch import ROW_FIELDS, DecodeRow, pack_rows, single_tokens
from snugvl.engine.graphs.capture import capture
from snugvl.engine.oom import out_of_memory, release
from snugvl.engine.sampling.sampler import Sampled
from snugvl.engine.sampling.sampler import likeliest as likeliest_of
from snugvl.layers.driver import CAPTURES, stream_on
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.upload import upload
from snugvl.models.batch import Network

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32)


class Replay:
    """A replay that may still be running; what it leaves is valid until the next one starts.

    Attributes:
        logits: `[rows, vocab]`.
        tokens: `[rows]` int64, the most likely ones; below 0 where there is none.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, copied: torch.Tensor) -> None:
        """`copied`: the tokens on their way to the host."""
        self.logits, self.tokens = logits, tokens
        self._copied = copied
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def results(self) -> list[Sampled]:
        """The token of each row, waiting for them; None where the logits are not finite, or all forbidden."""
        self._done.synchronize()
        return [Sampled(token if token >= 0 else None) for token in self._copied.tolist()]


class DecodeGraphs:
    """CUDA graphs of decode steps, one a batch size, captured on first use in one memory pool.

    Attributes:
        captures: number of graphs captured, each again after a `clear`.
        released: whether a capture was short of memory, so that torch gave unused memory back to the driver,
            the claimed workspace included. The engine claims it again, and resets this.
    """

    def __init__(
        self,
        model: Network,
        cache: KVCache,
        max_model_len: int,
        sizes: Rows[int] = SIZES,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """`hidden`: hidden states that a draft model has (`DraftBatch`)."""
        self._model = model
        self._cache = cache
        self._hidden = hidden
        self._table_width = -(-max_model_len // cache.block_size)
        self._sizes = tuple(sizes)
        self.captures = 0
        self.released = False
        self._graphs: dict[int, _DecodeGraph] = {}
        self._short: set[int] = set()  # sizes that memory was short of
        self._unchosen: set[int] = set()  # of those whose graph of choosing memory was short of
        self._pool: Any = None  # of memory, which torch shares among captures
        self._allowed: torch.Tensor | None = None  # masks of the largest size; made when there are some

    def note_release(self) -> None:
        """Note that unused memory was given back to the driver. May be called in any thread."""
        self.released = True

    def ensure(self, sequences: int) -> bool:
        """Capture the graph for so many unless there is one; whether there is one now.

        One that memory was short of is tried once more with all that torch keeps for later given back, which
        it can't do while it captures; then not before `clear`: its steps run without.
        """
        size = self._size(sequences)
        if size not in self._graphs and size not in self._short and not self._fits(sequences):
            self.released = True
            release(self._model.device)
            if not self._fits(sequences):
                self._short.add(size)
                logger.warning("no memory for the CUDA graph of %d sequences: its steps run without", size)
        return size in self._graphs

    def _fits(self, sequences: int) -> bool:
        """Whether there was memory to capture a graph for so many."""
        try:
            self._graph(sequences)
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.info("no memory for a CUDA graph: %s", error)
            clear_frames(error.__traceback__)  # they hold the step's tensors
            return False
        return True

    def capture_next(self, sequences: int) -> bool:
        """Capture the smallest graph that is missing of those for up to so many; whether others are."""
        missing = [size for size in self._sizes if size < 2 * sequences and self._lacks(size)]
        if missing:
            self.ensure(missing[0])
        return len(missing) > 1

    def _lacks(self, size: int) -> bool:
        return size not in self._graphs and size not in self._short

    def clear(self) -> None:
        """Forget all graphs, with their memory; each is captured again when it is needed."""
        if self._graphs:
            torch.cuda.synchronize(self._model.device)  # one may be running
        self._graphs.clear()
        self._short.clear()
        self._unchosen.clear()
        self._pool = self._allowed = None

    @property
    def largest(self) -> int:
        """Sequences of the largest graph."""
        return max(self._sizes)

    def start(self, rows: Rows[DecodeRow], tokens: torch.Tensor | None = None) -> Replay:
        """Give a graph its batch, and run it.

        `tokens`: `[rows]` int64 on the device, in place of those of the rows; below 0 as for `feed`.
        """
        return self._graph(len(rows)).start(rows, tokens)

    def advance(self, rows: int, grown: Mapping[int, tuple[int, Rows[int]]]) -> Replay:
        """Replay the last batch one token further.

        `grown`: of tables that have become longer, by row, how many blocks they had, and which are new.
        """
        return self._graph(rows).advance(rows, grown)

    def choose(self, bits: torch.Tensor) -> Replay | None:
        """Choose once more after a replay, among the tokens that are allowed; the next `advance` reads them.

        None where memory is short of that, which is tried once until `clear`.

        Args:
            bits: `[rows, ceil(vocab / 32)]` int32 in page-locked memory, as `GrammarState.fill` makes them.
        """
        size, graph = self._size(len(bits)), self._graph(len(bits))
        if size in self._unchosen:
            return None
        new = not graph.chooses
        try:
            if self._allowed is None:
                shape = self.largest, bits.shape[1]
                self._allowed = torch.empty(shape, dtype=torch.int32, device=self._model.device)
            self._allowed[: len(bits)].copy_(bits, non_blocking=True)
            chosen = graph.choose(self._allowed, len(bits), self._pool, self.stream())
        except Exception as error:
            if not out_of_memory(error):
                raise
            clear_frames(error.__traceback__)
            self._unchosen.add(size)
            logger.warning("no memory for the CUDA graph that chooses for %d sequences: %s", size, error)
            return None
        if new:
            self.captures += 1
            logger.info("captured the CUDA graph that chooses among allowed tokens for %d sequences", size)
        return chosen

    def feed(self, tokens: torch.Tensor) -> None:
        """Let the next `advance` go on from these tokens `[rows]` int64, on the device.

        Below 0: for a broken row, whose next token is dropped.
        """
        self._graph(len(tokens)).feed(tokens)

    def stream(self) -> torch.cuda.Stream:
        """The stream of all captures: the library gets a workspace for each stream."""
        return stream_on(self._model.device, CAPTURES)

    def _graph(self, sequences: int) -> "_DecodeGraph":
        size = self._size(sequences)
        if size not in self._graphs:
            begun = time.monotonic()
            made = _DecodeGraph(self._model, self._cache, size, self._table_width, self._hidden)
            self._pool = made.capture(self._pool, self.stream())
            self._graphs[size] = made
            self.captures += 1
            spent = time.monotonic() - begun
            logger.info("captured the CUDA graph of %d sequences in %.2f s", size, spent)
        return self._graphs[size]

    def _size(self, sequences: int) -> int:
        return next(size for size in self._sizes if size >= sequences)


class _DecodeGraph:
    """One size: what it reads and writes, at fixed addresses, and the CUDA graphs."""

    def __init__(
        self,
        model: Network,
        cache: KVCache,
        size: int,
        table_width: int,
        hidden: torch.Tensor | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._hidden = hidden
        device = model.device
        self._ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self._deltas = torch.zeros(size, dtype=torch.int64, device=device)
        self._state_slots = torch.zeros(size, dtype=torch.int64, device=device)
        self._tables = torch.zeros(size, table_width, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(size * (ROW_FIELDS + table_width), dtype=torch.int32, device=device)
        # Two of each: one may still be on its way while the other is filled or read.
        self._staging = [self._pinned(len(self._arrived), torch.int32) for _ in range(2)]
        self._results = [self._pinned(size, torch.int64) for _ in range(2)]
        self._chosen = [self._pinned(size, torch.int64) for _ in range(2)]
        self._graph: Any = None
        self._chooser: Any = None
        self._logits = torch.empty(0)
        self._picked = torch.zeros_like(self._tokens)
        self._still = torch.zeros_like(self._lengths)  # in place of lengths that have grown already

    @staticmethod
    def _pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> Any:
        """Capture the step on `stream`; the memory pool it used."""
        # On the stream of all other work, whose workspace it may use: compiles kernels and makes handles,
        # which a capture can't.
        self._step()
        self._graph, self._logits = capture(self._step, pool, stream)
        return pool or self._graph.pool()

    def start(self, rows: Rows[DecodeRow], tokens: torch.Tensor | None = None) -> Replay:
        size, width = len(self._ids), ROW_FIELDS + max(len(row.table) for row in rows)
        self._staging.reverse()
        staging, arrived = (flat[: size * width] for flat in (self._staging[0], self._arrived))
        lines = staging.view(size, width).numpy()
        pack_rows(lines, rows)
        arrived.copy_(staging, non_blocking=True)
        columns = arrived.view(size, width)
        self._ids.copy_(columns[:, 0])
        self._lengths.copy_(columns[:, 1])
        self._deltas.copy_(columns[:, 2])
        self._state_slots.copy_(columns[:, 3])
        self._tables[:, : width - ROW_FIELDS].copy_(columns[:, ROW_FIELDS:])
        if tokens is not None:
            self.feed(tokens)
        return self._replay(len(rows))

    def advance(self, rows: int, grown: Mapping[int, tuple[int, Rows[int]]]) -> Replay:
        if grown:
            width, device = self._tables.shape[1], self._tables.device
            new = [
                (row * width + at, b)
                for row, (first, ids) in grown.items()
                for at, b in enumerate(ids, first)
            ]
            places, blocks = zip(*new, strict=True)
            where = upload(places, torch.int64, device)
            self._tables.view(-1).index_copy_(0, where, upload(blocks, torch.int32, device))
        return self._replay(rows)

    @property
    def chooses(self) -> bool:
        """Whether there is the graph that chooses among allowed tokens."""
        return self._chooser is not None

    def choose(self, allowed: torch.Tensor, rows: int, pool: Any, stream: Any) -> Replay:
        masks = allowed[: len(self._ids)]
        if self._chooser is None:
            self._choose(masks)
            self._chooser, _ = capture(lambda: self._choose(masks), pool, stream)
        else:
            self._chooser.replay()
        return self._told(self._picked, self._chosen, rows)

    def feed(self, tokens: torch.Tensor) -> None:
        torch.clamp(tokens, min=0, out=self._ids[: len(tokens)])

    def _replay(self, rows: int) -> Replay:
        self._graph.replay()
        return self._told(self._tokens, self._results, rows)

    def _told(self, tokens: torch.Tensor, places: list[torch.Tensor], rows: int) -> Replay:
        places.reverse()
        places[0].copy_(tokens, non_blocking=True)
        return Replay(self._logits[:rows], tokens[:rows], places[0][:rows])

    def _choose(self, allowed: torch.Tensor) -> None:
        choose(self._logits, self._picked, self._ids, self._still, allowed)

    def _step(self) -> torch.Tensor:
        batch = single_tokens(
            self._ids,
            self._lengths,
            self._deltas,
            self._tables,
            self._cache,
            state_slots=self._state_slots,
            hidden=self._hidden,
        )
        logits = self._model.forward(batch, self._cache)
        choose(logits, self._tokens, self._ids, self._lengths)
        return logits


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
    if logits.is_cuda:
        from snugvl.layers.kernels import decode_step  # needs triton, which only GPUs bring

        decode_step.choose(logits, tokens, following, lengths, allowed)
        return
    likeliest = likeliest_of(logits, allowed)
    tokens.copy_(likeliest)
    following.copy_(likeliest.clamp(min=0))
    lengths.add_((lengths > 0).int())

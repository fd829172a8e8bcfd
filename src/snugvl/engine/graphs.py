"""CUDA graphs of a decode step, one for each of a few batch sizes.

A graph holds a whole step: positions and slots from the block tables, the network, the most likely tokens,
and the inputs of the step after it. So a batch that goes on as it is needs nothing from the host but the
replay, and the host may read the tokens of one step while the next one runs.

    ids, lengths, tables ─► positions, slots ─► network ─► logits ─► tokens ─► ids, lengths + 1
         ▲                                                                          │
         └──────────────────────────────────────────────────────────────────────────┘

A batch smaller than its graph is filled up with rows of length 0: they read nothing and write nowhere.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import Batch, VisionLanguageModel

SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a decode batch.

    Attributes:
        token: the id whose successor is wanted.
        length: tokens in the cache once this one is written.
        delta: from a token's index in the sequence to its M-RoPE position.
        table: its KV blocks.
    """

    token: int
    length: int
    delta: int
    table: Rows[int]


class _Buffers:
    """What a graph reads and writes, `[size, …]`; fixed addresses, shared by nothing else."""

    def __init__(self, size: int, table_width: int, device: torch.device) -> None:
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self.deltas = torch.zeros(size, dtype=torch.int64, device=device)
        self.tables = torch.zeros(size, table_width, dtype=torch.int32, device=device)
        self.rows = torch.arange(size, device=device)
        # One host copy for all of it: ids, lengths, deltas and tables side by side.
        self.staging = torch.zeros(size, 3 + table_width, dtype=torch.int32, pin_memory=True)
        self.arrived = torch.zeros(size, 3 + table_width, dtype=torch.int32, device=device)


class _Graph:
    def __init__(self, buffers: _Buffers, graph: torch.cuda.CUDAGraph, logits: torch.Tensor) -> None:
        self.buffers = buffers
        self.graph = graph
        self.logits = logits


class DecodeGraphs:
    """Captured on first use, in one memory pool."""

    def __init__(
        self, model: VisionLanguageModel, cache: KVCache, max_model_len: int, sizes: Rows[int] = SIZES
    ) -> None:
        self._model = model
        self._cache = cache
        self._table_width = -(-max_model_len // cache.block_size)
        self._sizes = tuple(sizes)
        self._graphs: dict[int, _Graph] = {}
        self._pool: tuple[int, int] | None = None

    @property
    def largest(self) -> int:
        """Sequences of the largest graph."""
        return max(self._sizes)

    def size_for(self, sequences: int) -> int:
        """The smallest graph that holds so many."""
        return next(size for size in self._sizes if size >= sequences)

    def capture(self, size: int) -> None:
        """Capture a size now, instead of when it is first needed."""
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)

    def start(self, rows: Rows[Row]) -> torch.Tensor:
        """Give a graph its batch, and run it. Logits `[len(rows), vocab]`, valid until the next run."""
        graph = self._graph(len(rows))
        buffers = graph.buffers
        staging = buffers.staging
        staging.zero_()
        for index, row in enumerate(rows):
            line = [row.token, row.length, row.delta, *row.table]
            staging[index, : len(line)] = torch.tensor(line, dtype=torch.int32)
        buffers.arrived.copy_(staging, non_blocking=True)
        buffers.ids.copy_(buffers.arrived[:, 0])
        buffers.lengths.copy_(buffers.arrived[:, 1])
        buffers.deltas.copy_(buffers.arrived[:, 2])
        buffers.tables.copy_(buffers.arrived[:, 3:])
        return self.again(len(rows))

    def again(self, sequences: int) -> torch.Tensor:
        """Run the same batch one token further. Its tables must hold the block of the new token."""
        graph = self._graph(sequences)
        graph.graph.replay()
        return graph.logits[:sequences]

    def tokens(self, sequences: int) -> torch.Tensor:
        """The most likely tokens of the last run, `[sequences]` int64 on the GPU; inputs of the next."""
        return self._graph(sequences).buffers.ids[:sequences]

    def _graph(self, sequences: int) -> _Graph:
        size = self.size_for(sequences)
        self.capture(size)
        return self._graphs[size]

    def _captured(self, size: int) -> _Graph:
        buffers = _Buffers(size, self._table_width, self._model.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(buffers)  # compiles kernels and makes handles, which a capture can't
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(buffers)
        self._pool = self._pool or graph.pool()
        return _Graph(buffers, graph, logits)

    def _step(self, buffers: _Buffers) -> torch.Tensor:
        size, block = len(buffers.rows), self._cache.block_size
        live = buffers.lengths > 0
        place = (buffers.lengths.long() - 1).clamp(min=0)  # of the token in its sequence
        blocks = buffers.tables[buffers.rows, place // block].long()
        slots = torch.where(live, blocks * block + place % block, -1)
        batch = Batch(
            input_ids=buffers.ids,
            positions=(place + buffers.deltas).expand(3, -1),
            attention=AttentionMetadata(
                query_lens=(1,) * size,
                context_lens=(1,) * size,  # the true ones are in `lengths`
                slot_mapping=slots,
                block_tables=buffers.tables,
                block_size=block,
                lengths=buffers.lengths,
            ),
            logit_rows=buffers.rows,
        )
        logits = self._model.forward(batch, self._cache)
        buffers.ids.copy_(logits.argmax(-1))
        buffers.lengths.add_(live.int())
        return logits

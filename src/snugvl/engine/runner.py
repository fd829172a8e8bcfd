"""Sequences in, logits out: what a step is to the network (its numbers: `packing.py`).

chunks        [ s0: tokens 16 … 31 | s1: token 40 | s2: token 7 ]
input_ids     [ 5 8 ▒ ▒ ▒ ▒ 9 …    | 17           | 3           ]     ▒ placeholder
vision_rows         2 3 4 5                                           rows of the batch
vision_embeds       rows 10 … 13 of the image's encoding              its rows 0 … 9 came a chunk earlier
"""

import torch

from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs import DecodeGraphs
from snugvl.engine.packing import numbers_of, pack, shape_of
from snugvl.engine.pipeline import Flight, decodes, depart, rows_of
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.sequence import Sequence, seat_of
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.compilations import compilations
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.upload import sent
from snugvl.models.batch import Batch, Network


class Runner:
    """Runs the network over a schedule. Not thread-safe."""

    def __init__(self, model: Network, cache: KVCache, encoder: Encoder, max_model_len: int) -> None:
        self.model = model
        self.cache = cache
        self.encoder = encoder
        self.graphs = DecodeGraphs(model, cache, max_model_len)
        self.has_graphs = model.device.type == "cuda"
        self.compilations = compilations(model.device)  # those that a step waits for

    def run(self, step: Schedule) -> torch.Tensor:
        """Logits `[n, vocab]` float32, on the model's device, of the `n` chunks that sample, in their order.

        Whatever the network raises passes through; the cache's contents are then undefined.
        """
        self._prepare(step)
        if self._has_graph(step):
            return self.graphs.start(rows_of([chunk.sequence for chunk in step.chunks])).logits
        return self.model.forward(self._batch(step.chunks), self.cache)

    def take_off(self, step: Schedule) -> Flight | None:
        """Start a step whose tokens are read later, if it is one that can run ahead of the host."""
        sequences = [chunk.sequence for chunk in step.chunks]
        if not self._has_graph(step) or any(sequence.grammar is not None for sequence in sequences):
            return None
        self._prepare(step)
        return depart(sequences, self.graphs)

    def share_state(self, sequence: Sequence, siblings: list[Sequence]) -> None:
        """Let running siblings go on from a sequence's recurrent state, which is theirs to change at once."""
        states = self.cache.states
        for sibling in siblings if states is not None else ():
            assert states is not None
            states.copy(seat_of(sequence), seat_of(sibling))

    def _prepare(self, step: Schedule) -> None:
        """Copy the blocks that the step writes to, and empty the seats of sequences that begin."""
        for copy in step.copies:
            self.cache.copy_block(copy.source, copy.target)
        if self.cache.states is not None:
            for chunk in step.chunks:
                if chunk.start == 0:
                    self.cache.states.clear(seat_of(chunk.sequence))

    def _has_graph(self, step: Schedule) -> bool:
        return (
            self.has_graphs
            and not step.alone
            and len(step.chunks) <= self.graphs.largest
            and decodes(step)
            and self.graphs.made(len(step.chunks))
        )

    def _batch(self, chunks: list[Chunk]) -> Batch:
        model, shape = self.model, shape_of(chunks)
        numbers = numbers_of(sent(pack(chunks, shape, self.cache.block_size), model.device), shape)
        embeds = [part for chunk in chunks for part in self.encoder.rows(chunk)]
        kernels = model.device.type == "cuda"
        return Batch(
            input_ids=numbers.ids,
            positions=numbers.positions,
            attention=AttentionMetadata(
                query_lens=tuple(chunk.end - chunk.start for chunk in chunks),
                context_lens=tuple(chunk.end for chunk in chunks),
                slot_mapping=numbers.slots,
                block_tables=numbers.tables,
                block_size=self.cache.block_size,
                starts=numbers.starts if kernels else None,
                lengths=numbers.lengths if kernels else None,
                seats=None if self.cache.states is None else numbers.seats,
            ),
            logit_rows=numbers.logit_rows,
            vision_rows=numbers.pictured if embeds else None,
            vision_embeds=_joined(embeds) if embeds else None,
        )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

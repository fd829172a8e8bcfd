"""Sequences in, logits out: the only place that builds tensors.

chunks        [ s0: tokens 16 … 31 | s1: token 40 | s2: token 7 ]
input_ids     [ 5 8 ▒ ▒ ▒ ▒ 9 …    | 17           | 3           ]     ▒ placeholder
vision_rows         2 3 4 5                                           rows of the batch
vision_embeds       rows 10 … 13 of the image's encoding              its rows 0 … 9 came a chunk earlier
"""

import torch

from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs import DecodeGraphs
from snugvl.engine.pipeline import Flight, decodes, depart, rows_of
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.sequence import Sequence, seat_of
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.upload import sent, upload
from snugvl.models.batch import Batch, Network


class Runner:
    """Runs the network over a schedule. Not thread-safe."""

    def __init__(self, model: Network, cache: KVCache, encoder: Encoder, max_model_len: int) -> None:
        self.model = model
        self.cache = cache
        self.encoder = encoder
        self.graphs = DecodeGraphs(model, cache, max_model_len)
        self.has_graphs = model.device.type == "cuda"

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
        ids: list[int] = []
        logit_rows: list[int] = []
        vision_rows: list[int] = []
        embeds: list[torch.Tensor] = []
        for chunk in chunks:
            prompt, offset = chunk.sequence.prompt, len(ids) - chunk.start
            vision_rows += [offset + index for index in prompt.placeholders_in(chunk.start, chunk.end)]
            embeds += self.encoder.rows(chunk)
            ids += chunk.sequence.ids(chunk.start, chunk.end)
            if chunk.samples:
                logit_rows.append(len(ids) - 1)
        return Batch(
            input_ids=self._tensor(ids),
            positions=sent(torch.cat([_positions(chunk) for chunk in chunks], dim=1), self.model.device),
            attention=self._attention(chunks),
            logit_rows=self._tensor(logit_rows),
            vision_rows=self._tensor(vision_rows) if vision_rows else None,
            vision_embeds=torch.cat(embeds) if vision_rows else None,
        )

    def _attention(self, chunks: list[Chunk]) -> AttentionMetadata:
        size = self.cache.block_size
        slots: list[int] = []
        for chunk in chunks:
            table = chunk.sequence.table
            slots += [table[i // size] * size + i % size for i in range(chunk.start, chunk.end)]
        tables = [chunk.sequence.table for chunk in chunks]
        width = max(len(table) for table in tables)
        metadata = AttentionMetadata(
            query_lens=tuple(chunk.end - chunk.start for chunk in chunks),
            context_lens=tuple(chunk.end for chunk in chunks),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor([table + [0] * (width - len(table)) for table in tables]),
            block_size=size,
            seats=self._seats(chunks),
        )
        return metadata.on_device() if self.model.device.type == "cuda" else metadata

    def _seats(self, chunks: list[Chunk]) -> torch.Tensor | None:
        if self.cache.states is None:
            return None
        return self._tensor([seat_of(chunk.sequence) for chunk in chunks])

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return upload(values, torch.int64, self.model.device)


def _positions(chunk: Chunk) -> torch.Tensor:
    """M-RoPE positions of a chunk, `[3, tokens]` int64: the prompt's own, then counting on."""
    prompt = chunk.sequence.prompt
    first = max(chunk.start, len(prompt))
    generated = torch.arange(first, max(first, chunk.end)) + prompt.delta
    return torch.cat([prompt.positions[:, chunk.start : chunk.end], generated.expand(3, -1)], dim=1)

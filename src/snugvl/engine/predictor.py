"""Drafts by the model's multi-token predictor (`models/networks.py`), on the device.

    network      │ step n          │ choose │              │ step n + 1, with drafts
    predictor                               │ d1 ─ d2 ─ d3 │
    host         … read tokens n, take them ┤ put n + 1 together, start it ┤ deliver n

It needs of each sequence the hidden state of the last token that the network has read, and the newest token,
which follows it. What it makes of them goes behind the keys and values of all tokens before, and then it goes
on from its own output. So three parts keep up with a sequence:

    a step of chunks    makes entries of all tokens whose next one is known: prompts, and drafts that were
                        right, with the prompt's pictures (`LoadableNetwork.forward`)
    a decode graph      leaves the hidden state alone: without drafts, speculation costs nothing
    here                what is missing of the last `RECENT` tokens, all at once; then the newest one

A sequence that went on for longer without drafts has none until its end. `Drafts.entries` counts the
tokens with entries. Those that a prefix cache gives were made with the block: the last one of
a block with a token that may be another one here, or, where that went on without drafts, none of what it
should be. That makes a draft wrong now and then, never an answer.

Drafts of a few sequences are a CUDA graph, where steps with prompts are (`graphs/prefill.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from snugvl.core.config import RECENT, EngineConfig
from snugvl.engine.batch import batch_of, table_width
from snugvl.engine.drafts import DeviceDrafts, Drafts, PendingDrafts
from snugvl.engine.graphs.cache import GraphCache, GraphKey
from snugvl.engine.graphs.decode import ROW_FIELDS, DecodeRow, pack_rows, single_tokens
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import BlockPool, slot_of
from snugvl.engine.sequence import Sequence as SequenceState
from snugvl.layers.device import to_device
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import Network, PredictingNetwork

MOST_DRAFTS: Final = 3  # of a sequence: each takes a pass of its own, and is right less often than the last
MOST_FETCHING: Final = 1  # where the experts of each of them cross PCI Express: more were slower on an H200


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The buffers of a graph; each size uses their beginning. `lines`: `[rows, fields + blocks]` int32;
    `drafts`: `[rows, MOST_DRAFTS]` int64."""

    lines: torch.Tensor
    drafts: torch.Tensor


class Drafter:
    """Makes drafts by the model's predictor. Not thread-safe.

    Attributes:
        hidden: `[slots · RECENT + 1, hidden]`, hidden states of the last `RECENT` tokens of each sequence:
            that of token `i` at `slot · RECENT + i mod RECENT`; the last row belongs to no sequence.
        graphs: where its graphs are; None: it goes launch by launch.
        most: drafts of a sequence in a step.
    """

    def __init__(self, model: PredictingNetwork, cache: KVCache, config: EngineConfig) -> None:
        hidden = hidden_states(model, config)
        assert hidden is not None, "a network without a predictor"
        self.hidden = hidden
        self.graphs: GraphCache | None = None
        self.most = MOST_DRAFTS if model.capturable_tokens is None else MOST_FETCHING
        self._last: PendingDrafts | None = None
        self._model, self._cache = model, cache
        self._rows = _size(config.max_num_seqs)
        self._blocks = table_width(-(-config.max_model_len // cache.block_size))

    @staticmethod
    def keeps_up(sequence: SequenceState) -> bool:
        """Whether the hidden states are there of all that the predictor has not seen of a sequence."""
        return sequence.read - drafts_of(sequence).entries <= RECENT

    def copy(self, source: int, target: int) -> None:
        """Let the hidden states of one slot be another's."""
        kept = self.hidden[:-1].view(-1, RECENT, self.hidden.shape[1])
        kept[target] = kept[source]

    def ask(self, sequences: Sequence[SequenceState], count: int, pool: BlockPool) -> None:
        """Let it draft `count` tokens after the newest of each sequence that has room for them.

        All of them run, the network has read all of their tokens but the newest, and it keeps up with them.
        """
        asked = [each for each in sequences if self._make_room(each, count, pool)]
        if not asked:
            return
        self._catch_up(asked)
        self.forget()
        self._last = drafts = PendingDrafts(self._start(asked, count))
        for row, sequence in enumerate(asked):
            drafts_of(sequence).expect(DeviceDrafts(drafts, row), sequence.length)

    def forget(self) -> None:
        """Let no drafts be read from the device any more: they are overwritten, or their memory goes."""
        if self._last is not None:
            self._last.tokens = None
        self._last = None

    def _make_room(self, sequence: SequenceState, count: int, pool: BlockPool) -> bool:
        """Whether there are blocks, the sequence's own, for all but the last draft."""
        start, end = sequence.length - 1, sequence.length - 2 + count
        if pool.missing(sequence.table, start, end) > pool.num_free:
            return False
        for copy in pool.extend(sequence.table, start, end):
            self._cache.copy_block(copy.source, copy.target)
        return True

    def _catch_up(self, sequences: Sequence[SequenceState]) -> None:
        """Make the entries that are missing of tokens before the last one that the network has read."""
        late = [each for each in sequences if drafts_of(each).entries < each.length - 2]
        if not late:
            return
        chunks = [Chunk(each, drafts_of(each).entries, each.length - 2) for each in late]
        batch = batch_of(chunks, self._cache, hidden=self.hidden)
        assert batch.drafts is not None
        assert batch.drafts.following is not None
        following = batch.drafts.following
        ids = torch.where(following >= 0, following, batch.input_ids.roll(-1))
        hidden = self.hidden.index_select(0, batch.drafts.rows)
        self._model.predict(ids, hidden, batch.positions, self._cache, batch.attention)

    def _start(self, sequences: Sequence[SequenceState], count: int) -> torch.Tensor:
        """Drafts `[sequences, count]`, valid until the next start."""
        size = _size(len(sequences))
        lines = np.zeros((size, ROW_FIELDS + self._blocks), dtype=np.int32)
        pack_rows(lines, [_newest(each) for each in sequences])
        key, graphs = GraphKey("drafts", (size, count)), self.graphs
        if graphs is not None and not graphs.admit(key):
            graphs = None
        buffers = self._buffers() if graphs is None else graphs.buffers("buffers of drafts", self._buffers)
        buffers.lines[:size].copy_(to_device(torch.from_numpy(lines), self._model.device))
        if graphs is None:
            self._draft(buffers, size, count)
        else:
            graphs.run(key, lambda: self._draft(buffers, size, count))
        return buffers.drafts[: len(sequences), :count]

    def _buffers(self) -> _Buffers:
        device = self._model.device
        lines = torch.zeros(self._rows, ROW_FIELDS + self._blocks, dtype=torch.int32, device=device)
        return _Buffers(lines, torch.zeros(self._rows, MOST_DRAFTS, dtype=torch.int64, device=device))

    def _draft(self, buffers: _Buffers, size: int, count: int) -> None:
        """The work that is captured. Rows that only fill up a size have length 0: they write nowhere."""
        lines = buffers.lines[:size]
        ids, lengths = lines[:, 0].long(), lines[:, 1].contiguous()
        deltas, tables = lines[:, 2].long(), lines[:, ROW_FIELDS:].contiguous()
        rows = lines[:, 3].long() * RECENT + (lengths.long() - 1) % RECENT
        hidden = self.hidden.index_select(0, torch.where(lengths > 0, rows, len(self.hidden) - 1))
        for number in range(count):
            batch = single_tokens(ids, lengths, deltas, tables, self._cache)
            hidden = self._model.predict(ids, hidden, batch.positions, self._cache, batch.attention)
            ids = self._model.draft(hidden)
            buffers.drafts[:size, number] = ids
            lengths = lengths + (lengths > 0).int()


def hidden_states(model: Network, config: EngineConfig) -> torch.Tensor | None:
    """Zeros for the hidden states that a predictor reads (`Drafter.hidden`); None without one."""
    text = model.config.text
    if not text.predictors:
        return None
    rows = config.max_num_seqs * RECENT + 1
    return torch.zeros(rows, text.hidden_size, dtype=model.dtype, device=model.device)


def drafts_of(sequence: SequenceState) -> Drafts:
    """The drafts of a sequence that has some."""
    assert sequence.drafts is not None, "it has no drafts"
    return sequence.drafts


def _newest(sequence: SequenceState) -> DecodeRow:
    """A sequence's newest token as the predictor is given it: it stands where the token before it does."""
    place = sequence.length - 1
    (token,) = sequence.ids(place, place + 1)
    return DecodeRow(token, place, sequence.prompt.delta, sequence.table, slot_of(sequence))


def _size(sequences: int) -> int:
    """Rows of the graph for `sequences` sequences: the next power of two."""
    return 1 << (sequences - 1).bit_length()

"""Steps with parts of prompts, decodes beside them or not, replayed from recordings (`recordings.py`).

A large GPU is done with such a step in half of the time that the host needs to start its hundreds of kernels.
A recording has a fixed size, so a step is filled up to the next one (`packing.py`):

    tokens       [ a prompt's chunk | another's | decodes | ░░░░░░ ]    up to 64, 128, … 512, 640, 768, …
    sequences    [ 0                | 1         | 2 3 4   | ░░░    ]    up to 1, 8 or all seats

Padded tokens belong to nobody, are written nowhere, and their rows are read by no other row. Kernels are
started for the largest chunk that the size could hold; most of their blocks find nothing to do.

Pictures enter by a row for every token: zeros, and a bool that says no, where there is no placeholder. Logits
come from one buffer, of as many rows as sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from snugvl.config import EngineConfig
from snugvl.engine.graphs.recordings import Recordings
from snugvl.engine.packing import Numbers, Shape, numbers_of, pack, shape_of, table_width
from snugvl.engine.scheduler import Chunk
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.upload import sent_to
from snugvl.models.batch import Batch, Network

FINE, FINE_MOST = 64, 512  # tokens: sizes are multiples of this, up to so many
TOKENS = 128  # and of this beyond: a ninth of a step in vain at most, and few enough sizes to meet again
FEW = 8  # sequences of the middle size


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What recordings of steps read, and where they leave logits. Each size uses the beginning.

    Attributes:
        flat: the numbers of a step, see `packing.py`.
        pictured: `[tokens]` bool, placeholders; None in a model without pictures.
        embeds: `[tokens, (1 + levels) · hidden]`, theirs.
        logits: `[sequences, vocab]` float32.
    """

    flat: torch.Tensor
    pictured: torch.Tensor | None
    embeds: torch.Tensor | None
    logits: torch.Tensor


class StepGraphs:
    """Not for models with recurrent states, whose kernels go by the lengths that the host knows."""

    def __init__(self, model: Network, cache: KVCache, config: EngineConfig, recordings: Recordings) -> None:
        self._model = model
        self._cache = cache
        self._recordings = recordings
        self._most = size_of(config.max_batched_tokens)
        self._seats = config.max_num_seqs
        self._blocks = table_width(-(-config.max_model_len // cache.block_size))
        self._seen = False  # whether the last step had placeholders, whose rows are still there

    def run(self, chunks: Sequence[Chunk], embeds: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Logits `[n, vocab]` of the `n` chunks that sample, valid until the next run; None: not recorded.

        `embeds`: the encoder rows of all placeholders, in their order, in pieces.
        """
        exact = shape_of(chunks)
        if exact.tokens > self._most or exact.sequences > self._seats:
            return None
        shape = self._shape(exact)
        key = ("step", shape.tokens, shape.sequences)
        if not self._recordings.due(key):
            return None
        inputs = self._recordings.held("inputs of steps", self._inputs)
        flat = inputs.flat[: shape.size]
        # Placeholders are not part of a recording: as many of them as there are, behind its own numbers.
        sent_to(flat, pack(chunks, shape, self._cache.block_size))
        numbers = numbers_of(flat, shape)
        self._see(inputs, numbers.pictured[: exact.pictured], embeds)
        self._recordings.run(key, lambda: self._step(inputs, numbers, shape))
        return inputs.logits[: exact.logits]

    def _shape(self, exact: Shape) -> Shape:
        """The next size."""
        tokens = size_of(exact.tokens)
        sizes = [size for size in (1, FEW) if size < self._seats]
        lines = next((size for size in sizes if size >= exact.sequences), self._seats)
        return replace(
            exact, tokens=tokens, sequences=lines, blocks=self._blocks, logits=lines, pictured=tokens
        )

    def _inputs(self) -> _Inputs:
        config, device = self._model.config, self._model.device
        most = Shape(self._most, self._seats, self._blocks, self._seats, self._most)
        pictured = embeds = None
        if config.vision is not None:
            width = (1 + len(config.vision.deepstack_layers)) * config.text.hidden_size
            pictured = torch.zeros(self._most, dtype=torch.bool, device=device)
            embeds = torch.zeros(self._most, width, dtype=self._model.dtype, device=device)
        self._seen = False
        return _Inputs(
            torch.zeros(most.size, dtype=torch.int64, device=device),
            pictured,
            embeds,
            torch.zeros(self._seats, config.text.vocab_size, device=device),
        )

    def _see(self, inputs: _Inputs, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Put the rows of pictures in place; those of the step before go."""
        if inputs.pictured is None or inputs.embeds is None:
            return
        if self._seen:
            inputs.pictured.zero_()
            inputs.embeds.zero_()
        self._seen = bool(parts)
        start = 0
        for part in parts:
            where = rows[start : start + len(part)]
            inputs.embeds.index_copy_(0, where, part.to(inputs.embeds.dtype))
            start += len(part)
        if parts:
            inputs.pictured.index_fill_(0, rows, True)

    def _step(self, inputs: _Inputs, numbers: Numbers[torch.Tensor], shape: Shape) -> None:
        """What is recorded."""
        tokens, sequences = shape.tokens, shape.sequences
        batch = Batch(
            input_ids=numbers.ids,
            positions=numbers.positions,
            attention=AttentionMetadata(
                query_lens=(tokens,) + (1,) * (sequences - 1),
                context_lens=(tokens,) * sequences,
                slot_mapping=numbers.slots,
                block_tables=numbers.tables,
                block_size=self._cache.block_size,
                starts=numbers.starts,
                lengths=numbers.lengths,
            ),
            logit_rows=numbers.logit_rows,
            vision_rows=None if inputs.pictured is None else inputs.pictured[:tokens],
            vision_embeds=None if inputs.embeds is None else inputs.embeds[:tokens],
        )
        inputs.logits[:sequences].copy_(self._model.forward(batch, self._cache))


def size_of(tokens: int) -> int:
    """Tokens of the recording that holds so many."""
    unit = FINE if tokens <= FINE_MOST else TOKENS
    return -(-tokens // unit) * unit

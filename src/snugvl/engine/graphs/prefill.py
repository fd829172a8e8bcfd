"""CUDA graphs (`cache.py`) of steps with parts of prompts, decodes beside them or not, and of pictures.

A large GPU is done with such a step in half of the time that the host needs to start its hundreds of kernels.
A graph has a fixed size, so a step is filled up to the next one (`batch.py`):

    tokens       [ a prompt's chunk | another's | decodes | ░░░░░░ ]    8, 16, 32, 64, 128, … 512, 640, …
    sequences    [ 0                | 1         | 2 3 4   | ░░░    ]    up to 1, 8 or all that may run

Padded tokens belong to no sequence, are written nowhere, and their rows are read by no other row. Kernels are
started for the largest chunk that the size could hold; most of their blocks find nothing to do. The smallest
sizes are for drafts and forced tokens: they have no pictures, and attend as decodes do, a token at a time.

Pictures enter by a row for every token: zeros, and a bool that says no, where there is no placeholder. Logits
come from one buffer, of as many rows as sequences; drafts (`speculation.py`) take the rows of some.

A picture of a thousand tokens is also encoded faster than the host starts the tower's kernels: each grid of
patches that comes again has a graph. Larger pictures keep the GPU busy, and must stop for others every now
and then: they go launch by launch as ever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.batch import (
    Array,
    Numbers,
    Shape,
    Unread,
    fill,
    lines_of,
    numbers_of,
    packed_batch,
    put_drafts,
    shape_of,
    table_width,
)
from snugvl.engine.graphs.cache import GraphCache, GraphKey
from snugvl.engine.request import VisionItem
from snugvl.engine.scheduler import Chunk
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import GridTHW, Network, encoded

FEWEST: Final = (8, 16, 32)  # tokens, of steps without pictures: drafts, forced tokens, short prompts
FINE, FINE_MOST = 64, 512  # tokens: sizes are multiples of this, up to so many
TOKENS = 128  # and of this beyond: a ninth of a step in vain at most, and few enough sizes to meet again
FEW = 8  # sequences of the middle size
PATCHES: Final = 4096  # of a picture, at most: a chunk of the tower (`models/vision.py`)


@dataclass(frozen=True, slots=True)
class _StepBuffers:
    """The buffers that graphs of steps read, and those for logits. Each size uses the beginning.

    Attributes:
        flat: the numbers of a step, see `batch.py`.
        pictured: `[tokens]` bool, placeholders; None in a model without pictures.
        embeds: `[tokens, (1 + levels) · hidden]`, theirs.
        logits: `[sequences, vocab]` float32.
        numbers: the parts of `flat` for each size.
    """

    flat: torch.Tensor
    pictured: torch.Tensor | None
    embeds: torch.Tensor | None
    logits: torch.Tensor
    numbers: dict[Shape, Numbers[torch.Tensor]] = field(default_factory=dict)


class StepGraphs:
    """CUDA graphs of steps with prompts. A graph has most numbers of tokens and sequences, but no lengths."""

    def __init__(
        self,
        model: Network,
        cache: KVCache,
        config: EngineConfig,
        graphs: GraphCache,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """`hidden`: hidden states that a draft model has (`DraftBatch`)."""
        self._model = model
        self._cache = cache
        self._hidden = hidden
        self._hidden_rows = 0 if hidden is None else len(hidden)
        self._graphs = graphs
        least, most = config.step_graph_tokens, model.capturable_tokens
        self._most = least or size_of(config.max_batched_tokens, pictured=True)
        # A token more than a step has would have experts of its own brought.
        self._exact = 0 if most is None else FEWEST[0]
        if most is not None:
            self._most = min(self._most, most)
        self._max_sequences = config.max_num_seqs
        self._blocks = table_width(-(-config.max_model_len // cache.block_size))
        self._seen = False  # whether the last step had placeholders, whose rows are still there
        self._staging: Staging | None = None

    def run(
        self, chunks: Sequence[Chunk], embeds: Sequence[torch.Tensor], unread: Unread | None = None
    ) -> torch.Tensor | None:
        """Logits `[n, vocab]` of the `n` chunks that sample, valid until the next run; None without a graph.

        Args:
            embeds: the encoder rows of all placeholders, in their order, in pieces.
            unread: tokens that only the device knows.
        """
        exact = shape_of(chunks, self._hidden_rows)
        if exact.tokens > self._most or max(exact.sequences, exact.logits) > self._max_sequences:
            return None
        shape = self._shape(exact)
        if shape.tokens > self._most:  # it has pictures, and there are graphs of drafts alone
            return None
        key = GraphKey("step", (shape.tokens, shape.sequences))
        if not self._graphs.admit(key):
            return None
        buffers = self._graphs.buffers("buffers of steps", self._buffers)
        if self._staging is None:
            self._staging = Staging(len(buffers.flat), self._model.device)
        # Placeholders are not part of a graph: as many of them as there are, behind its own numbers.
        flat = buffers.flat[: shape.size]
        self._staging.copy(chunks, shape, self._cache.block_size, flat)
        if shape not in buffers.numbers:
            buffers.numbers[shape] = numbers_of(flat, shape)
        numbers = buffers.numbers[shape]
        put_drafts(numbers, chunks)
        if unread is not None:
            unread.put(numbers)
        self._see(buffers, numbers.pictured[: exact.pictured], embeds)
        self._graphs.run(key, lambda: self._step(buffers, numbers, shape))
        return buffers.logits[: exact.logits]

    def _shape(self, exact: Shape) -> Shape:
        """The shape of the smallest graph that holds a step."""
        tokens = exact.tokens
        if tokens > self._exact:
            tokens = size_of(tokens, pictured=exact.pictured > 0)
        sizes = [size for size in (1, FEW) if size < self._max_sequences and not self._exact]
        wanted = max(exact.sequences, exact.logits)  # drafts have rows of logits of their own
        lines = next((size for size in sizes if size >= wanted), self._max_sequences)
        pictured = tokens if tokens >= FINE else 0
        return Shape(tokens, lines, self._blocks, lines, pictured, exact.hidden)

    def _buffers(self) -> _StepBuffers:
        config, device = self._model.config, self._model.device
        lines, hidden = self._max_sequences, self._hidden_rows
        most = Shape(self._most, lines, self._blocks, lines, self._most, hidden)
        pictured = embeds = None
        if config.vision is not None and self._most > FEWEST[-1]:  # smaller steps have none
            width = (1 + len(config.vision.deepstack_layers)) * config.text.hidden_size
            pictured = torch.zeros(self._most, dtype=torch.bool, device=device)
            embeds = torch.zeros(self._most, width, dtype=self._model.dtype, device=device)
        self._seen = False
        return _StepBuffers(
            torch.zeros(most.size, dtype=torch.int64, device=device),
            pictured,
            embeds,
            torch.zeros(self._max_sequences, config.text.vocab_size, device=device),
        )

    def _see(self, buffers: _StepBuffers, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Put the rows of pictures in place; those of the step before go."""
        if buffers.pictured is None or buffers.embeds is None:
            return
        if self._seen:
            buffers.pictured.zero_()
            buffers.embeds.zero_()
        self._seen = bool(parts)
        start = 0
        for part in parts:
            where = rows[start : start + len(part)]
            buffers.embeds.index_copy_(0, where, part.to(buffers.embeds.dtype))
            start += len(part)
        if parts:
            buffers.pictured.index_fill_(0, rows, True)

    def _step(self, buffers: _StepBuffers, numbers: Numbers[torch.Tensor], shape: Shape) -> None:
        """The work that is captured."""
        tokens, sequences = shape.tokens, shape.sequences
        vision = None
        if shape.pictured and buffers.pictured is not None and buffers.embeds is not None:
            vision = buffers.pictured[:tokens], buffers.embeds[:tokens]
        batch = packed_batch(
            numbers,
            self._cache,
            (tokens,) + (1,) * (sequences - 1),
            (tokens,) * sequences,
            apart=not shape.pictured,
            vision=vision,
            hidden=self._hidden,
        )
        buffers.logits[:sequences].copy_(self._model.forward(batch, self._cache))


class Staging:
    """Where steps of a few shapes are packed over and over, and copied from: two places, taken in turns.

    What is found once a shape (views, page-locked memory) would take longer than to fill in a small step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: number of values of the largest shape."""
        pinned = device.type == "cuda"
        self._places = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._lines: dict[tuple[int, Shape], Numbers[Array]] = {}
        self._turn = 0

    def copy(self, chunks: Sequence[Chunk], shape: Shape, block_size: int, target: torch.Tensor) -> None:
        """Pack `chunks`, and start to copy that to `target` `[shape.size]`."""
        self._turn = turn = 1 - self._turn
        copied, flat = self._copied[turn], self._places[turn][: shape.size]
        if copied is not None:
            copied.synchronize()  # of the step before the last one: done, unless that wasn't read yet
        if (turn, shape) not in self._lines:
            self._lines[turn, shape] = lines_of(flat, shape)
        flat.zero_()
        fill(self._lines[turn, shape], chunks, shape, block_size)
        target.copy_(flat, non_blocking=True)
        if copied is not None:
            copied.record()


def size_of(tokens: int, *, pictured: bool = False) -> int:
    """Size, in tokens, of the graph for a step of `tokens` tokens; `pictured`: some are a picture's."""
    if tokens <= FEWEST[-1] and not pictured:
        return next(size for size in FEWEST if size >= tokens)
    unit = FINE if tokens <= FINE_MOST else TOKENS
    return -(-tokens // unit) * unit


@dataclass(frozen=True, slots=True)
class _PictureBuffers:
    """The buffers of graphs of pictures; each size uses their beginning. `patches`: `[PATCHES, patch_dim]` in
    the network's type; `rows`: `[tokens, (1 + levels) · hidden]`."""

    patches: torch.Tensor
    rows: torch.Tensor


class PictureGraphs:
    """CUDA graphs of small pictures; not for a tower with streamed weights, which waits for its copies."""

    def __init__(self, model: Network, graphs: GraphCache) -> None:
        self._model = model
        self._graphs = graphs

    def encode(self, item: VisionItem) -> torch.Tensor | None:
        """Rows of an item, `[tokens, (1 + levels) · hidden]`; None: there is no graph for it."""
        grid, key = item.grid_thw, GraphKey("picture", item.grid_thw)
        count = math.prod(grid)
        if count > PATCHES or not self._graphs.admit(key):
            return None
        buffers = self._graphs.buffers("buffers of pictures", self._buffers)
        buffers.patches[:count].copy_(item.reader(self._model.device, self._model.dtype)(0, count))
        self._graphs.run(key, lambda: self._encode(buffers, grid))
        return buffers.rows[: self._tokens(grid)].clone()

    def _tokens(self, grid: GridTHW) -> int:
        vision = self._model.config.vision
        assert vision is not None
        return math.prod(grid) // vision.spatial_merge_size**2

    def _buffers(self) -> _PictureBuffers:
        config, kind, device = self._model.config, self._model.dtype, self._model.device
        vision = config.vision
        assert vision is not None
        width = (1 + len(vision.deepstack_layers)) * config.text.hidden_size
        return _PictureBuffers(
            torch.zeros(PATCHES, vision.patch_dim, dtype=kind, device=device),
            torch.zeros(PATCHES // vision.spatial_merge_size**2, width, dtype=kind, device=device),
        )

    def _encode(self, buffers: _PictureBuffers, grid: GridTHW) -> None:
        """The work that is captured."""
        rows = encoded(self._model.encode_in_steps(lambda start, end: buffers.patches[start:end], grid))
        buffers.rows[: len(rows)].copy_(rows)

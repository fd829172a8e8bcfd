"""Starts steps of the network: a schedule in, a step in flight out; its tokens are read later.

On a GPU decode steps run ahead of the host (`graphs/ahead.py`): the next one starts before the tokens of the
last are read.

A step with drafts (`speculation.py`) doesn't run ahead: how many of its tokens count is known when they are
read. The host delivers the tokens of the step before it meanwhile:

    GPU    │ step n          │             │ step n + 1       │
    host   │ … deliver n − 1 ┤ read n, start n + 1 │ deliver n │ read n + 1 …
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import cast

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.batch import PendingTokens, Unread, batch_of, begin_rows
from snugvl.engine.choosing import Heads, begin_choosing, scoring_of
from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs.cache import CudaCapturer, GraphCache
from snugvl.engine.graphs.decode import SIZES, DecodeGraphs, Replay, rows_of
from snugvl.engine.graphs.prefill import PictureGraphs, StepGraphs
from snugvl.engine.predictor import Drafter
from snugvl.engine.request import Sampled
from snugvl.engine.sampling.sampler import Sampler
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.sequence import Sequence, State, slot_of
from snugvl.engine.snapshots import StateCopy
from snugvl.layers.compilations import compilations
from snugvl.layers.device import CAPTURES, stream_on
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.replaced import recordable
from snugvl.models.batch import Network, PredictingNetwork, Scoring
from snugvl.models.loader import device_bytes

# Forced tokens for which a step of chunks is worth more than one of single tokens in a graph: where it is a
# graph as well, and where it is started launch by launch.
LEAST_RUN, LEAST_LONG_RUN = 3, 8


class Runner:
    """Runs the network over a schedule. Not thread-safe."""

    def __init__(self, model: Network, cache: KVCache, encoder: Encoder, config: EngineConfig) -> None:
        self.model = model
        self.cache = cache
        self.encoder = encoder
        self.drafter: Drafter | None = None
        if model.config.text.predictors:
            self.drafter = Drafter(cast(PredictingNetwork, model), cache, config)
        self._hidden = None if self.drafter is None else self.drafter.hidden
        self._recordable = model.device.type == "cuda" and recordable()
        self.has_graphs = self._recordable and model.capturable_tokens != 0
        capturer = CudaCapturer(model.device, partial(stream_on, model.device, CAPTURES))
        self.graph_cache = GraphCache(capturer, model, config.step_graph_bytes if self.has_graphs else 0)
        if self.drafter is not None:  # drafts stand in that memory
            self.graph_cache.on_void("spare", self.drafter.forget)
        self.graphs = DecodeGraphs(
            model, cache, config.max_model_len, self.graph_cache, self._sizes(), hidden=self._hidden
        )
        self.compilations = compilations(model.device)  # those that a step waits for
        self._config = config
        self._steps: StepGraphs | None = None
        if self.graph_cache.on:
            self.use_spare_graphs()

    def _sizes(self) -> tuple[int, ...]:
        most = self.model.capturable_tokens
        return tuple(size for size in SIZES if most is None or size <= max(most, 1))

    def limit_graphs(self) -> None:
        """Let graphs hold no more tokens than the network says now. None is captured, and no step runs."""
        if self.model.capturable_tokens is None:
            return
        self.has_graphs = self._recordable and self.model.capturable_tokens > 0
        self.graphs.sizes = self._sizes()
        if self._steps is not None:
            self.use_spare_graphs()

    def use_spare_graphs(self) -> None:
        """Run steps with parts of prompts, drafts and small pictures by CUDA graphs from now on."""
        if self.model.capturable_tokens is not None and not self._config.step_graph_tokens:
            return  # such steps have too many tokens, but for drafts
        graphs = self.graph_cache
        if self.drafter is not None:
            self.drafter.graphs = graphs
        self._steps = StepGraphs(self.model, self.cache, self._config, graphs, self._hidden)
        if self.model.tower_is_capturable and not self._config.step_graph_tokens:
            self.encoder.use_graphs(PictureGraphs(self.model, graphs))

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture a decode step's graph before a step needs it, between steps; whether others are left."""
        if self.cache.states is not None and not self.cache.states.slots:
            return self.has_graphs  # other programs have their memory
        return self.has_graphs and self.graphs.capture_next(self._config.max_num_seqs)

    @torch.inference_mode()
    def capture_due(self) -> None:
        """Capture graphs of what the last step ran for the second time."""
        if self._steps is not None:
            self.graph_cache.capture_due()

    def close(self) -> None:
        """Wait for what runs, and let go of network, cache and graphs. Nothing can be run afterwards."""
        try:
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            self.graph_cache.close()
        finally:
            vars(self).clear()  # some of what is here refers to this runner

    def memory(self) -> dict[str, int]:
        """Bytes held for the network, by component."""
        return {
            "weights": device_bytes(self.model) if isinstance(self.model, torch.nn.Module) else 0,
            "kv_cache": self.cache.nbytes,
            "recurrent_state": 0 if self.cache.states is None else self.cache.states.nbytes,
            "encoder_outputs": self.encoder.nbytes,
        }

    def run(self, step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        """Start a step.

        Returns logits `[n, vocab]` float32 on the model's device, of the `n` chunks that sample, in their
        order, valid until the next step starts; and the replay of a decode graph, where the step is one.
        Whatever the network raises passes through; the cache's contents are then undefined.
        """
        for copy in step.copies:
            self.cache.copy_block(copy.source, copy.target)
        for slot, snapshot in step.restores:
            assert self.cache.states is not None
            assert slot is not None, "a sequence starts in its own slot"
            self.cache.states.restore(slot, snapshot)
        if self._ensure_graph(step):
            replay = self.graphs.start(rows_of([chunk.sequence for chunk in step.chunks]))
            return replay.logits, replay
        if step.decodes:
            return self.run_chunks(step.chunks), None
        embeds = [part for chunk in step.chunks for part in self.encoder.rows(chunk)]
        scoring = scoring_of(step.chunks, self._config.max_num_seqs, self.model.device)
        return self.run_chunks(step.chunks, None, embeds, scoring, alone=step.alone), None

    def run_chunks(
        self,
        chunks: list[Chunk],
        unread: Unread | None = None,
        embeds: Rows[torch.Tensor] = (),
        scoring: Scoring | None = None,
        *,
        alone: bool = False,
    ) -> torch.Tensor:
        """Start a step that isn't one of single tokens: by a CUDA graph, or launch by launch.

        `unread` to `scoring`: see `batch_of`; `alone`: it must take little memory. Returns what `run` does.
        """
        logits = None
        if self._steps is not None and not alone and scoring is None:
            logits = self._steps.run(chunks, embeds, unread)
        if logits is not None:
            return logits
        return self.model.forward(
            batch_of(chunks, self.cache, embeds, scoring, unread, self._hidden), self.cache
        )

    @property
    def least_run(self) -> int:
        """Fewest forced tokens that are worth a step of chunks: without graphs all steps are alike."""
        return (LEAST_LONG_RUN if self._steps is None else LEAST_RUN) if self.has_graphs else 1

    @property
    def can_recompute(self) -> bool:
        """Whether a token may be computed twice: not if a recurrent state has taken it in."""
        return self.cache.states is None

    def share_state(self, sequence: Sequence, siblings: list[Sequence]) -> None:
        """Let running siblings go on from a sequence's recurrent state, which is theirs to change at once."""
        states = self.cache.states
        for sibling in siblings if states is not None else ():
            assert states is not None
            states.copy(slot_of(sequence), slot_of(sibling))
        for sibling in siblings if self.drafter is not None else ():
            assert self.drafter is not None
            self.drafter.copy(slot_of(sequence), slot_of(sibling))

    def save_states(self, copies: list[StateCopy]) -> None:
        """Copy states to snapshots as the steps leave them that were started until now."""
        for slot, snapshot in copies:
            assert self.cache.states is not None
            self.cache.states.save(self.cache.states.scratch if slot is None else slot, snapshot)

    def _ensure_graph(self, step: Schedule) -> bool:
        """Whether a step is one of a decode graph; captures that if it is missing."""
        return (
            self.has_graphs
            and len(step.chunks) <= self.graphs.largest
            and step.single_tokens
            and self.graphs.ensure(len(step.chunks))
        )


Taken = tuple[Sequence, tuple[int, ...], list[Sampled]]
"""A sequence, the drafts that its step computed, and its sampled tokens: one more than drafts."""


@dataclass(slots=True)
class InFlight:
    """A started step.

    Attributes:
        sequences: sequences that take tokens from it, in the order of its rows of logits; several may share a
            row.
        logits: `[rows, vocab]`.
        tokens: number of tokens that it computes.
        runs_ahead: whether the next step may start before this one's tokens are read: no drafts, no prompts.
        replayed: whether a decode graph computes it.
        masked: whether the next step may start and a sequence has a grammar: `choose` must begin the
            sampling.
        streams: number of sequences of the step, those that take no token yet included.
        decodes: whether it computes generated tokens alone.
        chunks: the chunk of each of `sequences`, where that isn't one token of each.
        sampler: the sampler of a step after which the next may start; None where all take the likeliest
            token, or where it isn't made yet.
        sampling: the sampling that has begun; the replay itself, where the graph finds the likeliest tokens.
        void: rows whose tokens are dropped, beside those of sequences that have finished.
    """

    sequences: list[Sequence]
    logits: torch.Tensor
    tokens: int
    runs_ahead: bool
    replayed: bool = False
    masked: bool = False
    streams: int = 0
    decodes: bool = True
    chunks: list[Chunk] = field(default_factory=list)
    sampler: Sampler | None = None
    sampling: list[PendingTokens] = field(default_factory=list)
    void: set[int] = field(default_factory=set)

    @property
    def chosen(self) -> torch.Tensor:
        """The tokens `[rows]` int64 of a step that runs ahead, once choosing has begun; below 0 for none."""
        return self.sampling[0].tokens

    def results(self) -> Iterator[Taken]:
        """Wait for the tokens; yields (sequence, drafts, sampled tokens) for each that is still wanted."""
        read = iter([each for part in self.sampling for each in part.results()])
        if not self.chunks:
            for row, (sequence, result) in enumerate(zip(self.sequences, read, strict=True)):
                if row not in self.void and sequence.state is not State.FINISHED:
                    yield sequence, (), [result]
            return
        for sequence, chunk in zip(self.sequences, self.chunks, strict=True):
            drafts, own = chunk.drafts, list(islice(read, 1 + len(chunk.drafts)))
            if sequence.state is not State.FINISHED:
                yield sequence, drafts if chunk.unseen is None else chunk.unseen.read(len(drafts)), own


def chunks_in_flight(logits: torch.Tensor, heads: Heads, schedule: Schedule) -> InFlight:
    """A step of chunks that has started, from whose logits choosing begins.

    Args:
        logits: `[n, vocab]`, `Chunk.logits` rows of each of `heads`.
        heads: the chunks that sample, each with the sequences that take a token from it.
    """
    streams, decodes = len(schedule.chunks), schedule.decodes
    step = InFlight([], logits, schedule.tokens, runs_ahead=False, streams=streams, decodes=decodes)
    plain = True  # whether each takes the likeliest tokens of rows of its own
    for chunk, takers in heads:
        for sequence in takers:
            step.sequences.append(sequence)
            step.chunks.append(chunk)
            plain = plain and sequence.plain and sequence.grammar is None
        plain = plain and len(takers) == 1
    step.sampling += begin_rows(logits) if plain else begin_choosing(logits, heads)
    return step

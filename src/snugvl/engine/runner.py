"""Starts the steps of the network: a schedule in, logits out; by a CUDA graph where there is one."""

from collections.abc import Sequence as Rows
from functools import partial
from typing import cast

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.batch import Unread, batch_of, rows_of
from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs.cache import CudaCapturer, GraphCache
from snugvl.engine.graphs.decode import DecodeGraphs, Replay
from snugvl.engine.graphs.prefill import PictureGraphs, StepGraphs
from snugvl.engine.oom import release
from snugvl.engine.predictor import Drafter
from snugvl.engine.request import CheckedPrompt
from snugvl.engine.sampling.sampler import scores_of
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.sequence import Sequence, slot_of
from snugvl.engine.snapshots import StateCopy
from snugvl.layers.compilations import compilations
from snugvl.layers.driver import CAPTURES, stream_on
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.replaced import recordable
from snugvl.layers.upload import to_device
from snugvl.models.batch import Network, PredictingNetwork, Scoring
from snugvl.models.loader import tensor_bytes

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
        self.has_graphs = model.device.type == "cuda" and recordable()
        capturer = CudaCapturer(model.device, partial(stream_on, model.device, CAPTURES))
        self.graph_cache = GraphCache(capturer, model, config.step_graph_bytes if self.has_graphs else 0)
        self.graph_cache.on_void("spare", self._forget_drafts)  # they stand in memory that is wanted
        self.graphs = DecodeGraphs(model, cache, config.max_model_len, self.graph_cache, hidden=self._hidden)
        self.compilations = compilations(model.device)  # those that a step waits for
        self._config = config
        self._steps: StepGraphs | None = None
        if self.graph_cache.on:
            self.use_spare_graphs()

    def use_spare_graphs(self) -> None:
        """Run steps with parts of prompts, drafts and small pictures by CUDA graphs from now on."""
        graphs = self.graph_cache
        if self.drafter is not None:
            self.drafter.graphs = graphs
        self._steps = StepGraphs(self.model, self.cache, self._config, graphs, self._hidden)
        if self.model.tower_is_capturable:
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
            "weights": tensor_bytes(self.model) if isinstance(self.model, torch.nn.Module) else 0,
            "kv_cache": self.cache.nbytes,
            "recurrent_state": 0 if self.cache.states is None else self.cache.states.nbytes,
            "encoder_outputs": self.encoder.nbytes,
        }

    @property
    def loads(self) -> int:
        """Kernels and CUDA graphs that went to the device until now: the driver takes memory for them."""
        return self.compilations.loaded + self.graph_cache.captures

    def drop_graphs(self) -> None:
        """Let go of the spare graphs, whose memory is wanted, and make none: it was room to spare."""
        was_on = self.graph_cache.on
        self.graph_cache.stop()
        if was_on:
            release(self.model.device)

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
        scoring = self._scoring(step.chunks)
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

    def _forget_drafts(self) -> None:
        if self.drafter is not None:
            self.drafter.forget()

    def _ensure_graph(self, step: Schedule) -> bool:
        """Whether a step is one of a decode graph; captures that if it is missing."""
        return (
            self.has_graphs
            and len(step.chunks) <= self.graphs.largest
            and step.single_tokens
            and self.graphs.ensure(len(step.chunks))
        )

    def _scoring(self, chunks: list[Chunk]) -> Scoring | None:
        """The rows of a step that score prompts' tokens; None where no log-probabilities are wanted.

        Row `i` predicts token `i + 1`; the last row of a prompt predicts what is generated.
        """
        rows: list[int] = []
        owners: list[tuple[CheckedPrompt, int, int]] = []  # whose token it predicts, and how many are asked
        first = 0
        for chunk in chunks:
            prompt, most = chunk.sequence.prompt, chunk.sequence.request.sampling.logprobs or 0
            for place in range(chunk.start, min(chunk.end, len(prompt) - 1)) if prompt.unscored else ():
                rows.append(first + place - chunk.start)
                owners.append((prompt, place, most))
            first += chunk.end - chunk.start
        if not rows:
            return None

        def look(start: int, logits: torch.Tensor) -> None:
            asked = owners[start : start + len(logits)]
            targets = [prompt.ids[place + 1] for prompt, place, _ in asked]
            results = scores_of(logits, targets, [most for _, _, most in asked])
            for (prompt, place, _), result in zip(asked, results, strict=True):
                assert prompt.scores is not None, "it was asked for"
                prompt.scores[place:] = [result]  # a prompt that is computed again says the same again

        device = self.model.device
        return Scoring(to_device(torch.tensor(rows), device), self._config.max_num_seqs, look)

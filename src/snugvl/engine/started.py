"""A step of chunks whose tokens are on their way: the host delivers those of the step before meanwhile.

    GPU    │ step n          │             │ step n + 1       │
    host   │ … deliver n − 1 ┤ read n, start n + 1 │ deliver n │ read n + 1 …

The host needs the tokens of a step with drafts (`speculation.py`) to know how many count, so the next one
can't start ahead of them (`overlap.py`); but nothing else of what the host does has to come in between.
"""

from collections.abc import Iterator
from itertools import islice

import torch

from snugvl.engine.sampling.sampler import PendingSample, Sampled, SamplerInput, begin, results_of
from snugvl.engine.schedule import Chunk
from snugvl.engine.sequence import Sequence, State
from snugvl.engine.speculation import choices_with

Taken = tuple[Sequence, tuple[int, ...], list[Sampled]]
"""Whose tokens, the drafts before them, and one token more than drafts."""


class StartedStep:
    """Choosing has begun from the logits of a step's chunks.

    Attributes:
        streams: chunks of the step.
    """

    def __init__(self, logits: torch.Tensor, heads: list[tuple[Chunk, list[Sequence]]], streams: int) -> None:
        """
        Args:
            logits: `[n, vocab]`, `Chunk.logits` rows of each of `heads`.
            heads: the chunks that sample, and who takes a token from each.
        """
        self.streams = streams
        self._takers: list[tuple[Sequence, Chunk]] = []
        choices, row = list[SamplerInput](), 0
        for chunk, takers in heads:
            for sequence in takers:
                self._takers.append((sequence, chunk))
                choices += choices_with(row, sequence, chunk.drafts)
            row += chunk.logits
        self._begun: list[PendingSample] = begin(logits, choices)

    def results(self) -> Iterator[Taken]:
        """What each sequence may take that has not ended until its turn, waiting for it."""
        results = iter(results_of(self._begun))
        for sequence, chunk in self._takers:
            drafts = chunk.drafts
            own = list(islice(results, 1 + len(drafts)))
            if sequence.state is not State.FINISHED:
                yield sequence, drafts if chunk.unseen is None else chunk.unseen.read(len(drafts)), own

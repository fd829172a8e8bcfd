"""What moves scores by what was said before: bias, then repetition, frequency and presence penalties.

How often each token was generated is kept on the device, a row of counts for each choice that asks. So the
next step's penalties know a token that the host has not read yet.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from snugvl.core.sampling import SamplingParams
from snugvl.layers.upload import upload

_HIGHEST = 1e30  # of a score in float32; divided by the lowest temperature it is still finite


class Speaker(Protocol):
    """Of a choice, what penalties look at: `sampler.Choice`."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt(self) -> Collection[int]: ...
    @property
    def counts(self) -> Mapping[int, int] | None: ...


def penalizes(params: SamplingParams) -> bool:
    """Whether what was said before changes the scores."""
    return bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)


class Penalties:
    """Of a batch of choices, row by row."""

    def __init__(self, choices: Sequence[Speaker], vocab: int, device: torch.device) -> None:
        self._bias: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        biases = [(i, t, b) for i, choice in enumerate(choices) for t, b in choice.params.logit_bias.items()]
        if biases:
            rows, columns, values = zip(*biases, strict=True)
            where = (upload(rows, torch.int64, device), upload(columns, torch.int64, device))
            self._bias = where, upload(values, torch.float32, device)
        self._asking = [index for index, choice in enumerate(choices) if penalizes(choice.params)]
        if not self._asking:
            return
        own = [choices[index] for index in self._asking]
        self._rows = upload(self._asking, torch.int64, device)
        self._counts = torch.zeros(len(own), vocab, dtype=torch.int32, device=device)
        counted = ((row, t, n) for row, choice in enumerate(own) for t, n in (choice.counts or {}).items())
        _put(self._counts, counted)
        self._prompt = torch.zeros(len(own), vocab, dtype=torch.bool, device=device)
        # Only the repetition penalty looks at the prompt, which is long.
        repeated = [choice.prompt if choice.params.repetition_penalty != 1.0 else () for choice in own]
        _put(self._prompt, ((row, t, 1) for row, prompt in enumerate(repeated) for t in prompt))
        params = [choice.params for choice in own]
        self._repetition = _column([p.repetition_penalty for p in params], torch.float32, device)
        self._frequency = _column([p.frequency_penalty for p in params], torch.float64, device)
        self._presence = _column([p.presence_penalty for p in params], torch.float64, device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` `[n, vocab]` float32 after all of it; the same tensor when nobody asks for any."""
        if self._bias is None and not self._asking:
            return logits
        scores = logits.clone()
        if self._bias is not None:
            where, values = self._bias
            scores[where] += values
        if self._asking:
            scores.index_copy_(0, self._rows, self._penalized(scores.index_select(0, self._rows)))
        return scores

    def _penalized(self, scores: torch.Tensor) -> torch.Tensor:
        said = self._counts > 0
        turned = torch.where(scores > 0, scores / self._repetition, scores * self._repetition)
        # Clamped, as the smallest penalties would overflow, and inf has no probability.
        scores = torch.where(said | self._prompt, turned.clamp_(max=_HIGHEST), scores)
        # In float64 as Python would: rounded once, when it meets the score.
        penalty = self._counts * self._frequency
        penalty += said * self._presence
        return scores.sub_(penalty.to(scores.dtype))

    def note(self, tokens: torch.Tensor) -> None:
        """Count a token of each row, `[n]` int64 on the device; below 0 where there is none."""
        if self._asking:
            own = tokens.index_select(0, self._rows)[:, None]
            self._counts.scatter_add_(1, own.clamp(min=0), (own >= 0).int())


def _put(table: torch.Tensor, entries: Iterable[tuple[int, int, int]]) -> None:
    """Write values at (row, column); no place occurs twice."""
    found = list(entries)
    if found:
        rows, columns, values = (upload(part, torch.int64, table.device) for part in zip(*found, strict=True))
        table[rows, columns] = values.to(table.dtype)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return upload(values, dtype, device)[:, None]

"""Changes of scores by earlier tokens: bias, penalties, then runs of tokens that may not come again.

How often each token was generated is kept on the device, a row of counts for each choice that asks, and all
tokens in order where runs are looked for. So the next step's penalties know a token that the host has not
read yet.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from snugvl.core.sampling import SamplingParams
from snugvl.layers.device import upload

_HIGHEST = 1e30  # of a score in float32; divided by the lowest temperature it is still finite


class Speaker(Protocol):
    """The part of a `sampler.SamplerInput` that penalties look at."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt(self) -> Collection[int]: ...
    @property
    def counts(self) -> Mapping[int, int] | None: ...
    @property
    def said(self) -> Sequence[int]: ...


def penalizes(params: SamplingParams) -> bool:
    """Whether what was said before changes the scores."""
    counted = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(counted or params.no_repeat_ngram_size)


class Penalties:
    """Penalties and biases of a batch of choices, row by row."""

    def __init__(self, choices: Sequence[Speaker], vocab: int, device: torch.device) -> None:
        self._bias: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        biases = [(i, t, b) for i, choice in enumerate(choices) for t, b in choice.params.logit_bias.items()]
        if biases:
            rows, columns, values = zip(*biases, strict=True)
            where = (upload(rows, torch.int64, device), upload(columns, torch.int64, device))
            self._bias = where, upload(values, torch.float32, device)
        self._runs = [
            _Runs(index, choice, device)
            for index, choice in enumerate(choices)
            if choice.params.no_repeat_ngram_size
        ]
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
        """`logits` `[n, vocab]` float32 after bias and penalties; the same tensor where there are none."""
        if self._bias is None and not self._asking:
            return logits
        scores = logits.clone()
        if self._bias is not None:
            where, values = self._bias
            scores[where] += values
        if self._asking:
            scores.index_copy_(0, self._rows, self._penalized(scores.index_select(0, self._rows)))
        for runs in self._runs:
            runs.forbid(scores)
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
        for runs in self._runs:
            runs.note(tokens)


class _Runs:
    """Tokens of one choice, none of whose runs of `no_repeat_ngram_size` may come twice.

    What would end one is forbidden by a score lower than any other, yet finite: a grammar may leave nothing
    else.
    """

    def __init__(self, row: int, choice: Speaker, device: torch.device) -> None:
        self._row, self._length = row, choice.params.no_repeat_ngram_size
        window = choice.params.no_repeat_window
        # So long a beginning decides, whichever the window is.
        self._most = max(window, self._length - 1) if window else None
        self._said = upload(
            choice.said if self._most is None else _last(choice.said, self._most), torch.int64, device
        )

    def forbid(self, scores: torch.Tensor) -> None:
        """Lower what would end a run that was there, in `scores` `[n, vocab]`."""
        if len(self._said) < self._length:
            return
        runs = self._said.unfold(0, self._length, 1)  # [tokens - length + 1, length]
        begun = self._said[len(self._said) - self._length + 1 :]
        ends, vocab = runs[:, -1], scores.shape[-1]
        again = (runs[:, :-1] == begun).all(-1) & (ends >= 0) & (ends < vocab)
        lowest = torch.where(again, -_HIGHEST, torch.inf).to(scores.dtype)
        scores[self._row].scatter_reduce_(0, ends.clamp(0, vocab - 1), lowest, "amin")

    def note(self, tokens: torch.Tensor) -> None:
        """One token more, of the row's in `tokens` `[n]`."""
        said = torch.cat([self._said, tokens[self._row : self._row + 1]])
        self._said = said if self._most is None else said[-self._most :] if self._most else said[:0]


def _last(said: Sequence[int], most: int) -> Sequence[int]:
    return said[max(0, len(said) - most) :]


def _put(table: torch.Tensor, entries: Iterable[tuple[int, int, int]]) -> None:
    """Write values at (row, column); no place occurs twice."""
    found = list(entries)
    if found:
        rows, columns, values = (upload(part, torch.int64, table.device) for part in zip(*found, strict=True))
        table[rows, columns] = values.to(table.dtype)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return upload(values, dtype, device)[:, None]

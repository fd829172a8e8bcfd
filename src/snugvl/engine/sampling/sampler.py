"""Logits to tokens, vectorised over the batch, each row as if it were alone.

    logits ─ logit_bias ─ repetition, frequency, presence ─ grammar ─┬─ greedy: the highest
             (penalties.py)                                          │  (of equals the lowest id)
                                                                     └─ temperature ─ filters ─ draw
                                                                                    (filters.py)

A draw inverts the cumulative distribution, in the order of the ids, at one number the caller brings. The
filters only zero probabilities, so the order, and with it the token, depends neither on who else is in
the batch nor on which filters they use. Log-probabilities are those of the network itself: before bias,
penalties, grammar and temperature.

On a GPU nothing here waits for it: tokens stay there for the next step, and a copy of all results is on its
way to the host (`PendingTokens`). Only masks are waited for, which are made on the host.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from snugvl.core.sampling import SamplingParams
from snugvl.engine.batch import ROWS, PendingTokens, begin_likeliest
from snugvl.engine.request import Sampled
from snugvl.engine.sampling.filters import Filters
from snugvl.engine.sampling.masks import Foreseen, Mask, allowed_bits, fill_allowed
from snugvl.engine.sampling.penalties import Penalties, penalizes
from snugvl.layers.device import upload

_COLDEST = 1e-6  # a lower temperature would underflow in float32; this one is greedy but for exact ties


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The sampler's input of one choice.

    Attributes:
        row: its row of the logits; several choices may share one.
        prompt: distinct ids of the prompt.
        counts: how often each id was generated.
        uniform: from [0, 1), what decides the draw; unused when greedy.
        grammar: what says which tokens are allowed; all are without one.
        said: the tokens of prompt and answer in order, where no run of them may come again.
        plain: whether it is known to take the likeliest of the tokens that its grammar allows, and no more.
    """

    row: int
    params: SamplingParams
    prompt: Collection[int] = ()
    counts: Mapping[int, int] | None = None
    uniform: float = 0.0
    grammar: Mask | Foreseen | None = None
    said: Sequence[int] = ()
    plain: bool = False


def plain(params: SamplingParams) -> bool:
    """Whether a choice takes the likeliest of the tokens that its grammar allows, and wants no more."""
    return params.greedy and params.logprobs is None and not params.logit_bias and not penalizes(params)


def random_stream(seed: int | None, choice: int) -> Random:
    """The random numbers of one choice.

    Python's generator rather than torch's: a text seed goes through SHA-512, so all 64 bits and the choice
    count (torch's CPU generator keeps 32 of them), and one number costs no tensor.
    """
    return Random(None if seed is None else f"{seed}/{choice}")


class PendingSample(PendingTokens):
    """Sampled tokens whose log-probabilities may still be under way to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        own: torch.Tensor,
        top: tuple[torch.Tensor, torch.Tensor],
        asked: Mapping[int, int],
    ) -> None:
        """
        Args:
            tokens: `[n]` int64, below 0 where logits or grammar are broken.
            own: `[asked]`, the tokens' own log-probabilities in the rows that ask.
            top: `[asked, most]`, the highest log-probabilities and their ids.
            asked: for each of these rows how many it wants.
        """
        # One copy for all; ids are exact in float64.
        parts = [tokens, own, *(part.flatten() for part in top)]
        super().__init__(tokens, torch.cat([part.double() for part in parts]))
        self._asked = asked

    def results(self) -> list[Sampled]:
        count, rows = len(self.tokens), list(self._asked)
        packed = self._copy.read().tolist()
        own = dict(zip(rows, packed[count : count + len(rows)], strict=True))
        values, ids = _halves(packed[count + len(rows) :], len(rows))
        results = []
        for index, token in enumerate(map(int, packed[:count])):
            if token < 0:
                results.append(Sampled(None))
            elif index in own:
                place = rows.index(index)
                results.append(
                    Sampled(token, own[index], _ranked(ids[place], values[place], self._asked[index]))
                )
            else:
                results.append(Sampled(token))
        return results


def _halves(packed: list[float], rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """Two tables of `rows` rows that follow each other."""
    if not rows:
        return [], []
    width = len(packed) // (2 * rows)
    lines = [packed[i * width : (i + 1) * width] for i in range(2 * rows)]
    return lines[:rows], lines[rows:]


def _ranked(ids: list[float], values: list[float], most: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens, most likely first, lowest id first."""
    pairs = ((int(token), value) for token, value in zip(ids, values, strict=True))
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:most])


class Sampler:
    """How each row of a batch chooses, on the batch's device; made once, used for as many steps as it lasts.

    The choices' numbers and grammars are those of the first step; later ones bring their own numbers.
    """

    def __init__(self, choices: Sequence[SamplerInput], vocab: int, device: torch.device) -> None:
        self._choices, self._device = choices, device
        self._penalties = Penalties(choices, vocab, device)
        self._drawn = [index for index, choice in enumerate(choices) if not choice.params.greedy]
        drawn = [choices[index].params for index in self._drawn]
        self._asked = {i: c.params.logprobs for i, c in enumerate(choices) if c.params.logprobs is not None}
        self._most = min(max(self._asked.values(), default=0), vocab)
        if drawn:
            self._drawn_rows = upload(self._drawn, torch.int64, device)
            temperatures = [max(params.temperature, _COLDEST) for params in drawn]
            self._temperature = upload(temperatures, torch.float32, device)[:, None]
            self._filters = Filters(drawn, device)
        if self._asked:
            self._asked_rows = upload(list(self._asked), torch.int64, device)

    def begin(self, logits: torch.Tensor, uniforms: Sequence[float]) -> PendingTokens:
        """Start choosing from `logits` `[n, vocab]` float32, a row for each choice, which stay as they are.
        `uniforms`: a number from [0, 1) for each row; unused where it is greedy."""
        total = logits.logsumexp(-1)  # [n]; not finite if a logit is NaN or inf, or all are -inf
        scores = constrained(self._penalties.apply(logits), self._choices)
        tokens = scores.argmax(-1)  # the first of equals
        if self._drawn:
            tokens.index_copy_(0, self._drawn_rows, self._draw(scores, uniforms))
        # -inf is only chosen where nothing else is left: grammar and network exclude everything together.
        healthy = total.isfinite() & (scores.gather(-1, tokens[:, None])[:, 0] > -torch.inf)
        chosen = torch.where(healthy, tokens, -1)
        if not self._asked:
            return PendingTokens(chosen)
        return PendingSample(chosen, *self._logprobs(logits, total, tokens), self._asked)

    def note(self, tokens: torch.Tensor) -> None:
        """Count tokens that were chosen, `[n]` on the device, before the next step."""
        self._penalties.note(tokens)

    def _draw(self, scores: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
        """Ids `[drawn]`: the rows of `scores` `[n, vocab]` that draw, each at its own number."""
        if len(self._drawn) < len(self._choices):
            scores = scores.index_select(0, self._drawn_rows)
        scores = scores / self._temperature
        keep = self._filters.keep(scores)
        if keep is not None:
            scores = scores.masked_fill_(~keep, -torch.inf)
        ladder = scores.softmax(-1).double().cumsum(-1)  # [n, vocab]; a token of probability 0 adds no step
        # In float64 a number below 1 (1 - 2⁻⁵³ at most) times the sum stays below the sum: a step is found.
        height = upload([[uniforms[index]] for index in self._drawn], torch.float64, self._device)
        found = torch.searchsorted(ladder, height * ladder[:, -1:], right=True)[:, 0]
        return found.clamp(max=scores.shape[-1] - 1)  # beyond only where the ladder is NaN; `begin` sees it

    def _logprobs(
        self, logits: torch.Tensor, total: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities of the rows that ask: each token's own, and the highest ones with their ids."""
        rows = self._asked_rows
        table = logits.index_select(0, rows) - total.index_select(0, rows)[:, None]  # [asked, vocab]
        values, ids = table.topk(self._most, dim=-1)
        own = table.gather(-1, tokens.index_select(0, rows)[:, None])[:, 0]
        return own, (values, ids)


def sample(logits: torch.Tensor, choices: Sequence[SamplerInput]) -> list[Sampled]:
    """Choose a token for each choice from `logits` `[rows, vocab]`, which stay as they are."""
    return [result for sampling in begin(logits, choices) for result in sampling.results()]


def begin(logits: torch.Tensor, choices: Sequence[SamplerInput]) -> list[PendingTokens]:
    """Start choosing a token for each choice from `logits` `[rows, vocab]`, which stay as they are."""
    return [_begin(logits, choices[start : start + ROWS]) for start in range(0, len(choices), ROWS)]


def _begin(logits: torch.Tensor, choices: Sequence[SamplerInput]) -> PendingTokens:
    rows = [choice.row for choice in choices]
    if rows != list(range(len(logits))):
        logits = logits.index_select(0, upload(rows, torch.int64, logits.device))
    if all(choice.plain for choice in choices):
        masks = [choice.grammar for choice in choices]
        bits = allowed_bits(masks, logits.shape[1], pinned=logits.is_cuda) if any(masks) else None
        return begin_likeliest(logits.float(), bits)
    own = Sampler(choices, logits.shape[1], logits.device)
    return own.begin(logits.float(), [choice.uniform for choice in choices])


def scores_of(logits: torch.Tensor, targets: Sequence[int], most: Sequence[int]) -> list[Sampled]:
    """Log-probabilities of a prompt's tokens by the network's logits.

    Args:
        logits: `[n, vocab]` float32, of the places before them.
        targets: the tokens.
        most: how many of the likeliest are wanted beside each.
    """
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, upload(list(targets), torch.int64, logits.device)[:, None]) - total
    values, ids = logits.topk(max(most), dim=-1)
    rows = zip(targets, own[:, 0].tolist(), ids.tolist(), (values - total).tolist(), most, strict=True)
    return [Sampled(token, value, _ranked(others, known, k)) for token, value, others, known, k in rows]


def constrained(scores: torch.Tensor, choices: Sequence[SamplerInput]) -> torch.Tensor:
    """`scores` `[n, vocab]` with -inf where a grammar forbids the token: everywhere, if it broke.

    The same tensor where no row has a grammar. It is the last change of scores, so that no bias lets a
    forbidden token win.
    """
    masks = [choice.grammar for choice in choices]
    if not any(masks):
        return scores
    return scores.masked_fill(~fill_allowed(masks, scores.shape[-1], scores.device), -torch.inf)

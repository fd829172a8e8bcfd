"""Logits to tokens, vectorised over the batch, each row as if it were alone.

    logits ─ logit_bias ─ repetition, frequency, presence ─ grammar ─┬─ greedy: the highest
                                                                     │  (of equals the lowest id)
                                                                     └─ temperature ─ filters ─ draw

The filters are top_k, top_p and min_p, in this order.

A draw inverts the cumulative distribution, in the order of the ids, at one number the caller brings. The
filters only zero probabilities, so the order, and with it the token, depends neither on who else is in
the batch nor on which filters they use. Log-probabilities are those of the network itself: before bias,
penalties, grammar and temperature.

Sources: Fan et al. 2018 (top-k, https://arxiv.org/abs/1805.04833), Holtzman et al. 2019 (top-p,
https://arxiv.org/abs/1904.09751), Nguyen et al. 2024 (min-p, https://arxiv.org/abs/2407.01082).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from snugvl.engine.grammar import GrammarState, fill_allowed
from snugvl.sampling import SamplingParams

_ROWS = 32  # sampled at a time: bounds the workspace for n = 128 choices, 128 × 150,000 × 40 bytes otherwise
_FEW = 256  # tokens that decide most filters: beyond top_k of nearly everyone, and top_p of most answers
_HIGHEST = 1e30  # of a score in float32; divided by the lowest temperature it is still finite
_COLDEST = 1e-6  # a lower temperature would underflow in float32; this one is greedy but for exact ties


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice brings to the sampler.

    Attributes:
        row: its row of the logits; several choices may share one.
        prompt: distinct ids of the prompt.
        counts: how often each id was generated.
        uniform: from [0, 1), what decides the draw; unused when greedy.
        grammar: what says which tokens are allowed; all are without one.
    """

    row: int
    params: SamplingParams
    prompt: Collection[int] = ()
    counts: Mapping[int, int] | None = None
    uniform: float = 0.0
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token and, if asked for, log-probabilities. `token_id` None: logits or grammar are broken."""

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Sampled]:
    """Choose a token for each choice from `logits` `[rows, vocab]`, which stay as they are."""
    results: list[Sampled] = []
    for start in range(0, len(choices), _ROWS):
        part = choices[start : start + _ROWS]
        results += _sample(logits[[choice.row for choice in part]].float(), part)
    return results


def _sample(raw: torch.Tensor, choices: Sequence[Choice]) -> list[Sampled]:
    total = raw.logsumexp(-1)  # [n]; not finite if a logit is NaN or inf, or all are -inf
    scores, broken = constrained(penalized(raw, choices), choices)
    tokens = scores.argmax(-1)  # the first of equals
    drawn = [index for index, choice in enumerate(choices) if not choice.params.greedy]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [choices[index] for index in drawn])
    own, top = _logprobs(raw, total, tokens, choices)
    # -inf is only chosen where nothing else is left: grammar and network exclude everything together.
    healthy = total.isfinite() & (scores.gather(-1, tokens[:, None])[:, 0] > -torch.inf)
    if broken:
        healthy[broken] = False
    return [
        Sampled(token, lp, ranked) if good else Sampled(None)
        for token, good, lp, ranked in zip(tokens.tolist(), healthy.tolist(), own, top, strict=True)
    ]


def constrained(scores: torch.Tensor, choices: Sequence[Choice]) -> tuple[torch.Tensor, list[int]]:
    """`scores` `[n, vocab]` with -inf where a grammar forbids the token, and the rows whose grammar broke.

    The same tensor when nobody has a grammar. Last of all that moves scores, so that no bias lets a
    forbidden token win.
    """
    states = {i: choice.grammar for i, choice in enumerate(choices) if choice.grammar is not None}
    if not states:
        return scores, []
    allowed = fill_allowed(list(states.values()), scores.shape[-1], scores.device)
    forbidden = torch.zeros_like(scores, dtype=torch.bool)
    forbidden[list(states)] = ~allowed
    broken = [i for i, state in states.items() if state.error is not None]
    return scores.masked_fill(forbidden, -torch.inf), broken


def penalized(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """`logits` `[n, vocab]` after bias and penalties; the same tensor when nobody asks for any."""
    biases = [(i, t, b) for i, choice in enumerate(choices) for t, b in choice.params.logit_bias.items()]
    repeated = [
        (i, t, choice.params.repetition_penalty)
        for i, choice in enumerate(choices)
        if choice.params.repetition_penalty != 1.0
        for t in {*choice.prompt, *(choice.counts or ())}
    ]
    counted = [
        (i, t, choice.params.frequency_penalty * count + choice.params.presence_penalty)
        for i, choice in enumerate(choices)
        if choice.params.frequency_penalty or choice.params.presence_penalty
        for t, count in (choice.counts or {}).items()
    ]
    if not (biases or repeated or counted):
        return logits
    scores = logits.clone()
    if biases:
        where, bias = _entries(biases, scores)
        scores[where] += bias
    if repeated:
        where, penalty = _entries(repeated, scores)
        values = scores[where]
        # Clamped, as the smallest penalties would overflow, and inf has no probability.
        scores[where] = torch.where(values > 0, values / penalty, values * penalty).clamp(max=_HIGHEST)
    if counted:
        where, penalty = _entries(counted, scores)
        scores[where] -= penalty
    return scores


_Where = tuple[torch.Tensor, torch.Tensor]


def _entries(entries: list[tuple[int, int, float]], scores: torch.Tensor) -> tuple[_Where, torch.Tensor]:
    """Rows, columns and values of a sparse change; no place occurs twice."""
    rows, columns, values = zip(*entries, strict=True)
    device = scores.device
    where = (torch.tensor(rows, device=device), torch.tensor(columns, device=device))
    return where, torch.tensor(values, dtype=scores.dtype, device=device)


def _draw(scores: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Draw from `scores` `[n, vocab]` at each choice's own number. Token ids `[n]`."""
    temperature = _column([max(choice.params.temperature, _COLDEST) for choice in choices], scores)
    scores = scores / temperature
    keep = support(scores, [choice.params for choice in choices])
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    ladder = scores.softmax(-1).double().cumsum(-1)  # [n, vocab]; a token of probability 0 adds no step
    # In float64 a number below 1 (1 - 2⁻⁵³ at most) times the sum stays below the sum, so a step is found.
    height = _column([choice.uniform for choice in choices], ladder) * ladder[:, -1:]
    found = torch.searchsorted(ladder, height, right=True)[:, 0]
    return found.clamp(max=scores.shape[-1] - 1)  # beyond only where the ladder is NaN; reported by `_sample`


def support(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Which tokens top_k, top_p and min_p leave, `[n, vocab]` bool, or None when nobody filters.

    `scores` `[n, vocab]` are logits after temperature. Among equals the lowest ids stay, so that top_k
    leaves exactly k. top_p looks at what top_k left, and keeps the token that crosses the threshold.

    Nearly always the few best tokens decide. A row where they don't is sorted whole, which takes 30 times
    as long for a vocabulary of 150,000; either way the row's own scores and parameters decide alone.
    """
    asking = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if not asking:
        return None
    rows, own = scores[asking], [params[i] for i in asking]
    if scores.shape[-1] > _FEW:
        kept, sure = _support_of_few(rows, own)
        rest = [j for j, decided in enumerate(sure.tolist()) if not decided]
        if rest:
            kept[rest] = _support_of_all(rows[rest], [own[j] for j in rest])
    else:
        kept = _support_of_all(rows, own)
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[asking] = kept
    return keep


def _support_of_all(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`[n, vocab]`: what the filters leave, by sorting everything."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    among = _among_top_k(ranked, params)
    keep = among & _likely(ranked.masked_fill(~among, -torch.inf).softmax(-1), params)
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _support_of_few(
    scores: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by looking at the best `_FEW` tokens, and `[n]`: whether these decide."""
    best, ids = scores.topk(_FEW, dim=-1)
    worst = best[:, -1:]
    # Equals of the worst of the few may have lower ids; equals of -inf have no probability anyway.
    tied = ((scores == worst).sum(-1) > (best == worst).sum(-1)) & (worst[:, 0] > -torch.inf)
    ids = ids.sort(dim=-1).values
    ranked, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    among = _among_top_k(ranked, params)
    ranked = ranked.masked_fill(~among, -torch.inf)
    limited = torch.tensor([0 < p.top_k <= _FEW for p in params], device=scores.device)
    total = torch.where(limited, ranked.logsumexp(-1), scores.logsumexp(-1))
    keep = among & _likely((ranked - total[:, None]).exp(), params)
    # Of more than the few by top_k nothing is known: top_p and min_p would look at these only.
    beyond = torch.tensor([p.top_k > _FEW for p in params], device=scores.device)
    sure = (limited | ~keep[:, -1]) & ~tied & ~beyond
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids.gather(-1, order), keep), sure


def _among_top_k(ranked: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    count = ranked.shape[-1]
    ranks = torch.arange(count, device=ranked.device)
    return ranks < _column([min(p.top_k, count) or count for p in params], ranks)


def _likely(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What top_p and min_p leave of `probabilities`, which fall from left to right."""
    before = probabilities.double().cumsum(-1) - probabilities
    # 2 for off: rounding may take the sum to 1 before the last token.
    keep = before < _column([p.top_p if p.top_p < 1.0 else 2.0 for p in params], before)
    return keep & (probabilities >= _column([p.min_p for p in params], probabilities) * probabilities[:, :1])


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _logprobs(
    raw: torch.Tensor, total: torch.Tensor, tokens: torch.Tensor, choices: Sequence[Choice]
) -> tuple[list[float | None], list[tuple[tuple[int, float], ...]]]:
    """Each token's own log-probability and the most likely ones, most likely first, lowest id first."""
    own: list[float | None] = [None] * len(choices)
    top: list[tuple[tuple[int, float], ...]] = [()] * len(choices)
    asked = [index for index, choice in enumerate(choices) if choice.params.logprobs is not None]
    if not asked:
        return own, top
    table = raw[asked] - total[asked, None]  # [asked, vocab]
    most = min(max(choices[index].params.logprobs or 0 for index in asked), raw.shape[-1])
    values, ids = (part.tolist() for part in table.topk(most, dim=-1))
    chosen = table.gather(-1, tokens[asked, None])[:, 0].tolist()
    for row, index in enumerate(asked):
        own[index] = chosen[row]
        ranked = sorted(zip(ids[row], values[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
        top[index] = tuple(ranked[: choices[index].params.logprobs or 0])
    return own, top

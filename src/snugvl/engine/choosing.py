"""How the sequences of a step choose their next tokens, where that isn't just the likeliest ones."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from snugvl.engine.batch import PendingTokens
from snugvl.engine.request import CheckedPrompt
from snugvl.engine.sampling.masks import Foreseen, Mask
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.sampling.sampler import SamplerInput, begin, scores_of
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import Sequence, State
from snugvl.layers.device import to_device
from snugvl.models.batch import Scoring

Heads = list[tuple[Chunk, list[Sequence]]]
"""Chunks whose last logits choose, and which sequences take a token from each."""


def begin_choosing(logits: torch.Tensor, heads: Heads) -> list[PendingTokens]:
    """Start choosing a token of each sequence of `heads`, and of each of its drafts. `logits`: `[n, vocab]`,
    `Chunk.logits` rows of each of `heads`."""
    choices, row = list[SamplerInput](), 0
    for chunk, takers in heads:
        for sequence in takers:
            choices += choices_with(row, sequence, chunk.drafts)
        row += chunk.logits
    return begin(logits, choices)


def choices_with(row: int, sequence: Sequence, drafts: tuple[int, ...]) -> list[SamplerInput]:
    """The sampler's inputs of a sequence: for its row, and for those of its drafts, which follow it."""
    choices = [choice_of(row + n, sequence, drafts[:n]) for n in range(1 + len(drafts))]
    if not drafts or sequence.grammar is None:
        return choices
    masks: list[Mask | Foreseen] = [sequence.grammar, *sequence.grammar.foresee(drafts)]
    return [replace(choice, grammar=mask) for choice, mask in zip(choices, masks, strict=True)]


def choice_of(row: int, sequence: Sequence, drafts: tuple[int, ...] = ()) -> SamplerInput:
    """The sampler's input of a sequence, its next random number included.

    `drafts`: tokens that the sequence is assumed to have beyond its own.
    """
    params, vocabulary = sequence.request.sampling, sequence.prompt.vocabulary
    counts = sequence.counts + Counter(drafts) if drafts and penalizes(params) else sequence.counts
    said = (*sequence.prompt.ids, *sequence.generated, *drafts) if params.no_repeat_ngram_size else ()
    return SamplerInput(
        row,
        params,
        vocabulary,
        counts,
        uniform(sequence, len(drafts)),
        sequence.grammar,
        said,
        plain=sequence.plain,
    )


def uniform(sequence: Sequence, ahead: int = 0) -> float:
    """The random number of a sequence's next token (see `Sequence.draw`); 0 where it takes the likeliest."""
    return 0.0 if sequence.plain or sequence.request.sampling.greedy else sequence.draw(ahead)


def forced_tokens(sequence: Sequence, least: int) -> Iterator[int]:
    """Tokens that the grammar of a decoding sequence forces next, each once the one before it is taken.

    None where they are fewer than `least` and don't end it, or where log-probabilities are wanted: no logits
    are computed for them.
    """
    mask = sequence.grammar
    if mask is None or not mask.forced or sequence.request.sampling.logprobs is not None:
        return
    if mask.ready and sequence.decodes and (mask.ends or len(mask.forced) >= least):
        while sequence.state is State.RUNNING and mask.forced:
            yield mask.forced[0]


def scoring_of(chunks: list[Chunk], at_once: int, device: torch.device) -> Scoring | None:
    """The rows of a step that score prompts' tokens; None where no log-probabilities are wanted.

    Row `i` predicts token `i + 1`; the last row of a prompt predicts what is generated.

    Args:
        at_once: rows whose logits are held at a time.
        device: the network's.
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

    return Scoring(to_device(torch.tensor(rows), device), at_once, look)

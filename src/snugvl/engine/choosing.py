"""How the sequences of a step choose their next tokens, where that isn't just the likeliest ones.

Where a sequence has a grammar the network still starts ahead, and only choosing waits: for the masks, which
threads make from the tokens of step n while the network of step n + 1 runs:

    GPU      │ network n       │ choose n │ network n + 1         │ choose n + 1 │ network n + 2
    host     │ … masks n ready ┤ start network n + 1 │ read n │ … masks n + 1 ready ┤ start network n + 2
    threads                                          └ masks n + 1 ┘

A grammar that forces several tokens makes the row that is in flight void: whatever its logits are, the next
tokens are known. They are all computed in the step after it, beside the others' single ones
(`Runner.run_chunks`), so a run of k forced tokens takes one step for k.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch

from snugvl.engine.batch import PendingTokens, begin_likeliest
from snugvl.engine.request import CheckedPrompt
from snugvl.engine.sampling.masks import Foreseen, Mask, allowed_bits
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.sampling.sampler import Sampler, SamplerInput, begin, scores_of
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import Sequence, State
from snugvl.layers.device import to_device
from snugvl.models.batch import Scoring

if TYPE_CHECKING:
    from snugvl.engine.runner import InFlight, Runner

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
        _uniform(sequence, len(drafts)),
        sequence.grammar,
        said,
        plain=sequence.plain,
    )


def _uniform(sequence: Sequence, ahead: int = 0) -> float:
    return 0.0 if sequence.plain or sequence.request.sampling.greedy else sequence.draw(ahead)


def choose(step: "InFlight", runner: "Runner") -> None:
    """Begin with choosing in a masked step. The host has read all earlier tokens, and waited for masks.

    A sequence whose mask is late is void, and its newest token is computed again once the mask is there.
    Where that can't be the mask is waited for, seldom long: only sequences with quick masks run ahead.
    """
    can_recompute = runner.can_recompute
    for row, sequence in enumerate(step.sequences):
        if sequence.state is not State.RUNNING:
            step.void.add(row)
        elif can_recompute and not sequence.can_sample and row not in step.void:
            sequence.computed -= 1
            step.void.add(row)
    masks = [None if row in step.void else each.grammar for row, each in enumerate(step.sequences)]
    if all(each.plain for each in step.sequences):
        bits = allowed_bits(masks, step.logits.shape[1], pinned=step.logits.is_cuda)
        replay = runner.graphs.choose(bits) if step.replayed else None
        if replay is not None:
            step.sampling = [replay]
        else:
            step.sampling = [begin_likeliest(step.logits, bits)]
            runner.graphs.feed(step.chosen)
    else:  # what it counts and draws follows from tokens that are read
        pairs = zip(map(choice_of, count(), step.sequences), masks, strict=True)
        choices = [replace(choice, grammar=mask) for choice, mask in pairs]
        known = None if step.void else step.sampler
        sampler = known or Sampler(choices, step.logits.shape[1], step.logits.device)
        sample_ahead(step, sampler, runner)


def sample_ahead(step: "InFlight", sampler: Sampler, runner: "Runner", *, ahead: int = 0) -> None:
    """Choose from a step's logits, for the host and for the next step.

    `ahead`: tokens of each sequence that are chosen and not read.
    """
    step.sampler = sampler
    step.sampling = [sampler.begin(step.logits, [_uniform(sequence, ahead) for sequence in step.sequences])]
    runner.graphs.feed(step.chosen)


def sampler_of(step: "InFlight") -> Sampler:
    """How the sequences of a step choose, a row of logits for each."""
    choices = [choice_of(row, sequence) for row, sequence in enumerate(step.sequences)]
    return Sampler(choices, step.logits.shape[1], step.logits.device)


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

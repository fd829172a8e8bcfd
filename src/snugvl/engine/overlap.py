"""Decode steps that run ahead of the host: the next one starts before the tokens of the last are read.

    GPU    │ step n          │ step n + 1      │ step n + 2
    host   │ … start n + 1 ──┤ read n, deliver │ start n + 2, read n + 1, deliver

What the network of step n + 1 needs of step n is on the GPU already: the tokens. Greedy ones are made by the
graph itself; others by the sampler, from numbers that the host draws beforehand (`Sequence.random`), and from
counts of tokens that it keeps on the GPU. A sequence that ends with a token of step n has its token of step
n + 1 thrown away; what that wrote stands in blocks that are rewritten, in the order of the stream, before
anybody reads them.

Where somebody has a grammar the network still starts ahead, and only choosing waits: for the masks, which
threads make from the tokens of step n while the network of step n + 1 runs:

    GPU      │ network n       │ choose n │ network n + 1         │ choose n + 1 │ network n + 2
    host     │ … masks n ready ┤ start network n + 1 │ read n │ … masks n + 1 ready ┤ start network n + 2
    threads                                          └ masks n + 1 ┘

A grammar that forces several tokens makes the row that is under way void: whatever its logits are, the next
tokens are known. They are all computed in the step after it, beside the others' single ones
(`Runner.start_chunks`), so a run of k forced tokens takes one step for k.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import torch

from snugvl.engine.graphs.decode import DecodeGraphs, DecodeRow, Replay
from snugvl.engine.packing import Unread
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.sampling.sampler import (
    PendingSample,
    Sampled,
    Sampler,
    SamplerInput,
    allowed_bits,
    begin_likeliest,
)
from snugvl.engine.schedule import Chunk, Schedule
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.sequence import Sequence, State, slot_of

# Forced tokens for which a step of chunks is worth more than one of single tokens in a graph: where it is a
# graph, too, and where it is started launch by launch.
LEAST_RUN, LEAST_LONG_RUN = 3, 8


class StepStarter(Protocol):
    """What starts steps: `Runner`."""

    @property
    def graphs(self) -> DecodeGraphs:
        """CUDA graphs of steps of single tokens."""
        ...

    @property
    def can_recompute(self) -> bool:
        """Whether a token may be computed twice: not if a recurrent state has taken it in."""
        ...

    def start_chunks(self, chunks: list[Chunk], unread: Unread) -> torch.Tensor:
        """Start a step that isn't one of single tokens, some of which the host has not read yet.

        Logits `[chunks, vocab]`, valid until the next step starts.
        """
        ...


@dataclass(slots=True)
class PendingStep:
    """A started step.

    Attributes:
        sequences: whose tokens it makes, in the order of its rows.
        logits: `[sequences, vocab]`.
        run: its graph's, if it was one of single tokens.
        masked: whether somebody has a grammar, so that it is for `choose` to begin with choosing.
        tokens: that it computes.
        sampler: how they choose; None where all take the likeliest, or it is to be made.
        sampling: what has begun; None where the graph itself has found the likeliest.
        void: rows whose tokens nobody wants.
    """

    sequences: list[Sequence]
    logits: torch.Tensor
    run: Replay | None
    masked: bool
    tokens: int
    sampler: Sampler | None = None
    sampling: PendingSample | Replay | None = None
    void: set[int] = field(default_factory=set)

    def results(self) -> list[tuple[Sequence, Sampled]]:
        """A token for each sequence that waits for one, waiting for them."""
        begun = self.sampling or self.run
        assert begun is not None, "a step that was not chosen from"
        pairs = zip(self.sequences, begun.results(), strict=True)
        return [pair for row, pair in enumerate(pairs) if row not in self.void]


def decodes(step: Schedule) -> bool:
    """Whether a step computes one generated token of each of its sequences, and nothing of a prompt.

    The last token of a prompt is no such token, though it may be all that a prefill has left: it can be a
    placeholder, and the siblings of its sequence wait for its logits.
    """
    return all(
        chunk.samples and chunk.end - chunk.start == 1 and chunk.start >= len(chunk.sequence.prompt)
        for chunk in step.chunks
    )


def choice_of(row: int, sequence: Sequence, drafts: tuple[int, ...] = ()) -> SamplerInput:
    """What a sequence brings to the sampler, its next random number included.

    `drafts`: tokens that it is taken to have beyond those it has.
    """
    params, vocabulary = sequence.request.sampling, sequence.prompt.vocabulary
    counts = sequence.counts + Counter(drafts) if drafts and penalizes(params) else sequence.counts
    said = (*sequence.prompt.ids, *sequence.generated, *drafts) if params.no_repeat_ngram_size else ()
    return SamplerInput(
        row, params, vocabulary, counts, _uniform(sequence, len(drafts)), sequence.grammar, said
    )


def _uniform(sequence: Sequence, ahead: int = 0) -> float:
    return 0.0 if sequence.request.sampling.greedy else sequence.draw(ahead)


def rows_of(sequences: list[Sequence]) -> list[DecodeRow]:
    """What a graph must know of sequences whose newest token is to be computed.

    The token is 0 where the host has not read it.
    """
    return [
        DecodeRow(
            token=next(iter(sequence.ids(length - 1, length)), 0),
            length=length,
            delta=sequence.prompt.delta,
            table=sequence.table,
            slot=slot_of(sequence),
        )
        for sequence in sequences
        for length in (max(sequence.length, sequence.computed),)
    ]


def launch_decode(sequences: list[Sequence], graphs: DecodeGraphs) -> PendingStep:
    """Start a step of sequences that decode."""
    run = graphs.start(rows_of(sequences))
    masked = any(sequence.grammar is not None for sequence in sequences)
    step = PendingStep(sequences, run.logits, run, masked, len(sequences))
    if not masked and not all(each.plain for each in sequences):
        choices = [choice_of(row, sequence) for row, sequence in enumerate(sequences)]
        _choose(step, Sampler(choices, run.logits.shape[1], run.logits.device), graphs)
    return step


def may_run_ahead(sequences: Iterable[Sequence]) -> bool:
    """Whether nobody's masks take so long that others would wait for them."""
    return all(sequence.grammar is None or sequence.grammar.quick for sequence in sequences)


def choose(step: PendingStep, starter: StepStarter) -> None:
    """Begin with choosing in a masked step. The host has read all earlier tokens, and waited for masks.

    Who has none in time is void, and computes its newest token again when it has its mask. Where that can't
    be it is waited for: `may_run_ahead` has seen that this is seldom long.
    """
    can_recompute = starter.can_recompute
    for row, sequence in enumerate(step.sequences):
        if sequence.state is not State.RUNNING:
            step.void.add(row)
        elif can_recompute and not sequence.can_sample and row not in step.void:
            sequence.computed -= 1
            step.void.add(row)
    masks = [None if row in step.void else each.grammar for row, each in enumerate(step.sequences)]
    if all(each.plain for each in step.sequences):
        bits = allowed_bits(masks, step.logits.shape[1], pinned=step.logits.is_cuda)
        step.sampling = None if step.run is None else starter.graphs.choose(bits)
        if step.sampling is None:
            step.sampling = begin_likeliest(step.logits, bits)
            starter.graphs.feed(step.sampling.tokens)
    else:  # what it counts and draws follows from tokens that are read
        pairs = zip(map(choice_of, count(), step.sequences), masks, strict=True)
        choices = [replace(choice, grammar=mask) for choice, mask in pairs]
        known = None if step.void else step.sampler
        sampler = known or Sampler(choices, step.logits.shape[1], step.logits.device)
        _choose(step, sampler, starter.graphs)


def _choose(step: PendingStep, sampler: Sampler, graphs: DecodeGraphs, *, ahead: int = 0) -> None:
    """Choose from a step's logits, for the host and for the next step.

    `ahead`: tokens of each sequence that are chosen and not read.
    """
    step.sampler = sampler
    step.sampling = sampler.begin(step.logits, [_uniform(sequence, ahead) for sequence in step.sequences])
    graphs.feed(step.sampling.tokens)


def launch_next(pending: PendingStep, starter: StepStarter, scheduler: Scheduler) -> PendingStep | None:
    """Start the step after `pending` before its tokens are known; None where the host must decide first.

    That is: somebody waits who could be admitted or go on, somebody ended, a sequence reaches its last token,
    or there is no room for the next ones.
    """
    sequences, running, pool = pending.sequences, scheduler.running, scheduler.pool
    # As many as run, each of which runs (below), are all of them.
    others = len(running) != len(sequences) and any(s.can_sample and s not in sequences for s in running)
    if others or scheduler.could_admit:
        return None
    spans, tokens, missing = [], 0, {}
    for row, sequence in enumerate(sequences):
        unread = row not in pending.void
        last = len(sequence.generated) + unread >= sequence.max_tokens
        if sequence.state is not State.RUNNING or last or not (unread or sequence.can_sample):
            return None
        start = sequence.computed
        end = start + 1 if unread else sequence.length
        spans.append((sequence, start, end))
        tokens += end - start
        if blocks := pool.missing(sequence.table, start, end):
            missing[row] = blocks
    if tokens > scheduler.config.max_batched_tokens or sum(missing.values()) > pool.num_free:
        return None
    for row in missing:
        copies = pool.extend(sequences[row].table, *spans[row][1:])
        assert not copies, "a decoding sequence shares no block that it writes to"
    for sequence, _, end in spans:
        sequence.computed = end
    grown = {row: _grown(sequences[row].table, count) for row, count in missing.items()}
    step = _started(pending, spans, grown, starter)
    if pending.sampler is None or pending.sampling is None:
        return step
    if not pending.masked:
        pending.sampler.note(pending.sampling.tokens)
        _choose(step, pending.sampler, starter.graphs, ahead=1)
    elif not pending.void and not any(sequence.penalized for sequence in sequences):
        step.sampler = pending.sampler  # it has nothing to count
    return step


def _grown(table: list[int], count: int) -> tuple[int, list[int]]:
    """How many blocks a table had before it grew by `count`, and those."""
    before = len(table) - count
    return before, table[before:]


def _started(
    pending: PendingStep,
    spans: list[tuple[Sequence, int, int]],
    grown: dict[int, tuple[int, list[int]]],
    starter: StepStarter,
) -> PendingStep:
    """The step after `pending`.

    `spans`: whose tokens it computes, from where, to where; `grown`: see `DecodeGraphs.advance`.
    """
    sequences, graphs = pending.sequences, starter.graphs
    if pending.run is not None and not pending.void:
        run = graphs.advance(len(sequences), grown)
        return PendingStep(sequences, run.logits, run, pending.masked, len(sequences))
    assert pending.sampling is not None, "only a masked step is void for some, or one of chunks"
    if not pending.void:
        run = graphs.start(rows_of(sequences), pending.sampling.tokens)
        return PendingStep(sequences, run.logits, run, pending.masked, len(sequences))
    rows = [row for row in range(len(sequences)) if row not in pending.void]
    logits = starter.start_chunks([Chunk(*span) for span in spans], Unread(rows, pending.sampling.tokens))
    tokens = sum(end - start for _, start, end in spans)
    return PendingStep(sequences, logits, None, pending.masked, tokens)

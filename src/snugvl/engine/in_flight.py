"""A step that has started and whose tokens the host has not read, and the step after it.

Decode steps run ahead of the host: the next one starts before the tokens of the last are read.

    GPU    │ step n          │ step n + 1      │ step n + 2
    host   │ … start n + 1 ──┤ read n, deliver │ start n + 2, read n + 1, deliver

What the network of step n + 1 needs of step n is on the GPU already: the tokens. Greedy ones are made by the
graph itself; others by the sampler, from numbers that the host draws beforehand (`Sequence.random`), and from
counts of tokens that it keeps on the GPU. A sequence that ends with a token of step n has its token of step
n + 1 thrown away; the keys and values of that token are in blocks that are rewritten, in the order of the
stream, before any sequence reads them.

Where a sequence has a grammar the network still starts ahead, and only choosing waits: for the masks, which
threads make from the tokens of step n while the network of step n + 1 runs:

    GPU      │ network n       │ choose n │ network n + 1         │ choose n + 1 │ network n + 2
    host     │ … masks n ready ┤ start network n + 1 │ read n │ … masks n + 1 ready ┤ start network n + 2
    threads                                          └ masks n + 1 ┘

A grammar that forces several tokens makes the row that is in flight void: whatever its logits are, the next
tokens are known. They are all computed in the step after it, beside the others' single ones
(`Runner.run_chunks`), so a run of k forced tokens takes one step for k.

A step with drafts (`speculation.py`) doesn't run ahead: how many of its tokens count is known when they are
read. The host delivers the tokens of the step before it meanwhile:

    GPU    │ step n          │             │ step n + 1       │
    host   │ … deliver n − 1 ┤ read n, start n + 1 │ deliver n │ read n + 1 …
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice

import torch

from snugvl.engine.batch import Unread, rows_of
from snugvl.engine.graphs.decode import DecodeGraphs, Replay
from snugvl.engine.runner import Runner
from snugvl.engine.sampling.masks import Foreseen, Mask, allowed_bits
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.sampling.sampler import (
    PendingSample,
    Sampled,
    Sampler,
    SamplerInput,
    begin,
    begin_likeliest,
)
from snugvl.engine.scheduler import Chunk, Schedule, Scheduler
from snugvl.engine.sequence import Sequence, State

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
        replay: the replay of the decode graph, if the step is one.
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
    replay: Replay | None = None
    masked: bool = False
    streams: int = 0
    decodes: bool = True
    chunks: list[Chunk] = field(default_factory=list)
    sampler: Sampler | None = None
    sampling: list[PendingSample | Replay] = field(default_factory=list)
    void: set[int] = field(default_factory=set)

    @property
    def chosen(self) -> torch.Tensor:
        """The tokens `[rows]` int64 of a step that runs ahead, once choosing has begun; below 0 for none."""
        return self.sampling[0].tokens

    def results(self) -> Iterator[Taken]:
        """Wait for the tokens; yields (sequence, drafts, sampled tokens) for each that isn't finished or
        void."""
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


def decode_in_flight(sequences: list[Sequence], replay: Replay, graphs: DecodeGraphs) -> InFlight:
    """A step of one token of each sequence, which a decode graph has started."""
    masked = any(sequence.grammar is not None for sequence in sequences)
    step = _single_tokens(sequences, replay, masked)
    if not masked and not all(each.plain for each in sequences):
        choices = [choice_of(row, sequence) for row, sequence in enumerate(sequences)]
        _choose(step, Sampler(choices, replay.logits.shape[1], replay.logits.device), graphs)
    return step


def chunks_in_flight(
    logits: torch.Tensor, heads: list[tuple[Chunk, list[Sequence]]], schedule: Schedule
) -> InFlight:
    """A step of chunks that has started, from whose logits choosing begins.

    Args:
        logits: `[n, vocab]`, `Chunk.logits` rows of each of `heads`.
        heads: the chunks that sample, each with the sequences that take a token from it.
    """
    streams, decodes = len(schedule.chunks), schedule.decodes
    step = InFlight([], logits, schedule.tokens, runs_ahead=False, streams=streams, decodes=decodes)
    choices, row = list[SamplerInput](), 0
    for chunk, takers in heads:
        for sequence in takers:
            step.sequences.append(sequence)
            step.chunks.append(chunk)
            choices += choices_with(row, sequence, chunk.drafts)
        row += chunk.logits
    step.sampling += begin(logits, choices)
    return step


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


def choose(step: InFlight, runner: Runner) -> None:
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
        replay = None if step.replay is None else runner.graphs.choose(bits)
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
        _choose(step, sampler, runner.graphs)


def _choose(step: InFlight, sampler: Sampler, graphs: DecodeGraphs, *, ahead: int = 0) -> None:
    """Choose from a step's logits, for the host and for the next step.

    `ahead`: tokens of each sequence that are chosen and not read.
    """
    step.sampler = sampler
    step.sampling = [sampler.begin(step.logits, [_uniform(sequence, ahead) for sequence in step.sequences])]
    graphs.feed(step.chosen)


def launch_next(last: InFlight, runner: Runner, scheduler: Scheduler) -> InFlight | None:
    """Start the step after `last` before its tokens are known; None where the host must decide first.

    So it is where a waiting sequence could be admitted or go on, one ended or reaches its last token, or
    there are no blocks for the next tokens.
    """
    sequences, running, pool = last.sequences, scheduler.running, scheduler.pool
    # As many as run, each of which runs (below), are all of them.
    others = len(running) != len(sequences) and any(s.can_sample and s not in sequences for s in running)
    if others or scheduler.could_admit:
        return None
    spans, tokens, missing = list[tuple[Sequence, int, int]](), 0, dict[int, int]()
    for row, sequence in enumerate(sequences):
        unread = row not in last.void
        ends = len(sequence.generated) + unread >= sequence.max_tokens
        if sequence.state is not State.RUNNING or ends or not (unread or sequence.can_sample):
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
    step = _next(last, spans, grown, runner)
    if last.sampler is None:
        return step
    if not last.masked:
        last.sampler.note(last.chosen)
        _choose(step, last.sampler, runner.graphs, ahead=1)
    elif not last.void and not any(sequence.penalized for sequence in sequences):
        step.sampler = last.sampler  # it has nothing to count
    return step


def _grown(table: list[int], count: int) -> tuple[int, list[int]]:
    """(number of blocks of a table before it grew by `count`, the new blocks)."""
    before = len(table) - count
    return before, table[before:]


def _next(
    last: InFlight,
    spans: list[tuple[Sequence, int, int]],
    grown: dict[int, tuple[int, list[int]]],
    runner: Runner,
) -> InFlight:
    """The step after `last`.

    `spans`: (sequence, first token, end) of each that it computes; `grown`: see `DecodeGraphs.advance`.
    """
    sequences, graphs = last.sequences, runner.graphs
    if last.replay is not None and not last.void:
        return _single_tokens(sequences, graphs.advance(len(sequences), grown), last.masked)
    if not last.void:
        return _single_tokens(sequences, graphs.start(rows_of(sequences), last.chosen), last.masked)
    rows = [row for row in range(len(sequences)) if row not in last.void]
    logits = runner.run_chunks([Chunk(*span) for span in spans], Unread(rows, last.chosen))
    tokens = sum(end - start for _, start, end in spans)
    return InFlight(sequences, logits, tokens, runs_ahead=True, masked=last.masked, streams=len(sequences))


def _single_tokens(sequences: list[Sequence], replay: Replay, masked: bool) -> InFlight:
    """A step of one token of each sequence, as a decode graph runs it."""
    count = len(sequences)
    return InFlight(
        sequences, replay.logits, count, True, replay, masked=masked, streams=count, sampling=[replay]
    )

"""Decode steps that run ahead of the host: the next one starts before the tokens of the last are read.

    GPU    │ step n          │ step n + 1      │ step n + 2
    host   │ … start n + 1 ──┤ read n, deliver │ start n + 2, read n + 1, deliver

The network of step n + 1 needs only the tokens of step n, which are on the GPU already. Greedy ones are made
by the graph itself; others by the sampler, from numbers that the host draws beforehand (`Sequence.random`),
and from counts of tokens that it keeps on the GPU. A sequence that ends with a token of step n has its token
of step n + 1 thrown away; the keys and values of that token are in blocks that are rewritten, in the order of
the stream, before any sequence reads them.

Where a sequence has a grammar the network still starts ahead, and only choosing waits: for the masks, which
threads make from the tokens of step n while the network of step n + 1 runs:

    GPU      │ network n       │ choose n │ network n + 1         │ choose n + 1 │ network n + 2
    host     │ … masks n ready ┤ start network n + 1 │ read n │ … masks n + 1 ready ┤ start network n + 2
    threads                                          └ masks n + 1 ┘

A grammar that forces several tokens makes the row that is in flight void: whatever its logits are, the next
tokens are known. They are all computed in the step after it, beside the others' single ones
(`Runner.run_chunks`), so a run of k forced tokens takes one step for k.
"""

from dataclasses import replace
from itertools import count

from snugvl.engine.batch import Unread, begin_likeliest
from snugvl.engine.choosing import choice_of, uniform
from snugvl.engine.graphs.decode import Replay, rows_of
from snugvl.engine.runner import InFlight, Runner
from snugvl.engine.sampling.masks import allowed_bits
from snugvl.engine.sampling.sampler import Sampler
from snugvl.engine.scheduler import Chunk, Scheduler
from snugvl.engine.sequence import Sequence, State


def decode_in_flight(sequences: list[Sequence], replay: Replay, runner: Runner) -> InFlight:
    """A step of one token of each sequence, which a decode graph has started."""
    masked = any(sequence.grammar is not None for sequence in sequences)
    step = _single_tokens(sequences, replay, masked)
    if not masked and not all(each.plain for each in sequences):
        sample_ahead(step, sampler_of(step), runner)
    return step


def decodes_on(scheduler: Scheduler, runner: Runner) -> bool:
    """Whether the next step only decodes, and needs nothing done before: it starts at once."""
    return (
        bool(scheduler.running)
        and not (scheduler.waiting and scheduler.could_admit)
        and not any(each.prefills or each.alone for each in scheduler.running)
        and not runner.graph_cache.has_due
    )


def launch_next(last: InFlight, runner: Runner, scheduler: Scheduler) -> InFlight | None:
    """Start the step after `last` before its tokens are known; None where the host must decide first.

    The host must where a waiting sequence could be admitted or go on, where one has ended or reaches its last
    token, and where there are no blocks for the next tokens.
    """
    sequences, running, pool = last.sequences, scheduler.running, scheduler.pool
    # As many as run, each of which runs (below), are all of them.
    others = len(running) != len(sequences) and any(s.can_sample and s not in sequences for s in running)
    if others or (scheduler.waiting and scheduler.could_admit):
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
        sample_ahead(step, last.sampler, runner, ahead=1)
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
    if last.replayed and not last.void:
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
        sequences, replay.logits, count, True, True, masked=masked, streams=count, sampling=[replay]
    )


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


def sample_ahead(step: InFlight, sampler: Sampler, runner: Runner, *, ahead: int = 0) -> None:
    """Choose from a step's logits, for the host and for the next step.

    `ahead`: tokens of each sequence that are chosen and not read.
    """
    step.sampler = sampler
    step.sampling = [sampler.begin(step.logits, [uniform(sequence, ahead) for sequence in step.sequences])]
    runner.graphs.feed(step.chosen)


def sampler_of(step: InFlight) -> Sampler:
    """How the sequences of a step choose, a row of logits for each."""
    choices = [choice_of(row, sequence) for row, sequence in enumerate(step.sequences)]
    return Sampler(choices, step.logits.shape[1], step.logits.device)

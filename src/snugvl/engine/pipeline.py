"""Decode steps that run ahead of the host: the next one starts before the tokens of the last are read.

    GPU    │ step n          │ step n + 1      │ step n + 2
    host   │ … start n + 1 ──┤ read n, deliver │ start n + 2, read n + 1, deliver

What step n + 1 needs of step n is on the GPU already: the most likely tokens. So only batches that take
those, whatever they are, run this way: greedy, with nothing that the host must decide in between. A
sequence that ends with a token of step n has its token of step n + 1 thrown away; what that wrote stands in
blocks that are rewritten, in the order of the stream, before anybody reads them.
"""

from dataclasses import dataclass

from snugvl.engine.graphs import DecodeGraphs, Row, Run
from snugvl.engine.scheduler import Schedule, Scheduler
from snugvl.engine.sequence import Sequence, State, seat_of


@dataclass(frozen=True, slots=True)
class Flight:
    """A started step: whose tokens it makes, in the order of its rows."""

    sequences: list[Sequence]
    run: Run


def plain(sequence: Sequence) -> bool:
    """Whether its next token is the most likely one, and nothing else of the logits is wanted."""
    params = sequence.request.sampling
    return (
        params.greedy
        and params.logprobs is None
        and sequence.grammar is None
        and not params.logit_bias
        and not params.presence_penalty
        and not params.frequency_penalty
        and params.repetition_penalty == 1.0
    )


def decodes(step: Schedule) -> bool:
    """Whether a step computes one generated token of each of its sequences, and nothing of a prompt.

    The last token of a prompt is no such token, though it may be all that a prefill has left: it can be a
    placeholder, and the siblings of its sequence wait for its logits.
    """
    return all(
        chunk.samples and chunk.end - chunk.start == 1 and chunk.start >= len(chunk.sequence.prompt)
        for chunk in step.chunks
    )


def rows_of(sequences: list[Sequence]) -> list[Row]:
    """What a graph must know of sequences whose newest token is to be computed."""
    return [
        Row(
            token=sequence.ids(sequence.length - 1, sequence.length)[0],
            length=sequence.length,
            delta=sequence.prompt.delta,
            table=sequence.table,
            seat=seat_of(sequence),
        )
        for sequence in sequences
    ]


def follow(flight: Flight, graphs: DecodeGraphs, scheduler: Scheduler) -> Flight | None:
    """Start the step after `flight` before its tokens are known; None where the host must decide first.

    That is: somebody waits who could be admitted, somebody ended, a sequence reaches its last token, or no
    block is free for the next one.
    """
    sequences = flight.sequences
    if scheduler.could_admit or len(scheduler.running) != len(sequences):
        return None
    for sequence in sequences:
        last = len(sequence.generated) + 1 >= sequence.max_tokens
        if sequence.state is not State.RUNNING or last:
            return None
    missing = [scheduler.pool.missing(s.table, s.computed, s.computed + 1) for s in sequences]
    if sum(missing) > scheduler.pool.num_free:
        return None
    grown = {}
    for index, (sequence, blocks) in enumerate(zip(sequences, missing, strict=True)):
        if blocks:
            copies = scheduler.pool.extend(sequence.table, sequence.computed, sequence.computed + 1)
            assert not copies, "a decoding sequence shares no block that it writes to"
            grown[index] = sequence.table
        sequence.computed += 1
    return Flight(sequences, graphs.again(len(sequences), grown))

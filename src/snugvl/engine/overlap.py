"""Decode steps that run ahead of the host: the next one starts before the tokens of the last are read.

    GPU    │ step n          │ step n + 1      │ step n + 2
    host   │ … start n + 1 ──┤ read n, deliver │ start n + 2, read n + 1, deliver

What step n + 1 needs of step n is on the GPU already: the tokens. Greedy ones are made by the graph itself;
others by the sampler, from numbers that the host draws beforehand (`Sequence.random`), and from counts of
tokens that it keeps on the GPU. Only a grammar must see a token before it can allow the next one. A
sequence that ends with a token of step n has its token of step n + 1 thrown away; what that wrote stands in
blocks that are rewritten, in the order of the stream, before anybody reads them.
"""

from dataclasses import dataclass

from snugvl.engine.graphs.decode import DecodeGraphs, DecodeRow, Replay
from snugvl.engine.sampling.sampler import Choice, PendingSample, Sampled, Sampler
from snugvl.engine.scheduler import Schedule, Scheduler
from snugvl.engine.sequence import Sequence, State, slot_of


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A started step.

    Attributes:
        sequences: whose tokens it makes, in the order of its rows.
        sampler: how they choose; None where all take the likeliest, which the graph has found.
        sampling: what the sampler has begun.
    """

    sequences: list[Sequence]
    run: Replay
    sampler: Sampler | None = None
    sampling: PendingSample | None = None

    def results(self) -> list[Sampled]:
        """A token for each sequence, waiting for them."""
        if self.sampling is not None:
            return self.sampling.results()
        return [Sampled(token if token >= 0 else None) for token in self.run.tokens()]


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


def choice_of(row: int, sequence: Sequence) -> Choice:
    """What a sequence brings to the sampler, its next random number included."""
    params, vocabulary = sequence.request.sampling, sequence.prompt.vocabulary
    return Choice(row, params, vocabulary, sequence.counts, _uniform(sequence), sequence.grammar)


def _uniform(sequence: Sequence, ahead: int = 0) -> float:
    return 0.0 if sequence.request.sampling.greedy else sequence.draw(ahead)


def rows_of(sequences: list[Sequence]) -> list[DecodeRow]:
    """What a graph must know of sequences whose newest token is to be computed."""
    return [
        DecodeRow(
            token=sequence.ids(sequence.length - 1, sequence.length)[0],
            length=sequence.length,
            delta=sequence.prompt.delta,
            table=sequence.table,
            slot=slot_of(sequence),
        )
        for sequence in sequences
    ]


def launch_decode(sequences: list[Sequence], graphs: DecodeGraphs) -> PendingStep:
    """Start a step of sequences that decode, none of them with a grammar."""
    run = graphs.start(rows_of(sequences))
    if all(map(plain, sequences)):
        return PendingStep(sequences, run)
    choices = [choice_of(row, sequence) for row, sequence in enumerate(sequences)]
    sampler = Sampler(choices, run.logits.shape[1], run.logits.device)
    return _chosen(sequences, run, sampler, [choice.uniform for choice in choices], graphs)


def _chosen(
    sequences: list[Sequence], run: Replay, sampler: Sampler, uniforms: list[float], graphs: DecodeGraphs
) -> PendingStep:
    """Choose from a run's logits, for the host and for the next run."""
    sampling = sampler.begin(run.logits, uniforms)
    graphs.feed(sampling.tokens)
    return PendingStep(sequences, run, sampler, sampling)


def launch_next(pending: PendingStep, graphs: DecodeGraphs, scheduler: Scheduler) -> PendingStep | None:
    """Start the step after `pending` before its tokens are known; None where the host must decide first.

    That is: somebody waits who could be admitted, somebody ended, a sequence reaches its last token, or no
    block is free for the next one.
    """
    sequences = pending.sequences
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
    run = graphs.advance(len(sequences), grown)
    if pending.sampler is None or pending.sampling is None:
        return PendingStep(sequences, run)
    pending.sampler.note(pending.sampling.tokens)
    uniforms = [_uniform(sequence, ahead=1) for sequence in sequences]
    return _chosen(sequences, run, pending.sampler, uniforms, graphs)

"""Speculation: a step computes a sequence's newest token and *drafts* of those after it; some are right.

    known     … a b c            a proposer drafts d e f (`drafts.py`)
    chunk     [ c │ d e f ]      one chunk of the step, with logits in each of its rows
    chosen      d   e   x   ·    what follows c, c d, c d e: x isn't f, so what follows f counts for nothing
    kept        d   e   x        three tokens of one step; the keys and values of f are written over

It is exact: in each row is chosen as it would be without drafts, with the random number, the counts and the
penalties of its place, and a row counts only if all drafts before it are what was chosen. So a seed gives the
same answer, and what is drawn has the same distribution. (Numbers of a product of several rows may differ
from those of one row in their last bits, as they do in company.)

`Sequence.computed` counts drafts only once they are chosen: the blocks' contents beyond it are unused, as
they are behind a token that ran ahead in vain. A block gets its key only then.

A recurrent state can't go back, so it doesn't go ahead: drafts are computed from it and don't enter it. It
stays behind the newest token, and drafts that were right are computed once more, before the next newest one:

    state     a b c│
    step      [ d │ e f g ]     e f were right, then comes x     state   a b c d│
    step      [ e f x │ y z ]   keys of e f are written again    state   a b c d e f x│

So wrong drafts cost nothing but their rows, right ones a row of a step more, and no memory at all: neither a
state for each draft (48 MiB in Qwen3.5-4B) nor the inputs of each layer, from which others compute the states
again. A step reads all weights for one row or for 15. Nothing else knows of it: a snapshot, a preemption, a
block's key go by `computed`, where the state is.

Drafts come from n-grams of prompt and answer (`drafts.py`), or the model's own predictor (`predictor.py`): it
is asked as soon as the tokens of a step are taken, and the next step, which is put together meanwhile, takes
its drafts from the device.

A draft takes the row of logits of a sequence that doesn't run: a step has never more than `max_num_seqs`, for
which logits, sampling and CUDA graphs are planned. So many streams leave no room for drafts, where they would
lose. Nor has a step drafts in which prompts are computed, or that runs alone after a lack of memory.

A choice with a grammar has a mask for each row: of drafts those count that its grammar takes one after the
other, and for whose masks there is time. What it forces comes at once anyway.

`auto` has drafts of a predictor alone, and measures. For about as many streams it keeps what steps with and
without drafts took and brought, takes the better, and now and then looks again at the other, some steps in a
row. A step takes from when the tokens before it are read until its own are: one that ran ahead of the host
takes what it adds, and one with drafts, which can't, pays for that, as does the one behind it. The first ones
don't count: kernels are compiled then, and CUDA graphs captured. It keeps a budget, too: drafts may lose 1 %
of the time of the steps without them, and a part of what they have brought before. Where that is spent there
are none for a while.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean, median
from typing import Final

from snugvl.core.config import EngineConfig
from snugvl.engine.drafts import DeviceDrafts, Drafts, NgramIndex, NgramProposer
from snugvl.engine.predictor import Drafter
from snugvl.engine.request import Sampled, TokenOutput
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.scheduler import Chunk, Schedule, Scheduler
from snugvl.engine.sequence import BlockPool, Sequence, State
from snugvl.layers.delta_rule import CHUNK

MOST: Final = 7  # drafts of a sequence in a step: with its newest token as many rows as products take at once
FIRST: Final = 3  # steps of a kind that don't count
FEW: Final = 3  # steps of a kind that are measured before one is preferred
KEPT: Final = 15  # measurements that count
AGAIN: Final = 64  # steps after which there is one of the kind that lost
MASKS_S: Final = 0.002  # that the masks behind a step's drafts may take
GAIN: Final = 1.03  # what drafts must bring, beyond what they cost, to be preferred
LOOK: Final = 3  # steps in a row of the kind that lost
LOSS: Final = 0.01  # of the time of steps without drafts, that those with drafts may lose
SPARE: Final = 32  # usual steps' time that they may lose later, at most, where they have brought more
WORST: Final = 8  # usual steps' time that one of them is taken to lose, at most: others use the machine, too


class Speculation:
    """Decides which steps have drafts, and counts the right ones. `on`: whether anything drafts; else nothing
    here is called; `drafted`: drafts that were computed; `accepted`: those of them that were right."""

    def __init__(
        self,
        config: EngineConfig,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter`: of a model whose predictor is loaded, which drafts then, unless n-grams are wished."""
        # To look for n-grams takes host time in every step, also where there are none: they must be wished.
        by_predictor = config.speculation == "auto" and drafter is not None
        self.on = config.speculation in ("ngram", "mtp") or by_predictor
        self.drafted = self.accepted = 0
        self._config = config
        self._drafter = None if config.speculation in ("off", "ngram") else drafter
        self._clock = clock
        self._payoffs: dict[int, Payoff] = {}  # by streams, in powers of two
        self._read_at: float | None = None  # when tokens were read, if what comes next is measured from there
        self._with_drafts = False  # whether that has drafts, or computes some again, or has waited for some
        self._waits = False  # whether the next step waited, because it is decided that it has drafts

    @property
    def _most_tokens(self) -> int:
        """Tokens of a step with drafts: those of a CUDA graph, where small steps alone have some."""
        return self._config.step_graph_tokens or self._config.max_batched_tokens

    @property
    def method(self) -> str:
        """The source of drafts: "ngram" or "mtp"; "" where there is none."""
        if not self.on:
            return ""
        return "ngram" if self._drafter is None else "mtp"

    def prepare(self, choices: list[Sequence]) -> None:
        """Give each choice of a new request its drafts: by n-grams, where no predictor makes them."""
        index = NgramIndex(choices[0].prompt.ids) if self._drafter is None else None
        for each in choices:
            each.drafts = Drafts(None if index is None else NgramProposer(index, each.generated))

    def extend(self, step: Schedule, pool: BlockPool) -> None:
        """Add drafts to a step of sequences that decode, where there is room for them and it pays."""
        waited, self._waits = self._waits, False
        if not step.decodes:
            self._read_at = None
            return
        again = any(chunk.end - chunk.start > 1 and chunk.sequence.grammar is None for chunk in step.chunks)
        self._with_drafts = again or waited
        if not (waited or self._pays(len(step.chunks))):
            return
        if not step.copies:  # the predictor would write to blocks that are still to be copied to
            self._ask([chunk.sequence for chunk in step.chunks], pool)
        found = self._drafts(step.chunks, self._most_tokens - step.tokens)
        for row, drafts in found.items():
            chunk = step.chunks[row]
            table, place = chunk.sequence.table, chunk.end
            if pool.missing(table, place, place + len(drafts)) > pool.num_free:
                del drafts[len(table) * pool.block_size - place :]
            if drafts:
                self._with_drafts = True
                step.copies.extend(pool.extend(table, place, place + len(drafts)))
                unseen = _unseen(chunk.sequence)
                end = place + len(drafts)
                step.chunks[row] = replace(chunk, end=end, drafts=tuple(drafts), unseen=unseen)

    def ask_ahead(self, scheduler: Scheduler) -> None:
        """Ask the predictor for drafts of the next step, if that has no prompts: the host is busy now."""
        running = scheduler.running
        if (
            self._drafter is None
            or (scheduler.waiting and scheduler.could_admit)
            or any(each.prefills for each in running)
        ):
            return
        if self._pays(len(running)):
            self._ask(running, scheduler.pool)

    def learn(self, streams: int, kept: int) -> None:
        """Note that a step of `streams` sequences has given `kept` tokens, and the time that it took."""
        if self._config.speculation != "auto":
            return
        now = self._clock()
        if self._read_at is not None:
            self._payoff(streams).note(self._with_drafts, now - self._read_at, kept, streams)
        self._read_at, self._with_drafts = now, False

    def take(
        self,
        sequence: Sequence,
        drafts: tuple[int, ...],
        results: Iterable[Sampled],
        give: Callable[[Sequence, Sampled], list[TokenOutput]],
        scheduler: Scheduler,
        *,
        state_follows: bool,
    ) -> list[TokenOutput]:
        """Give a sequence its token, and another one for each draft that was right.

        The last of the outputs says how many of them were right.

        Args:
            results: one more than drafts; behind a draft that was wrong they count for nothing.
            give: gives a sequence a token.
            state_follows: whether a recurrent state takes a draft that was right in later, if at all.
        """
        outputs = list[TokenOutput]()
        for draft, result in zip_longest(drafts, results):
            if sequence.state is State.FINISHED:  # a token of its own has ended it
                break
            if result.token_id is None:  # a draft may have broken it: it goes on without any
                sequence.drafts = None
                scheduler.withdraw(sequence)
                scheduler.preempt(sequence)
                break
            outputs += give(sequence, result)
            if draft is None or draft != result.token_id:
                break
            if sequence.state is State.RUNNING:
                if sequence.drafts is not None and sequence.drafts.entries == sequence.read - 1:
                    sequence.drafts.entries += 1  # made on the way
                if state_follows:
                    sequence.lag += 1
                else:
                    sequence.computed += 1
        self._count(sequence, drafts, outputs)
        return outputs

    def waits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next step is to wait for tokens that are under way: there may be drafts after them."""
        running = list(sequences)
        if len(running) >= self._config.max_num_seqs:
            return False
        self._waits = self._pays(len(running)) and any(
            _quick(each) and self._may_draft(each, each.drafts) for each in running if each.drafts is not None
        )
        return self._waits

    def _may_draft(self, sequence: Sequence, drafts: Drafts) -> bool:
        """Whether there may be drafts behind tokens of a sequence of which some are under way."""
        if self._drafter is None:
            return bool(drafts.propose(sequence.length, 1))
        return sequence.length >= drafts.rest and self._drafter.keeps_up(sequence)

    def _ask(self, sequences: list[Sequence], pool: BlockPool) -> None:
        """Let the predictor draft what comes after those of the sequences of which it wasn't asked yet."""
        room = min(self._config.max_num_seqs, self._most_tokens) - len(sequences)
        if self._drafter is None or room <= 0:
            return
        asked, width = list[Sequence](), 0
        for each in sequences:
            drafts = each.drafts
            if (
                drafts is None
                or each.length < drafts.rest
                or each.read != each.length - 1
                or len(each.generated) + 1 >= each.max_tokens
                or drafts.asked(each.length)
            ):
                continue
            if _quick(each) and self._drafter.keeps_up(each):
                asked.append(each)
                width = max(width, drafts.width)
        if asked:
            self._drafter.ask(asked, min(width, self._drafter.most, -(-room // len(sequences))), pool)

    def _drafts(self, chunks: list[Chunk], tokens: int) -> dict[int, list[int]]:
        """Drafts by row: no more than rows of logits and `tokens` are left, of which each has its share.

        Zeros stand for those that are on the device and that the host doesn't need to know.
        """
        found: dict[int, list[int]] = {}
        left, left_s = min(self._config.max_num_seqs - len(chunks), tokens), MASKS_S
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            share = min(-(-left // (len(chunks) - row)), MOST, _room(chunk))
            if sequence.drafts is not None and share > 0:
                drafts = sequence.drafts.propose(sequence.length, share, unseen=_unseen(sequence) is not None)
                if drafts and sequence.grammar is not None:
                    drafts = _allowed(sequence, sequence.drafts, drafts, left_s)
                    left_s -= len(drafts) * sequence.grammar.seconds
                if drafts:
                    found[row] = drafts
                    left -= len(drafts)
        return found

    def _count(self, sequence: Sequence, drafts: tuple[int, ...], outputs: list[TokenOutput]) -> None:
        drafted = len(drafts)
        accepted = sum(draft == each.token_id for draft, each in zip(drafts, outputs, strict=False))
        self.drafted += drafted
        self.accepted += accepted
        if sequence.drafts is not None:
            sequence.drafts.learn(sequence.length, drafted, accepted)
        if outputs:
            outputs[-1] = outputs[-1]._replace(accepted=accepted, rejected=drafted - accepted)

    def _pays(self, streams: int) -> bool:
        return self._config.speculation != "auto" or self._payoff(streams).try_drafts()

    def _payoff(self, streams: int) -> "Payoff":
        return self._payoffs.setdefault(streams.bit_length(), Payoff())


def _unseen(sequence: Sequence) -> DeviceDrafts | None:
    """Drafts of a sequence on the device; None where the host must know them, for a mask or for penalties."""
    if sequence.drafts is None or sequence.grammar is not None or penalizes(sequence.request.sampling):
        return None
    return sequence.drafts.on_device(sequence.length)


def _allowed(sequence: Sequence, own: Drafts, drafts: list[int], most_s: float) -> list[int]:
    """Drafts that a sequence's grammar takes, with masks that take `most_s` seconds at most."""
    assert sequence.grammar is not None
    found, each_s = sequence.grammar.takes(drafts), sequence.grammar.seconds
    if not found:  # they were wrong, and cost nothing
        own.learn(sequence.length, len(drafts), 0)
    return drafts[: found if found * each_s <= most_s else int(most_s / each_s)]


def _quick(sequence: Sequence) -> bool:
    """Whether masks behind drafts would come in time."""
    return sequence.grammar is None or sequence.grammar.seconds < MASKS_S


def _room(chunk: Chunk) -> int:
    """Drafts after which one token more may be chosen, of those that the delta rule reads at once."""
    sequence = chunk.sequence
    return min(sequence.max_tokens - len(sequence.generated) - 1, CHUNK - (chunk.end - chunk.start))


@dataclass(slots=True)
class Payoff:
    """Times and tokens of steps of about as many streams, with drafts and without.

    Seconds are those of one stream. A step without drafts behind one with drafts doesn't run ahead: its time
    is not a measurement of either kind, and what it takes beyond the usual time is charged to the drafts.
    """

    _seconds: tuple[deque[float], deque[float]] = field(
        default_factory=lambda: (deque(maxlen=KEPT), deque(maxlen=KEPT))
    )
    _tokens: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _first: list[int] = field(default_factory=lambda: [FIRST, FIRST])
    _since: list[int] = field(default_factory=lambda: [0, 0])  # steps, since the last one of the kind
    _last: bool = False  # whether the last step had drafts
    _row: int = 0  # steps of that kind in a row
    _budget: float = 0.0  # seconds that drafts have brought, and those that they may lose

    def note(self, drafted: bool, seconds: float, tokens: int, streams: int) -> None:
        """Note a step: the seconds that it took, and its tokens and sequences. `drafted`: it had drafts."""
        each, behind = seconds / streams, self._last and not drafted
        self._row = self._row + 1 if drafted == self._last else 1
        self._last = drafted
        self._since[drafted], self._since[not drafted] = 0, self._since[not drafted] + 1
        if self._first[drafted]:
            self._first[drafted] -= 1
            return
        if not behind:
            self._seconds[drafted].append(each)
        if drafted:
            self._tokens.append(tokens / streams)
        if len(self._seconds[False]) < FEW:
            return
        usual = median(self._seconds[False])
        brought = max(tokens / streams * usual - each, -WORST * usual) if drafted or behind else LOSS * usual
        self._budget = min(self._budget + brought, SPARE * usual)

    def try_drafts(self) -> bool:
        """Whether the next step is to have drafts, if there are any."""
        without, with_drafts = self._seconds
        if len(with_drafts) < FEW or len(without) < FEW:
            return len(without) >= FEW
        if self._budget < 0:
            return False
        cost = median(with_drafts)
        brings = fmean(self._tokens) * median(without) - cost
        better = brings > (GAIN - 1) * cost
        if self._last != better and self._row < LOOK:
            return self._last  # it has just begun to look at the other kind
        affordable = better or self._budget + LOOK * brings >= 0
        return better != (affordable and self._since[not better] >= AGAIN)

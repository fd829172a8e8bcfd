"""Who gets which token, and what is said of it: chosen ones, right drafts, and what a grammar forces."""

from collections.abc import Sequence as Rows
from itertools import zip_longest

from snugvl.engine.live import LiveRequests
from snugvl.engine.request import TokenOutput
from snugvl.engine.runner import Runner
from snugvl.engine.sampling.sampler import Sampled
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.sequence import Sequence, State, no_token


class Teller:
    """Gives sequences their tokens.

    Attributes:
        generated: tokens that were given; `forced`: those of them that a grammar forced.
    """

    def __init__(self, requests: LiveRequests, scheduler: Scheduler, runner: Runner) -> None:
        self.generated = self.forced = 0
        self._requests = requests
        self._scheduler = scheduler
        self._runner = runner

    def give(self, sequence: Sequence, result: Sampled) -> list[TokenOutput]:
        """Give a sequence a token, or end its request where there is none to be had."""
        if result.token_id is None:
            self._scheduler.withdraw(sequence)
            return self._requests.fail(sequence.request.request_id, no_token(sequence))
        self.generated += 1
        output = sequence.take(result)
        return [self._requests.end(sequence, output) if output.finish else output]

    def take(self, sequence: Sequence, drafts: tuple[int, ...], results: Rows[Sampled]) -> list[TokenOutput]:
        """Give a sequence its token, and another one for each draft that was right.

        `results`: one more than drafts; behind a draft that was wrong they count for nothing.
        """
        outputs = list[TokenOutput]()
        for draft, result in zip_longest(drafts, results):
            if sequence.state is State.FINISHED:  # a token of its own has ended it
                break
            if drafts and result.token_id is None:  # a guess may have broken it: it goes on without any
                sequence.drafts = None
                self._scheduler.withdraw(sequence)
                self._scheduler.preempt(sequence)
                break
            outputs += self.give(sequence, result)
            if draft is None or draft != result.token_id:
                break
            if sequence.state is State.RUNNING:
                sequence.confirm(state_follows=not self._runner.can_recompute)
                self._scheduler.publish(sequence)
        return outputs

    def skip_forced(self, sequence: Sequence) -> list[TokenOutput]:
        """Give a sequence that decodes the tokens that its grammar forces, if they are enough.

        Nobody computes logits for them; where log-probabilities are wanted, somebody has to.
        """
        mask, outputs = sequence.grammar, list[TokenOutput]()
        if mask is None or not mask.forced or sequence.request.sampling.logprobs is not None:
            return outputs
        if mask.ready and sequence.decodes and (mask.ends or len(mask.forced) >= self._runner.least_run):
            while sequence.state is State.RUNNING and mask.forced:
                self.forced += 1
                outputs += self.give(sequence, Sampled(mask.forced[0]))
        return outputs

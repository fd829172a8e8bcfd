"""Requests that are not finished: which tokens they get, and how each choice ends, with exactly one output.

    add ─► choices ─┬─ a token ends it: stop, length ─┬─► its blocks and slot are free; with the last
                    ├─ abort                          │   choice the request is forgotten
                    └─ fail, expire: all of them ─────┘

Tokens are sampled, drafts that were right, or forced by a grammar. Not thread-safe.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import zip_longest

from snugvl.engine.request import TokenOutput
from snugvl.engine.runner import Runner
from snugvl.engine.sampling.sampler import Sampled
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.sequence import Sequence, State, heir_of, no_token, past_deadline
from snugvl.errors import SnugvlError


class OutputProcessor(dict[str, list[Sequence]]):
    """By request, the choices that are not finished; gives them their tokens.

    Attributes:
        generated: tokens that were given; `forced`: those of them that a grammar forced.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, left: Callable[[], None]) -> None:
        """`left` is called when a choice has ended: what was held for it may go."""
        super().__init__()
        self.generated = self.forced = 0
        self._scheduler = scheduler
        self._runner = runner
        self._left = left

    @property
    def vision_bytes(self) -> int:
        """Bytes of the patches of their pictures, on the host; those of one picture count once."""
        items = (each.patches for choices in self.values() for each in choices[0].prompt.vision)
        return sum({id(patches): patches.nbytes for patches in items}.values())

    def give(self, sequence: Sequence, result: Sampled) -> list[TokenOutput]:
        """Give a sequence a token, or end its request where there is none to be had."""
        self._scheduler.publish(sequence)  # before the token, whose own slot may be in the air
        if result.token_id is None:
            self._scheduler.withdraw(sequence)
            return self.fail(sequence.request.request_id, no_token(sequence))
        self.generated += 1
        output = sequence.take(result)
        return [self.end(sequence, output) if output.finish else output]

    def take(self, sequence: Sequence, drafts: tuple[int, ...], results: Rows[Sampled]) -> list[TokenOutput]:
        """Give a sequence its token, and another one for each draft that was right.

        `results`: one more than drafts; behind a draft that was wrong they count for nothing.
        """
        outputs = list[TokenOutput]()
        for draft, result in zip_longest(drafts, results):
            if sequence.state is State.FINISHED:  # a token of its own has ended it
                break
            if drafts and result.token_id is None:  # a draft may have broken it: it goes on without any
                sequence.drafts = None
                self._scheduler.withdraw(sequence)
                self._scheduler.preempt(sequence)
                break
            outputs += self.give(sequence, result)
            if draft is None or draft != result.token_id:
                break
            if sequence.state is State.RUNNING:
                sequence.confirm(state_follows=not self._runner.can_recompute)
        return outputs

    def skip_forced(self, sequence: Sequence) -> list[TokenOutput]:
        """Give a sequence that decodes the tokens that its grammar forces, if they are enough.

        No logits are computed for them, so a request that wants log-probabilities computes them all.
        """
        mask, outputs = sequence.grammar, list[TokenOutput]()
        if mask is None or not mask.forced or sequence.request.sampling.logprobs is not None:
            return outputs
        if mask.ready and sequence.decodes and (mask.ends or len(mask.forced) >= self._runner.least_run):
            while sequence.state is State.RUNNING and mask.forced:
                self.forced += 1
                outputs += self.give(sequence, Sampled(mask.forced[0]))
        return outputs

    def end(self, sequence: Sequence, output: TokenOutput) -> TokenOutput:
        """Free a choice and, with the last one, forget its request."""
        self._scheduler.finish(sequence)
        if sequence.grammar is not None:
            sequence.grammar.drop()
        choices = self[output.request_id]
        choices.remove(sequence)
        if (heir := heir_of(sequence, choices)) is not None:
            self._scheduler.add(heir)
        if not choices:
            del self[output.request_id]
        self._left()
        return output

    def abort(self, request_id: str, choice: int | None = None) -> list[TokenOutput]:
        """End a request, or one choice of it; what is unknown or finished stays so."""
        return [
            self.end(sequence, TokenOutput(request_id, sequence.choice, None, finish="abort"))
            for sequence in list(self.get(request_id, []))
            if choice is None or sequence.choice == choice
        ]

    def fail(self, request_id: str, error: SnugvlError) -> list[TokenOutput]:
        """End a request with an error."""
        return [
            self.end(s, TokenOutput(request_id, s.choice, None, finish="error", error=error))
            for s in list(self[request_id])
        ]

    def fail_all(self, error: SnugvlError, *, started: bool = False) -> list[TokenOutput]:
        """End all requests with an error, or those that have `started`."""
        ids = [r for r, choices in self.items() if not started or any(s.started for s in choices)]
        return [output for request_id in ids for output in self.fail(request_id, error)]

    def expire(self) -> list[TokenOutput]:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        late = [(request_id, past_deadline(choices, now)) for request_id, choices in self.items()]
        return [output for request_id, error in late if error for output in self.fail(request_id, error)]

    def check(self) -> None:
        """Assert that choices, queues and requests agree."""
        queued = {id(s) for queue in (self._scheduler.running, self._scheduler.waiting) for s in queue}
        live = [s for choices in self.values() for s in choices]
        parked = {id(s) for leader in live for s in leader.siblings}
        assert queued | parked == {id(s) for s in live}, (
            "a live choice is neither queued nor parked, or vice versa"
        )
        assert not queued & parked, "a parked choice is queued"
        assert all(self.values()), "a finished request is still known"

"""Requests that are not finished, and how they end: each choice with exactly one output that says so.

    add ─► choices ─┬─ a token ends it: stop, length ─┬─► its blocks and slot are free; with the last
                    ├─ abort                          │   choice the request is forgotten
                    └─ fail, expire: all of them ─────┘

Not thread-safe.
"""

import time
from collections.abc import Callable

from snugvl.engine.request import TokenOutput
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.sequence import Sequence, heir_of, past_deadline
from snugvl.errors import SnugvlError


class LiveRequests(dict[str, list[Sequence]]):
    """By request, the choices that are not finished."""

    def __init__(self, scheduler: Scheduler, left: Callable[[], None]) -> None:
        """`left` is called when a choice ended without a token: what was held for it may go."""
        super().__init__()
        self._scheduler = scheduler
        self._left = left

    @property
    def vision_bytes(self) -> int:
        """Bytes of the patches of their pictures, on the host; those of one picture count once."""
        items = (each.patches for choices in self.values() for each in choices[0].prompt.vision)
        return sum({id(patches): patches.nbytes for patches in items}.values())

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
        if output.token_id is None:
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

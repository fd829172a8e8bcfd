"""The requests that an engine has: their choices, and how each of them ends.

add ─► choices ─┬─ a token ends it: stop, length ─┬─► its blocks and slot are free; with the last
                ├─ abort                          │   choice the request is forgotten
                └─ fail, expire: all of them ─────┘
"""

import time
from collections.abc import Callable
from math import inf

from snugvl.engine.request import CheckedPrompt, EngineRequest, TokenOutput
from snugvl.engine.sampling.grammar import gave_up
from snugvl.engine.sampling.penalties import penalizes
from snugvl.engine.sampling.sampler import plain, random_stream
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.sequence import Sequence
from snugvl.errors import DeadlineExceeded, EngineError, SnugvlError


class Requests(dict[str, list[Sequence]]):
    """Unfinished choices by request. `deadline`: no request's is earlier, in `time.monotonic()` seconds."""

    def __init__(self, scheduler: Scheduler, left: Callable[[], None]) -> None:
        """`left` is called when a choice has ended: what was held for it may go."""
        super().__init__()
        self.deadline = inf
        self._scheduler = scheduler
        self._left = left

    def add(self, choices: list[Sequence]) -> None:
        """Let the choices of a new request wait for their turn."""
        request = choices[0].request
        self[request.request_id] = choices
        self.deadline = min(self.deadline, inf if request.deadline is None else request.deadline)
        choices[0].siblings = choices[1:]
        self._scheduler.add(choices[0])

    @property
    def vision_bytes(self) -> int:
        """Bytes on the host of the patches of all requests' pictures; those of one picture count once."""
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
        outputs = [output for request_id, error in late if error for output in self.fail(request_id, error)]
        deadlines = (choices[0].request.deadline for choices in self.values())
        self.deadline = min((each for each in deadlines if each is not None), default=inf)
        return outputs

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


def choices_of(
    request: EngineRequest, prompt: CheckedPrompt, arrival: int, max_tokens: int
) -> list[Sequence]:
    """The choices of a request that is the `arrival`th."""
    streams = [random_stream(request.sampling.seed, choice) for choice in range(request.sampling.n)]
    ends = frozenset(request.sampling.stop_token_ids)
    ends = ends if request.sampling.ignore_eos else ends | request.stop_ids
    known = ends, plain(request.sampling), penalizes(request.sampling)
    return [
        Sequence(request, prompt, (arrival, choice), max_tokens, stream, *known)
        for choice, stream in enumerate(streams)
    ]


def no_token(sequence: Sequence) -> SnugvlError:
    """Why nothing could be sampled."""
    where = f"after {sequence.length} tokens of this request"
    if sequence.grammar is not None and sequence.grammar.error is not None:
        return gave_up(sequence.grammar.error, where)
    return EngineError(f"the model's logits are not finite {where}")


def past_deadline(live: list[Sequence], now: float) -> DeadlineExceeded | None:
    """The error that ends a request past its deadline, or None; `live`: its choices that are not finished."""
    deadline = live[0].request.deadline
    if deadline is None or now < deadline:
        return None
    done = sum(len(sequence.generated) for sequence in live)
    return DeadlineExceeded(f"the deadline passed {now - deadline:.3f} s ago, with {done} tokens generated")


def heir_of(ended: Sequence, live: list[Sequence]) -> Sequence | None:
    """Who prefills the prompt when the choice that was to do it ends; a parked one just goes."""
    if ended.siblings:
        heir, *rest = ended.siblings
        heir.siblings, ended.siblings = rest, []
        return heir
    for sequence in live:
        if ended in sequence.siblings:
            sequence.siblings.remove(ended)
    return None

"""One choice of one request, on its way through the engine.

    tokens    [ prompt ids …                          | generated ids … ]
                                                                    ↑ the newest is known, not yet computed
    computed  ──────────────── in the KV cache ────────────────────→│
    vision        ▒▒▒▒▒▒▒▒      ▒▒▒▒▒▒▒▒                              placeholders, replaced by encoder rows
                  item 0        item 1

A sequence that is preempted keeps its tokens, its counts and its random stream and loses only its blocks
and its slot, so that it goes on as if nothing had happened once `computed` has caught up again. Where those
blocks have not been taken in the meantime, the prefix cache finds them.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from snugvl.engine.drafts import Drafts
from snugvl.engine.request import CheckedPrompt, EngineRequest, FinishReason, TokenOutput
from snugvl.engine.sampling.likeliest import Sampled
from snugvl.engine.sampling.masks import Mask

Key = bytes
"""A hash of all that a full block's contents depend on (`blocks.py`)."""


class State(Enum):
    """The state of a sequence: waiting, running or finished."""

    PARKED = auto()  # waits for its request's prompt, which another choice is prefilling
    WAITING = auto()  # owns no blocks; new, or preempted
    RUNNING = auto()  # owns blocks and a slot
    FINISHED = auto()  # owns nothing, was reported


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, its blocks, and what sampling remembers.

    Attributes:
        order: arrival of the request and number of the choice; a higher one is younger.
        max_tokens: new tokens at most, resolved.
        computed: tokens whose keys and values are in the cache, and that its recurrent state has taken in.
        lag: tokens behind those that the network has read, but its recurrent state hasn't taken in: drafts
            that were right (`speculation.py`).
        goal: tokens that were known when it was admitted; until they are computed it prefills.
        slot: a number below `max_num_seqs` that is its own while it runs: where its recurrent state is.
        random: the choice's own stream, one number per sampled token: never shared, never rewound, so
            neither strangers in the batch nor a preemption change what is drawn.
        ends: tokens that end it.
        plain: whether it takes the likeliest token that its grammar allows, and wants no more.
        penalized: whether what was said before changes its scores.
        counts: how often each id was generated, where it is penalized.
        keys: of its first full blocks, for the prefix cache; they follow from the tokens alone.
        published: how many blocks of `table` the prefix cache can find.
        marks: counts of the prompt's tokens behind which a snapshot of its state is wanted, ascending.
        kept: tokens at its last snapshot, or at the one that it started from.
        trail: key of the snapshot that moves along with its answer.
        grammar: masks of the choice's own state, which has seen `generated` and what it forces next.
        siblings: parked choices that start from this one's prompt once it is computed.
        started: whether it has ever run.
        cached_tokens: that the prefix cache had when it first ran.
        drawn: random numbers of the next tokens, once they are drawn: a step that failed takes them again.
        alone: whether its next step must have nothing beside it, because one ran out of memory.
        drafts: its drafts; None where it has none.
    """

    request: EngineRequest
    prompt: CheckedPrompt
    order: tuple[int, int]
    max_tokens: int
    random: random.Random
    ends: frozenset[int]
    plain: bool
    penalized: bool
    generated: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    table: list[int] = field(default_factory=list)
    computed: int = 0
    lag: int = 0
    goal: int = 0
    slot: int | None = None
    keys: list[Key] = field(default_factory=list)
    published: int = 0
    marks: list[int] = field(default_factory=list)
    kept: int = 0
    trail: Key | None = None
    state: State = State.PARKED
    siblings: list["Sequence"] = field(default_factory=list)
    started: bool = False
    cached_tokens: int = 0
    drawn: list[float] = field(default_factory=list)
    alone: bool = False
    grammar: Mask | None = None
    drafts: Drafts | None = None

    @property
    def choice(self) -> int:
        """Index of the choice."""
        return self.order[1]

    @property
    def length(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt.ids) + len(self.generated)

    @property
    def pending(self) -> int:
        """Tokens known but not computed; while it decodes 1, and those that its grammar forced."""
        return self.length - self.computed

    @property
    def read(self) -> int:
        """Tokens that the network has read."""
        return self.computed + self.lag

    @property
    def decodes(self) -> bool:
        """Whether everything that was known when it was admitted is computed."""
        return self.computed >= self.goal

    @property
    def prefills(self) -> bool:
        """Whether more than a token of that is left; its blocks are its own already."""
        return self.pending > 1 and not self.decodes

    @property
    def can_sample(self) -> bool:
        """Whether it is known which tokens may come next."""
        return self.grammar is None or self.grammar.ready

    @property
    def num_choices(self) -> int:
        """Running sequences it is or is about to become."""
        return 1 + len(self.siblings)

    def draw(self, ahead: int = 0) -> float:
        """The random number, from 0 to 1, of its next token, or of one after `ahead` that aren't read yet."""
        while len(self.drawn) <= ahead:
            self.drawn.append(self.random.random())
        return self.drawn[ahead]

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids `start … end - 1`."""
        prompt = len(self.prompt.ids)
        return [*self.prompt.ids[start:end], *self.generated[max(0, start - prompt) : max(0, end - prompt)]]

    def rewind(self, blocks: int = 0, block_size: int = 0) -> None:
        """Count the first `blocks` blocks as computed, as they are from the prefix cache, and no more."""
        self.published, self.lag = blocks, 0
        self.computed = blocks * block_size
        if self.drafts is not None:
            self.drafts.entries = self.computed

    def confirm(self, *, state_follows: bool) -> None:
        """The first draft behind what the network has read was right; `state_follows`: later, if at all."""
        if self.drafts is not None and self.drafts.entries == self.read - 1:
            self.drafts.entries += 1  # made on the way
        if state_follows:
            self.lag += 1
        else:
            self.computed += 1

    def take(self, result: Sampled) -> TokenOutput:
        """Add a token that was chosen, and say so."""
        assert result.token_id is not None, "nothing was chosen"
        named = (self.request.request_id, self.choice, result.token_id)
        scores = (result.logprob, result.top_logprobs, self.append(result.token_id))
        prompt = (self.prompt.scores or ()) if len(self.generated) == 1 else ()
        return TokenOutput(*named, *scores, cached_tokens=self.cached_tokens, prompt=tuple(prompt))

    def append(self, token: int) -> FinishReason | None:
        """Add a generated token; says whether the choice ends with it."""
        self.generated.append(token)
        if not self.plain and not self.request.sampling.greedy:
            self.draw()  # also for a forced token, or later ones would depend on whether it was skipped
        if self.drawn:
            self.drawn = self.drawn[1:]
        self.alone = False
        if self.penalized:
            self.counts[token] += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.ends:
            return "stop"
        return "length" if len(self.generated) >= self.max_tokens else None


def slot_of(sequence: Sequence) -> int:
    """The slot of a sequence that runs."""
    assert sequence.slot is not None, "only a running sequence has a slot"
    return sequence.slot

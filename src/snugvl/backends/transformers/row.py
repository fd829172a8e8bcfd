"""One choice of one request on its way through transformers, and what a request brings."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from snugvl.engine.request import FinishReason
from snugvl.engine.sampling.grammar import GrammarState, Mask, TokenGrammar
from snugvl.engine.sampling.sampler import Choice
from snugvl.engine.sequence import random_stream
from snugvl.inputs.prompt import PreparedPrompt
from snugvl.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class ModelPrompt:
    """A prompt as transformers takes it.

    Attributes:
        prompt: token ids and how many of them are images'.
        inputs: of `generate`, batch of one: `input_ids`, `attention_mask`, `pixel_values`, … on the host.
        pictures: images and videos among them.
    """

    prompt: PreparedPrompt
    inputs: Mapping[str, torch.Tensor]
    pictures: int = 0

    @property
    def nbytes(self) -> int:
        """Of the inputs; nearly all of it is pixels."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequest:
    """One prompt and how to continue it.

    Attributes:
        stop_ids: token ids that end a choice, unless `ignore_eos`.
        deadline: `time.monotonic()` seconds after which it ends with `DeadlineExceeded`.
        vocabulary: the distinct ids of the prompt, for the repetition penalty.
    """

    request_id: str
    prompt: ModelPrompt
    sampling: SamplingParams
    stop_ids: frozenset[int]
    deadline: float | None
    grammar: TokenGrammar | None
    vocabulary: frozenset[int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included."""
        return len(self.prompt.prompt.prompt_ids)


@dataclass(slots=True, eq=False)
class Row:
    """One choice: its tokens and what sampling remembers.

    Attributes:
        max_tokens: new tokens at most, resolved.
        random: the choice's own stream, one number per sampled token, as in our engine.
        alone: whether it must run without others, because a batch it was in failed.
        started: whether its prompt was ever computed.
    """

    request: ModelRequest
    choice: int
    max_tokens: int
    random: random.Random
    grammar: Mask | None
    generated: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    alone: bool = False
    started: bool = False

    @property
    def length(self) -> int:
        """Tokens known: prompt and generated."""
        return self.request.prompt_tokens + len(self.generated)

    @property
    def longest(self) -> int:
        """Tokens it may grow to."""
        return self.request.prompt_tokens + self.max_tokens

    def ask(self, row: int) -> Choice:
        """What it brings to the sampler, at `row` of the logits. Takes a random number."""
        params = self.request.sampling
        uniform = 0.0 if params.greedy else self.random.random()
        return Choice(row, params, self.request.vocabulary, self.counts, uniform, self.grammar)

    def append(self, token: int) -> FinishReason | None:
        """Add a generated token; says whether the choice ends with it."""
        self.generated.append(token)
        self.counts[token] += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if token in self.request.stop_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if len(self.generated) >= self.max_tokens else None


def rows_of(request: ModelRequest, max_tokens: int, masked: Callable[[GrammarState], Mask]) -> list[Row]:
    """The choices of a request. `masked`: makes the masks of one of them."""
    return [
        Row(
            request,
            choice,
            max_tokens,
            random_stream(request.sampling.seed, choice),
            None if request.grammar is None else masked(request.grammar.start()),
        )
        for choice in range(request.sampling.n)
    ]

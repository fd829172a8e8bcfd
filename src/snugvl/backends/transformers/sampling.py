"""A request and its answers on their way through `generate`, which only learns which token to take.

`generate` calls a `SamplingProcessor` with the logits of every token. Our engine's sampler chooses
(`engine/sampling/sampler.py`), the token goes to its reader at once, and all others are forbidden, so that
`generate` takes this one. A seed, a penalty or a grammar therefore means the same here as in our engine.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from snugvl.backends.engine_thread import Receiver
from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import FinishReason, Sampled, TokenOutput
from snugvl.engine.sampling.grammar import TokenGrammar, gave_up
from snugvl.engine.sampling.masks import Mask, MaskPace, MaskThreads
from snugvl.engine.sampling.sampler import SamplerInput, plain, random_stream, sample
from snugvl.errors import DeadlineExceeded, EngineError, SnugvlError
from snugvl.inputs.prompt import PreparedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class ModelPrompt(PreparedPrompt):
    """A prompt as transformers takes it.

    Attributes:
        inputs: inputs of `generate`, batch of one: `input_ids`, `attention_mask`, … on the host.
        pictures: number of images and videos among them.
    """

    inputs: Mapping[str, torch.Tensor] = field(kw_only=True)
    pictures: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt, image tokens included."""
        return len(self.prompt_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs, nearly all of them pixels."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One request, and how far it came.

    Attributes:
        stop_ids: token ids that end an answer, unless `sampling.ignore_eos`.
        deadline: `time.monotonic()` seconds after which it ends with `DeadlineExceeded`.
        dropped: whether its reader left. Any thread may set it; the engine's looks before every token.
        generated: number of tokens of all its answers.
        failed: whether it ended with an error.
        scores: the second and later tokens of the prompt with their log-probabilities, once they are known.
    """

    prompt: ModelPrompt
    sampling: SamplingParams
    stop_ids: frozenset[int]
    receiver: Receiver
    deadline: float | None = None
    grammar: TokenGrammar | None = None
    dropped: bool = False
    generated: int = 0
    failed: bool = False
    scores: tuple[Sampled, ...] = ()

    @property
    def over(self) -> bool:
        """Whether no more of it is wanted."""
        return self.dropped or self.failed or self.receiver.done

    def drop(self) -> None:
        """Note that its reader has left."""
        self.dropped = True

    def fail(self, error: SnugvlError) -> None:
        """End it with an error."""
        self.failed = True
        self.receiver.fail(error)

    def expire(self) -> None:
        """End it if its deadline has passed."""
        late_s = -1.0 if self.deadline is None else time.monotonic() - self.deadline
        if late_s >= 0:
            text = f"the deadline passed {late_s:.3f} s ago, with {self.generated} tokens generated"
            self.fail(DeadlineExceeded(text))


class SamplingProcessor(LogitsProcessor):
    """One choice of a request: samples its tokens, one at every call, and remembers what sampling needs.

    Attributes:
        most: new tokens at most.
        tokens: tokens that were generated.
        over: whether `generate` shall stop.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choice: int,
        most: int,
        masks: MaskThreads,
        pace: MaskPace,
        between: Callable[["SamplingProcessor"], None],
    ) -> None:
        """`pace`: one for all choices of a request. `between` is called after every token."""
        self.request = request
        self.most = most
        self.tokens: list[int] = []
        self.over = False
        self._choice = choice
        self._masks = masks
        self._between = between
        self._mask = None if request.grammar is None else Mask(request.grammar.start(), masks, pace)
        self._random: random.Random = random_stream(request.sampling.seed, choice)
        self._vocabulary = frozenset(request.prompt.prompt_ids)
        self._counts: Counter[int] = Counter()

    @property
    def where(self) -> str:
        """Text of how far it came, for errors."""
        return f"after {self.request.prompt.tokens + len(self.tokens):,} tokens of this request"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[1, vocab]` with -inf for every token but the one that was sampled."""
        if self.over:  # where `generate` notices the end a step late
            return scores
        sampling = self.request.sampling
        uniform = 0.0 if sampling.greedy else self._random.random()
        self._masks.begin()
        ids = self.request.prompt.prompt_ids
        said = (*ids, *self.tokens) if sampling.no_repeat_ngram_size else ()
        asked = SamplerInput(
            0, sampling, self._vocabulary, self._counts, uniform, self._mask, said, plain=plain(sampling)
        )
        (result,) = sample(scores, [asked])
        if result.token_id is None:
            self.request.fail(self._no_token())
            self.over = True
            return scores
        self._take(result, result.token_id)
        self._between(self)
        only = torch.full_like(scores, -torch.inf)
        only[:, result.token_id] = 0.0
        return only

    def _take(self, result: Sampled, token: int) -> None:
        """Hand out a token, and see whether the answer ends with it."""
        self.tokens.append(token)
        self._counts[token] += 1
        self.request.generated += 1
        finish = self._finish(token)
        scores = self.request.scores if len(self.tokens) == 1 else ()
        output = TokenOutput(
            "", self._choice, token, result.logprob, result.top_logprobs, finish, prompt=scores
        )
        stopped = self.request.receiver.receive(output)
        self.over = stopped or finish is not None
        if self._mask is not None and not self.over:
            self._mask.accept(token)

    def _finish(self, token: int) -> FinishReason | None:
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if token in self.request.stop_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if len(self.tokens) >= self.most else None

    def _no_token(self) -> SnugvlError:
        """The error that no token could be sampled, with the reason."""
        if self._mask is not None and self._mask.error is not None:
            return gave_up(self._mask.error, self.where)
        return EngineError(f"the model's logits are not finite {self.where}")


class StopWhenOver(StoppingCriteria):
    """Ends `generate` when an answer is complete, or is no longer wanted."""

    def __init__(self, sampler: SamplingProcessor) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether each row is done, `[rows]`."""
        return torch.full((len(input_ids),), self._sampler.over, device=input_ids.device)

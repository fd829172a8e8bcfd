"""Sampling parameters, checked once where they enter."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from snugvl.core.sizes import plain_number
from snugvl.errors import RequestError, WrongType

MAX_STOP = 64  # stop strings
MAX_STOP_CHARACTERS = 1024  # of all of them
MAX_SCORES = 131_072  # log-probabilities of a prompt's tokens and their alternatives in one answer
_RANGES = {  # lowest, highest, and whether the lowest itself is allowed
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
_MOST = 2**31  # of what has no other limit: engines count in 32 bits
_COUNTS = {
    "max_tokens": (1, _MOST),
    "top_k": (0, _MOST),
    "n": (1, 128),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "no_repeat_ngram_size": (0, 256),
    "no_repeat_window": (0, _MOST),
}
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "stop": ((tuple, list), "strings"),
    "stop_token_ids": ((tuple, list), "token ids"),
    "logit_bias": ((Mapping,), "token ids with numbers"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. The defaults are greedy.

    Applied in this order: `logit_bias`, repetition, frequency and presence penalty, `no_repeat_ngram_size`,
    temperature, `top_k`, `top_p`, `min_p`. Penalties follow OpenAI's definition (over generated tokens) and,
    for `repetition_penalty`, CTRL's (https://arxiv.org/abs/1909.05858, over prompt and generated tokens).

    Attributes:
        max_tokens: new tokens at most, or None for what the context leaves.
        temperature: 0 is greedy.
        top_p: 0 also means greedy: `temperature` becomes 0 then, as not every engine takes a `top_p` of 0.
        top_k: 0 is off.
        no_repeat_ngram_size: no run of this many tokens comes twice, prompt and generated tokens together, as
            in transformers; a grammar that leaves no other token wins. 0 is off.
        no_repeat_window: number of last tokens in which `no_repeat_ngram_size` looks for such runs; 0: all.
        seed: same seed and same request, same tokens; None draws one.
        logprobs: number of alternatives to report with each token; 0 reports the token's own only.
        prompt_logprobs: whether the tokens of a bare prompt (no conversation) are reported as well, with as
            many alternatives, and the token that ends the answer.
        n: number of choices: answers to the same prompt.
        stop: strings that end the answer and are not part of it; a single string may be given as it is.
        stop_token_ids: token ids that end the answer and are not part of it.
        special: whether control tokens that don't end the answer are part of its text, as checkpoints for
            documents mark boxes with them.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens` (for measuring).

    Raises:
        RequestError: a value out of range; `field` names it.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    no_repeat_window: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    special: bool = False
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):  # as a sequence, each of its characters would end the answer
            object.__setattr__(self, "stop", (stop,))
        for item in fields(self):
            value = plain_number(getattr(self, item.name))
            object.__setattr__(self, item.name, value)
            if item.name in _RANGES:
                _check_range(item.name, value)
            elif item.name in _COUNTS and (value is not None or item.default is not None):
                _check_count(item.name, value)
            elif item.name in _KINDS and not isinstance(value, _KINDS[item.name][0]):
                raise WrongType(f"{item.name} takes {_KINDS[item.name][1]}, not {value!r}", field=item.name)
        if self.top_p == 0:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or not _number(bias) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias maps token ids to numbers from -100 to 100, not {token!r}: {bias!r}",
                    field="logit_bias",
                )
        if self.prompt_logprobs and self.logprobs is None:
            raise RequestError("prompt_logprobs needs logprobs", field="logprobs")
        _check_stop(self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop takes non-empty strings, not {text!r}", field="stop")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return self.temperature == 0.0


def chosen(
    sampling: SamplingParams | None, max_tokens: int | None, temperature: float | None
) -> SamplingParams | None:
    """`sampling` with `max_tokens` and `temperature` in it where given; None where all three are None.

    Raises:
        RequestError: a value out of range.
        WrongType: `sampling` is something else, such as a question that was given after a picture.
    """
    other: object = sampling
    if other is not None and not isinstance(other, SamplingParams):
        given = reprlib.repr(other)
        hint = "a picture and words are one message: chat(snugvl.user(picture, 'words'))"
        if isinstance(other, Mapping):
            hint = f"its fields are arguments of it: snugvl.SamplingParams(**{given})"
        raise WrongType(f"sampling takes a snugvl.SamplingParams, not {given}; {hint}", field="sampling")
    said = {"max_tokens": max_tokens, "temperature": temperature}
    said = {name: value for name, value in said.items() if value is not None}
    return replace(sampling or SamplingParams(), **said) if said else sampling  # type: ignore[arg-type]


def check_scores(sampling: SamplingParams, tokens: int | None) -> None:
    """Refuse `prompt_logprobs` of a conversation, or of a prompt so long that they would be many megabytes.

    Args:
        tokens: number of tokens of a bare prompt, 0 where not counted yet; None: it is a conversation.

    Raises:
        RequestError: says what is possible instead.
    """
    if not sampling.prompt_logprobs:
        return
    if tokens is None:
        raise RequestError(
            "log-probabilities of the prompt's own tokens are for bare prompts alone, not for conversations; "
            "send text as the prompt, or leave prompt_logprobs out (the answer's tokens have theirs)",
            field="logprobs",
        )
    most = MAX_SCORES // (1 + (sampling.logprobs or 0))
    if tokens > most:
        raise RequestError(
            f"the prompt has {tokens:,} tokens; with logprobs={sampling.logprobs} the limit is "
            f"{most:,}; shorten the prompt, or ask for fewer alternatives",
            field="logprobs",
        )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_stop(stop: tuple[str, ...]) -> None:
    """Refuse too many or too long stop strings: each is looked for in every piece of every choice."""
    held = sum(len(text) for text in stop if isinstance(text, str))
    if len(stop) > MAX_STOP or held > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"{len(stop)} stop strings of {held:,} characters in all; at most {MAX_STOP} of "
            f"{MAX_STOP_CHARACTERS:,} are taken",
            field="stop",
        )


def _check_range(name: str, value: float) -> None:
    low, high, inclusive = _RANGES[name]
    if not _number(value) or not low <= value <= high or (value == low and not inclusive):
        start = "from" if inclusive else "above"
        raise RequestError(f"{name} must be a number {start} {low:g} to {high:g}, not {value!r}", field=name)


def _check_count(name: str, value: int) -> None:
    low, high = _COUNTS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        within = isinstance(value, int) and value <= high  # the limit is said where it is what is broken
        bounds = f"from {low} on" if high == _MOST and within else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {bounds}, not {value!r}", field=name)

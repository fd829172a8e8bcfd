"""A completion in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snugvl.backends.protocol import Logprob, Usage
from snugvl.server.generation import Finished
from snugvl.server.openai.common import FINGERPRINT, new_id, now, total, usage_of
from snugvl.server.openai.logprobs import LOWEST


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer has to know of its request.

    Attributes:
        model: the name that the request used.
        n: choices of each prompt.
        echoed: what the choices of each prompt start with.
    """

    model: str
    n: int
    echoed: tuple[str, ...]


def head(model: str) -> dict[str, Any]:
    """What every chunk of an answer, or the whole, starts with."""
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": now(),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def completion(asked: Asked, answers: Sequence[tuple[list[Finished], Usage]]) -> dict[str, Any]:
    """The whole answer to all prompts."""
    choices = []
    for prompt, (finished, _) in enumerate(answers):
        for k, choice in enumerate(finished):
            logprobs = Logprobs().add(choice.logprobs) if choice.logprobs else None
            choices.append(
                {
                    "index": prompt * asked.n + k,
                    "text": asked.echoed[prompt] + choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
    usage = total(usage for _, usage in answers)
    return {**head(asked.model), "choices": choices, "usage": usage_of(usage)}


class Logprobs:
    """Log-probabilities in the form that completions have: four lists of equal length."""

    def __init__(self) -> None:
        self._offset = 0  # characters of the answer so far

    def add(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        """The lists of the next tokens."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            lists["tokens"].append(token.token)
            lists["token_logprobs"].append(max(token.logprob, LOWEST))
            lists["top_logprobs"].append({other.token: max(other.logprob, LOWEST) for other in token.top})
            lists["text_offset"].append(self._offset)
            self._offset += len(token.token)
        return lists

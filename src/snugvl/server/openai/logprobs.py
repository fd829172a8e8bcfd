"""Log-probabilities as chat completions and responses write them."""

from collections.abc import Iterable
from typing import Any

from snugvl.backends.protocol import Logprob, TokenLogprob

LOWEST = -9999.0  # OpenAI's word for "never"; JSON has no minus infinity


def token_logprob(token: TokenLogprob) -> dict[str, Any]:
    """One token."""
    return {"token": token.token, "bytes": list(token.bytes), "logprob": max(token.logprob, LOWEST)}


def token_logprobs(tokens: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Tokens with their alternatives."""
    return [
        {**token_logprob(token), "top_logprobs": [token_logprob(other) for other in token.top]}
        for token in tokens
    ]

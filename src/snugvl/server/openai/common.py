"""What the answers of chat completions, completions and responses share."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response

from snugvl.core.messages import Logprob, TokenLogprob
from snugvl.errors import RequestError
from snugvl.server.fields import at_most
from snugvl.server.generation import AnswerUsage
from snugvl.server.openai.sampling import StreamOptions
from snugvl.server.streaming import Event, compact, events_document
from snugvl.version import __version__

LOWEST = -9999.0  # OpenAI's word for "never"; JSON has no minus infinity

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Accepted; this server keeps nothing"),
    at_most(16),
]

Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Field(description="of a model that thinks: with none and minimal it doesn't, with the others it does"),
]

EVENTS_DOCUMENT: dict[str, Any] = {"content": events_document("with stream: true")}


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What an answer, or every chunk of one, begins with. `prefix`: of its id; `kind`: its `object`."""
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": now(),
        "model": model,
        "system_fingerprint": f"snugvl-{__version__}",
    }


def effort_of(effort: Effort | None) -> dict[str, Any]:
    """The variable of the chat template that says how much to think."""
    return {} if effort is None else {"reasoning_effort": effort}


def usage_of(usage: AnswerUsage) -> dict[str, Any]:
    """Tokens of a request; `image_tokens` is our addition. What the answer's are stands there if some were
    thought or guessed."""
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "image_tokens": usage.image_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        **({"completion_tokens_details": details} if any(details.values()) else {}),
    }


def stream_options_of(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """What a stream tells besides its text.

    Raises:
        RequestError: options of a stream, but no stream.
    """
    if options is not None and not stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    return options or StreamOptions(include_usage=False, continuous_usage_stats=False)


def json_answer(answer: Mapping[str, Any]) -> Response:
    """A complete answer. Plain dicts: with log-probabilities, OpenAI's types would take half a second."""
    return Response(to_json(answer), media_type="application/json")


class ChunkWriter:
    """The chunks of one stream: what all of them repeat, around their choices."""

    def __init__(self, head: dict[str, Any], options: StreamOptions) -> None:
        self._head = head
        self._options = options
        self._tail: dict[str, Any] = {"usage": None} if options.include_usage else {}

    def event(self, choice: dict[str, Any], prompt_tokens: int, completion_tokens: int) -> Event:
        """A chunk with one choice; the tokens are those of its request so far."""
        tail = self._tail
        if self._options.include_usage and self._options.continuous_usage_stats:  # as vLLM reads both
            total = prompt_tokens + completion_tokens
            tail = {
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": completion_tokens,
                    "total_tokens": total,
                }
            }
        return Event(compact({**self._head, "choices": [choice], **tail}))

    def end(self, usage: AnswerUsage) -> Iterator[Event]:
        """What ends the stream."""
        if self._options.include_usage:
            yield Event(compact({**self._head, "choices": [], "usage": usage_of(usage)}))
        yield Event("[DONE]")


def token_logprob(token: TokenLogprob) -> dict[str, Any]:
    """One token."""
    return {"token": token.token, "bytes": list(token.bytes), "logprob": max(token.logprob, LOWEST)}


def token_logprobs(tokens: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Tokens with their alternatives."""
    return [
        {**token_logprob(token), "top_logprobs": [token_logprob(other) for other in token.top]}
        for token in tokens
    ]

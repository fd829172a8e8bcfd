"""What chat completions and completions share in their answers."""

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response

from snugvl.backends.protocol import Delta, Usage
from snugvl.errors import EngineError, RequestError
from snugvl.server.fields import at_most
from snugvl.server.generation import Generation
from snugvl.server.openai.sampling import StreamOptions
from snugvl.server.streaming import Event, events_document
from snugvl.version import __version__

FINGERPRINT = f"snugvl-{__version__}"
DONE = Event("[DONE]")

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Accepted; this server keeps nothing"),
    at_most(16),
]

EVENTS_DOCUMENT: dict[str, Any] = {"content": events_document("with stream: true")}


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def usage_of(usage: Usage) -> dict[str, Any]:
    """Tokens of a request; `image_tokens` is our addition."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"image_tokens": usage.image_tokens},
    }


def total(usages: Iterable[Usage]) -> Usage:
    """Tokens of several requests together."""
    counted = list(usages)
    return Usage(
        sum(usage.prompt_tokens for usage in counted),
        sum(usage.completion_tokens for usage in counted),
        sum(usage.image_tokens for usage in counted),
    )


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether a stream ends with a chunk of usage.

    Raises:
        RequestError: options of a stream, but no stream.
    """
    if options is not None and not stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    return options is not None and options.include_usage


def finish_of(delta: Delta) -> str | None:
    """The finish reason of a delta.

    Raises:
        EngineError: the engine gave the answer up.
    """
    if delta.finish_reason == "abort":
        raise EngineError("the request was aborted before its answer was complete")
    return delta.finish_reason


def json_answer(answer: Mapping[str, Any]) -> Response:
    """A complete answer. Plain dicts: with log-probabilities, OpenAI's types would take half a second."""
    return Response(to_json(answer), media_type="application/json")


def usage_at_end(generation: Generation) -> Usage:
    """The tokens of a generation that was read to its end.

    Raises:
        EngineError: it wasn't complete.
    """
    if generation.usage is None:
        raise EngineError("the request ended before its answer was complete")
    return generation.usage

"""What a response looks like: for the OpenAPI document. The tests hold it against OpenAI's own types.

OpenAI's `Response` describes dozens of items that only its own tools make; here are those that this server
makes.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from snugvl.server.openai.common import Metadata

Status = Literal["in_progress", "completed", "incomplete"]


class _Closed(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class AlternativeToken(_Closed):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ResponseToken(AlternativeToken):
    """A token of the answer, with the most likely others."""

    top_logprobs: list[AlternativeToken]


class ResponseText(_Closed):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[ResponseToken]


class ResponseMessage(_Closed):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[ResponseText]


class ResponseCall(_Closed):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class InputTokens(_Closed):
    """What the input consists of; `image_tokens` is our addition."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int


class OutputTokens(_Closed):
    """What the output consists of."""

    reasoning_tokens: int


class ResponseUsage(_Closed):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(_Closed):
    """Why a streamed response failed."""

    code: str
    message: str


class IncompleteDetails(_Closed):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningOff(_Closed):
    """The models served here don't reason apart from their answer."""

    effort: None
    summary: None


class ResponseAnswer(_Closed):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Metadata
    model: str
    output: list[ResponseMessage | ResponseCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningOff
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None

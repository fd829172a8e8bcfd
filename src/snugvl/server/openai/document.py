"""What answers look like: for the OpenAPI document. The tests hold the answers against OpenAI's types.

OpenAI's own types would do, but importing them takes as long as the rest of the server; and its `Response`
describes dozens of items that only its own tools make. Here are those that this server makes.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from snugvl.server.openai.common import Effort, Metadata

Status = Literal["in_progress", "completed", "incomplete"]


class _Closed(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptTokens(_Closed):
    """Kinds of tokens of a prompt."""

    image_tokens: int
    cached_tokens: int


class CompletionTokens(_Closed):
    """Kinds of tokens of an answer, and rejected drafts (`--speculation`)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(_Closed):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | None = None


class AlternativeToken(_Closed):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class AnswerToken(AlternativeToken):
    """A token of the answer, with the most likely others."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(_Closed):
    """Log-probabilities of a choice."""

    content: list[AnswerToken]
    refusal: None


class ChatFunction(_Closed):
    """A function with its arguments, a JSON object as text."""

    name: str
    arguments: str


class ChatCall(_Closed):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatAnswer(_Closed):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatCall] = []


class ChatChoice(_Closed):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Closed):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(_Closed):
    """Log-probabilities of a choice: four lists of equal length. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Closed):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_Closed):
    """The continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage


class ResponseText(_Closed):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[AnswerToken]


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
    namespace: str | None = None
    arguments: str
    status: Status


class ResponseCustomCall(_Closed):
    """A call of a free-form tool."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


class InputTokens(_Closed):
    """Kinds of input tokens; `image_tokens` is our addition."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int


class OutputTokens(_Closed):
    """Kinds of output tokens."""

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


class Reasoning(_Closed):
    """The reasoning that was asked for; there are no summaries, as items have all of it."""

    effort: Effort | None
    summary: None


class ReasoningText(_Closed):
    """A piece of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseReasoning(_Closed):
    """The model's reasoning before its answer."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None
    status: Status


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
    output: list[ResponseReasoning | ResponseMessage | ResponseCall | ResponseCustomCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: Reasoning
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

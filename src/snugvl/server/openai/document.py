"""What completions look like: for the OpenAPI document. The tests hold the answers against OpenAI's types.

OpenAI's own types would do, but importing them takes as long as the rest of the server.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Closed(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptTokens(_Closed):
    """What is among the tokens of a prompt."""

    image_tokens: int


class CompletionUsage(_Closed):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class OtherToken(_Closed):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatToken(OtherToken):
    """A token of the answer, with the most likely others."""

    top_logprobs: list[OtherToken]


class ChatLogprobs(_Closed):
    """Log-probabilities of a choice."""

    content: list[ChatToken]
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
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
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
    """Log-probabilities of a choice: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
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

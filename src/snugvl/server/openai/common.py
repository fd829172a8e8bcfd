"""Shared parts of chat completions, completions and responses: fields of sampling, forms of answers.

The classes at the end describe answers for the OpenAPI document; the tests hold the answers against OpenAI's
own types. Importing those takes as long as the rest of the server, and its `Response` describes dozens of
items that only its own tools make.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import to_json
from starlette.responses import Response

from snugvl.core.messages import Logprob, TokenLogprob
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.server import forms
from snugvl.server.fields import WHOLE, Body, Part, at_most
from snugvl.server.forms import MinP, Penalty, RepetitionPenalty, Stop, Temperature, TopK, TopP, stops_of
from snugvl.server.generation import AnswerUsage
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

MAX_TOKENS = 2**31


def no_limit(value: object) -> object:
    """Turn -1, by which some clients ask for as many tokens as fit, into None."""
    return None if type(value) is int and value == -1 else value


MaxTokens = Annotated[
    Annotated[
        int, Field(ge=1, le=MAX_TOKENS, description="at most; null and -1: what the context leaves"), WHOLE
    ]
    | None,
    BeforeValidator(no_limit),
]
MAX_BIASES = 1024  # OpenAI takes 300
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    at_most(MAX_BIASES),
]


class StreamOptions(Part):
    """Options of what a stream has besides its text."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "stream_options."

    include_usage: bool = Field(
        False, description="one more chunk at the end, with the tokens of the request"
    )
    continuous_usage_stats: bool = Field(
        False, description="with include_usage, every chunk has the tokens so far"
    )


NgramSize = Annotated[
    int,
    Field(ge=0, le=256, description="no run of so many tokens comes twice, prompt included; 0 is off"),
    WHOLE,
]


class ProcessorArguments(Part):
    """Arguments of vLLM's logits processors: those of document models' windows of repetition."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "vllm_xargs."

    no_repeat_ngram_size: NgramSize | None = None
    ngram_size: NgramSize | None = Field(None, description="another name of no_repeat_ngram_size")
    window_size: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="of how many tokens before; 0: of all"
    )


class SamplingFields(Body):
    """OpenAI's sampling fields, and vLLM's additions from `top_k` on."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    stop: Stop | None = None
    max_tokens: MaxTokens = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    no_repeat_ngram_size: NgramSize | None = None
    vllm_xargs: ProcessorArguments | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0), WHOLE]], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(
        None, description="false: control tokens that don't end the answer are part of it"
    )


def sampling_of(fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling parameters of a request."""
    sizes, window = [fields.no_repeat_ngram_size], None
    if (extra := fields.vllm_xargs) is not None:
        sizes += [extra.no_repeat_ngram_size, extra.ngram_size]
        window = extra.window_size
    return forms.sampling_of(
        fields,
        *("temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "min_p"),
        *("repetition_penalty", "ignore_eos", "seed", "top_k"),
        max_tokens=max_tokens,
        logprobs=logprobs,
        no_repeat_ngram_size=next((size for size in sizes if size is not None), None),
        no_repeat_window=window,
        special=fields.skip_special_tokens is False,
        stop=stops_of(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
    )


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine speak of fields of its own requests: here they get the names of the protocol.

    Args:
        names: by pattern of the whole field, as `re.sub` takes them; the first that matches is used.
    """
    try:
        yield
    except RequestError as error:
        for pattern, name in names.items():
            if error.field is not None and re.fullmatch(pattern, error.field):
                error.field = re.sub(pattern, name, error.field)
                break
        raise


EVENTS_DOCUMENT: dict[str, Any] = {"content": events_document("with stream: true")}


def new_id(prefix: str) -> str:
    """A new id with this prefix, unique to one answer."""
    return f"{prefix}{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The common fields of an answer, or of all its chunks. `prefix`: of its id; `kind`: its `object`."""
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": now(),
        "model": model,
        "system_fingerprint": f"snugvl-{__version__}",
    }


MAX_TEMPLATE: Final = 4096  # characters of chat_template_kwargs
TemplateVariables = Annotated[
    dict[str, Any], Field(description="variables of the chat template, such as enable_thinking")
]


def effort_of(effort: Effort | None) -> dict[str, Any]:
    """The variable of the chat template that says how much to think."""
    return {} if effort is None else {"reasoning_effort": effort}


def template_of(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template that a request gives as `chat_template_kwargs`.

    Raises:
        RequestError: they are longer than variables are.
    """
    given = variables or {}
    if len(compact(given)) > MAX_TEMPLATE:
        raise RequestError(
            f"chat_template_kwargs has more than {MAX_TEMPLATE:,} characters; send text in messages",
            field="chat_template_kwargs",
        )
    return given


def usage_of(usage: AnswerUsage) -> dict[str, Any]:
    """Tokens of a request; `image_tokens` is our addition. The details of the answer's tokens are
    there if it has tokens of reasoning or drafted ones."""
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"image_tokens": usage.image_tokens, "cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": details} if any(details.values()) else {}),
    }


def stream_options_of(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """Options of what a stream has besides its text.

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
        """The events that end the stream."""
        if self._options.include_usage:
            yield Event(compact({**self._head, "choices": [], "usage": usage_of(usage)}))
        yield Event("[DONE]")


def token_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token with its log-probability, as OpenAI's JSON."""
    return {"token": token.token, "bytes": list(token.bytes), "logprob": max(token.logprob, LOWEST)}


def token_logprobs(tokens: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Tokens with log-probabilities and alternatives, as OpenAI's JSON."""
    return [
        {**token_logprob(token), "top_logprobs": [token_logprob(other) for other in token.top]}
        for token in tokens
    ]


Status = Literal["in_progress", "completed", "incomplete"]


class _Closed(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptTokens(_Closed):
    """Kinds of tokens of a prompt, counted."""

    image_tokens: int
    cached_tokens: int


class CompletionTokens(_Closed):
    """Kinds of tokens of an answer, counted, and drafts in vain (`--speculation`)."""

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


class _Call(_Closed):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    namespace: str | None = None
    status: Status


class ResponseCall(_Call):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str


class ResponseCustomCall(_Call):
    """A call of a free-form tool."""

    type: Literal["custom_tool_call"]
    input: str


class InputTokens(_Closed):
    """Kinds of tokens of the input; `image_tokens` is our addition."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int


class OutputTokens(_Closed):
    """Kinds of tokens of the output."""

    reasoning_tokens: int


class InputTokenCount(_Closed):
    """Tokens of a response's prompt, pictures included."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


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

"""POST /v1/chat/completions."""

from functools import partial
from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.backends.protocol import Request
from snugvl.errors import RequestError
from snugvl.server.context import context_of
from snugvl.server.fields import WHOLE, Harmless
from snugvl.server.generation import complete, generate
from snugvl.server.openai.chat_answer import About, completion
from snugvl.server.openai.chat_stream import chunks
from snugvl.server.openai.common import EVENTS_DOCUMENT, Metadata, json_answer, wants_usage
from snugvl.server.openai.document import ChatCompletion
from snugvl.server.openai.formats import ResponseFormat, check_alone, grammar_of
from snugvl.server.openai.media import MediaSource
from snugvl.server.openai.messages import MAX_MESSAGES, ChatMessage, conversation_of
from snugvl.server.openai.sampling import MaxTokens, Sampling, StreamOptions, blaming, sampling_of
from snugvl.server.openai.tools import MAX_TOOLS, ChatTool, ChatToolChoice, chat_tool_use
from snugvl.server.openai.upload import UploadRoute, attachments_of, multipart_document
from snugvl.server.streaming import event_stream

router = APIRouter(tags=["openai"], route_class=UploadRoute)

# What the engine calls a field of its own request, and what this protocol calls it.
NAMES = {
    "prompt_ids|prompt|vision": "messages",
    "grammar": "response_format",
    r"(tools\[\d+\])\.(\w.*)": r"\1.function.\2",
}


class ChatCompletionRequest(Sampling):
    """A chat completion to make."""

    harmless: ClassVar[Harmless] = {
        "store": (False,),
        "functions": (),
        "function_call": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
        "prompt_cache_options": (),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "prompt_cache_retention": ("in_memory",),
    }
    instead: ClassVar = {
        "functions": "it is deprecated; use tools",
        "function_call": "it is deprecated; use tool_choice",
        "store": "this server keeps nothing; leave it out or send false",
        "audio": "this server answers with text only",
        "modalities": 'this server answers with text only; leave it out or send ["text"]',
        "service_tier": "this server has one tier; leave it out or send 'auto'",
        "web_search_options": "this server doesn't search; offer a tool that does",
        "guided_json": "use response_format with a json_schema",
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: EVENTS_DOCUMENT},
    openapi_extra=multipart_document(ChatCompletionRequest),
)
async def create_chat_completion(body: ChatCompletionRequest, http: HttpRequest) -> Response:
    """Answer a conversation with text, pictures and videos; whole, or as a stream of chunks."""
    context = context_of(http)
    model = context.check_model(body.model)
    usage = wants_usage(body.stream, body.stream_options)
    media = MediaSource(context.intake, attachments_of(http))
    with blaming(NAMES | ({"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {})):
        request = await _request(body, media)
        parser = partial(context.call_parser, request.tools)
        about = About(model, parser, bool(body.logprobs), request.sampling.n)
        if body.stream:
            generation = await generate(context, request)
            return event_stream(http, context, chunks(generation, about, usage=usage))
        choices, tokens = await complete(context, request)
    return json_answer(completion(about, choices, tokens))


async def _request(body: ChatCompletionRequest, media: MediaSource) -> Request:
    """What the engine is asked.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    tools = chat_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = grammar_of(body.response_format)
    check_alone(grammar, tools, "response_format")
    sampling = sampling_of(
        body, max_tokens=_max_tokens(body), logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    messages = await conversation_of(body.messages, media)
    media.check_all_used()
    return Request(messages, sampling, tools=tools, grammar=grammar)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old}, but max_completion_tokens {new}; send one of them",
            field="max_completion_tokens",
        )
    return new or old

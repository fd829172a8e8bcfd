"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Delta, Logprob, Request, Usage
from snugvl.errors import RequestError
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece, ToolEvent
from snugvl.server.context import context_of
from snugvl.server.fields import WHOLE, Part
from snugvl.server.forms import either
from snugvl.server.generation import Finished, Generation, complete, generate, split_calls
from snugvl.server.openai.common import (
    EVENTS_DOCUMENT,
    ChunkWriter,
    Effort,
    Metadata,
    effort_of,
    head,
    json_answer,
    stream_options_of,
    token_logprobs,
    usage_of,
)
from snugvl.server.openai.constraints import (
    MAX_TOOLS,
    ChatTool,
    ChatToolChoice,
    Choices,
    ResponseFormat,
    StructuredOutputs,
    chat_tool_use,
    form_of,
)
from snugvl.server.openai.document import ChatCompletion
from snugvl.server.openai.media import (
    MediaSource,
    Pixels,
    UploadRoute,
    attachments_of,
    multipart_document,
)
from snugvl.server.openai.messages import MAX_MESSAGES, ChatMessage, conversation_of
from snugvl.server.openai.sampling import MaxTokens, SamplingFields, StreamOptions, rename_fields, sampling_of
from snugvl.server.streaming import Event, compact, event_stream
from snugvl.server.wishes import CHAT, Wishes

router = APIRouter(tags=["openai"], route_class=UploadRoute)

MAX_TEMPLATE = 4096  # characters of chat_template_kwargs

# What the engine calls a field of its own request, and what this protocol calls it.
NAMES = {
    "prompt_ids|prompt|vision": "messages",
    "grammar": "response_format",
    "max_pixels": "mm_processor_kwargs.max_pixels",
    r"(tools\[\d+\])\.(\w.*)": r"\1.function.\2",
}


class ProcessorOptions(Part):
    """How pictures are read, as vLLM has it. What isn't there is ignored, and told."""

    tells: ClassVar[bool] = True
    place: ClassVar[str] = "mm_processor_kwargs."

    max_pixels: Pixels | None = Field(None, description="a larger picture is scaled down to it")


class ChatCompletionRequest(SamplingFields):
    """A chat completion to make."""

    wishes: ClassVar[Wishes] = CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="as structured_outputs.json")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    mm_processor_kwargs: ProcessorOptions | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None

    def guided(self) -> StructuredOutputs:
        """What vLLM called the forms of `structured_outputs` before."""
        return StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=None,
        )


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
    options = stream_options_of(body.stream, body.stream_options)
    most = None if body.mm_processor_kwargs is None else body.mm_processor_kwargs.max_pixels
    media = MediaSource(context.intake, attachments_of(http), most)
    with rename_fields(
        NAMES
        | ({"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {})
        | ({"max_pixels": "messages"} if most is None else {})
    ):
        request = await _request(body, media)
        parser = partial(context.call_parser, request.tools)
        form = AnswerFormat(model, parser, bool(body.logprobs), request.sampling.n)
        if body.stream:
            generation = await generate(context, request)
            return event_stream(http, context, stream(generation, form, options))
        completing = complete(context, request)
        del request
        choices, tokens = await completing
    return json_answer(completion(form, choices, tokens))


async def _request(body: ChatCompletionRequest, media: MediaSource) -> Request:
    """What the engine is asked.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    tools = chat_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    form, field = form_of(body.response_format, body.structured_outputs, body.guided())
    grammar, tools = either(form, tools, field)
    sampling = sampling_of(
        body, max_tokens=_max_tokens(body), logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    messages = await conversation_of(body.messages, media)
    media.check_all_used()
    extra = body.chat_template_kwargs or {}
    if len(compact(extra)) > MAX_TEMPLATE:
        raise RequestError(
            f"chat_template_kwargs has more than {MAX_TEMPLATE:,} characters; send text in messages",
            field="chat_template_kwargs",
        )
    return Request(
        messages,
        sampling,
        tools=tools,
        grammar=grammar,
        template={**effort_of(body.reasoning_effort), **extra},
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old}, but max_completion_tokens {new}; send one of them",
            field="max_completion_tokens",
        )
    return new or old


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answer to a request is written.

    Attributes:
        model: the name that the request used.
        parser: makes what finds the calls in one choice's text; None where it can't hold any.
        logprobs: whether they were asked for.
        n: number of choices.
    """

    model: str
    parser: Callable[[], CallParser | None]
    logprobs: bool
    n: int


def completion(form: AnswerFormat, choices: list[Finished], usage: Usage) -> dict[str, Any]:
    """The whole answer."""
    return {
        **head("chatcmpl-", "chat.completion", form.model),
        "choices": [_choice(form, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of(usage),
    }


def _choice(form: AnswerFormat, index: int, choice: Finished) -> dict[str, Any]:
    text, calls = split_calls(choice.text, form.parser())
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text.strip() or not calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message |= reasoning_of(choice.reasoning)
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    logprobs = {"content": token_logprobs(choice.logprobs), "refusal": None} if form.logprobs else None
    finish = "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


def reasoning_of(text: str) -> dict[str, str]:
    """The model's reasoning, under the names that DeepSeek gave it and that vLLM and OpenRouter do."""
    return {"reasoning_content": text, "reasoning": text}


class ChunkedChoice:
    """One choice of a stream: from deltas of the engine to the `choices` entries of chunks.

    Entries are plain dicts: OpenAI's types would cost more than all else that is done for a chunk. The tests
    read every chunk with the types.
    """

    def __init__(self, form: AnswerFormat, index: int) -> None:
        self._form = form
        self._index = index
        self._parser = form.parser()
        self._logprobs: list[Logprob] = []  # of text that the parser still holds back

    def opening(self) -> dict[str, Any]:
        """The role. Without tools the content is text for sure; with tools it may stay null."""
        return self._entry({"role": "assistant", "content": None if self._parser else ""})

    def entries(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta adds: at most one entry of content, and the finish."""
        self._logprobs += delta.logprobs
        finish = delta.finish_reason
        reasoning = reasoning_of(delta.reasoning) if delta.reasoning else {}
        added = reasoning | self._content_of(delta.text, last=finish is not None)
        found = []
        if added or (self._logprobs and finish is not None):
            found.append(self._entry(added, logprobs=True))
        if finish is not None:
            calls = self._parser is not None and self._parser.calls > 0
            found.append(self._entry({}, finish="tool_calls" if calls and finish == "stop" else finish))
        return found

    def _content_of(self, text: str, *, last: bool) -> dict[str, Any]:
        if self._parser is None:
            return {"content": text} if text else {}
        events = self._parser.push(text)
        return merge_events(events + self._parser.flush() if last else events)

    def _entry(
        self, delta: dict[str, Any], *, logprobs: bool = False, finish: str | None = None
    ) -> dict[str, Any]:
        shown = None
        if logprobs and self._form.logprobs:
            shown = {"content": token_logprobs(self._logprobs), "refusal": None}
            self._logprobs = []
        return {"index": self._index, "delta": delta, "logprobs": shown, "finish_reason": finish}


def merge_events(events: list[ToolEvent]) -> dict[str, Any]:
    """One `delta` from several events: clients expect each call at most once in it."""
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case TextPiece(text=piece):
                text += piece
            case CallStarted(index=index, id=name, name=function):
                function_part = {"name": function, "arguments": ""}
                calls[index] = {"index": index, "id": name, "type": "function", "function": function_part}
            case CallArguments(index=index, fragment=fragment):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += fragment
    return ({"content": text} if text else {}) | ({"tool_calls": list(calls.values())} if calls else {})


async def stream(generation: Generation, form: AnswerFormat, options: StreamOptions) -> AsyncGenerator[Event]:
    """The events of a streamed chat completion: roles, then text and calls, then a finish for each choice."""
    chunks = ChunkWriter(head("chatcmpl-", "chat.completion.chunk", form.model), options)
    choices = [ChunkedChoice(form, index) for index in range(form.n)]
    opened = False
    async with generation:
        async for delta in generation:
            if not opened:  # all of them, in order: the SDK's accumulator counts on it
                opened = True
                for choice in choices:
                    yield chunks.event(choice.opening(), generation.prompt_tokens, 0)
            for entry in choices[delta.choice].entries(delta):
                yield chunks.event(entry, generation.prompt_tokens, delta.completion_tokens)
    for event in chunks.end(generation.usage):
        yield event

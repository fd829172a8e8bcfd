"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Logprob, Request
from snugvl.errors import RequestError
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece
from snugvl.server.body import UploadRoute, attachments_of, multipart_document
from snugvl.server.context import context_of
from snugvl.server.fields import Part
from snugvl.server.forms import MAX_TOOLS, TopLogprobs, either
from snugvl.server.generation import AnswerChoice, GeneratedAnswer, ReasoningPiece, Step, read_answer
from snugvl.server.media.loading import RequestMedia
from snugvl.server.metrics import record_of
from snugvl.server.openai.chat_request import (
    MAX_MESSAGES,
    ChatMessage,
    ChatTool,
    ChatToolChoice,
    Choices,
    Pixels,
    ResponseFormat,
    StructuredOutputs,
    chat_tool_use,
    conversation_of,
    form_of,
)
from snugvl.server.openai.common import (
    EVENTS_DOCUMENT,
    ChatCompletion,
    ChunkWriter,
    Effort,
    MaxTokens,
    Metadata,
    SamplingFields,
    StreamOptions,
    TemplateVariables,
    effort_of,
    head,
    json_answer,
    rename_fields,
    sampling_of,
    stream_options_of,
    template_of,
    token_logprobs,
    usage_of,
)
from snugvl.server.streaming import Event, event_stream
from snugvl.server.unsupported import CHAT, UnsupportedFields

router = APIRouter(tags=["openai"], route_class=UploadRoute)


# What the engine calls a field of its own request, and what this protocol calls it.
FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
NAMES = {
    "prompt_ids|prompt|vision": "messages",
    "max_pixels": "mm_processor_kwargs.max_pixels",
    r"(tools\[\d+\])\.(\w.*)": r"\1.function.\2",
    r"(messages\[\d+\]\.tool_calls\[\d+\])\.(arguments)": r"\1.function.\2",
}


class ProcessorOptions(Part):
    """Options of reading pictures, as in vLLM. Other names are ignored, with a warning."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "mm_processor_kwargs."

    max_pixels: Pixels | None = Field(None, description="a larger picture is scaled down to it")


class ChatCompletionRequest(SamplingFields):
    """A chat completion to make."""

    unsupported: ClassVar[UnsupportedFields] = CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="as structured_outputs.json")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
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
        """The older `guided_…` fields of vLLM, as `structured_outputs`."""
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
    context, record = context_of(http), record_of(http.scope)
    model = context.check_model(body.model)
    options = stream_options_of(body.stream, body.stream_options)
    most = None if body.mm_processor_kwargs is None else body.mm_processor_kwargs.max_pixels
    media = RequestMedia(context.media, record, attachments=attachments_of(http), max_pixels=most)
    form = next((name for name in FORMS if getattr(body, name) is not None), "response_format")
    with rename_fields(
        NAMES
        | {"grammar|response_format": form}
        | ({"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {})
        | ({"max_pixels": "messages"} if most is None else {})
    ):
        answer = await read_answer(context, record, await _request(body, media))
        written = ChatWriter(model, answer, bool(body.logprobs))
        if body.stream:
            return event_stream(context, written.events(options))
        return json_answer(await written.whole())


async def _request(body: ChatCompletionRequest, media: RequestMedia) -> Request:
    """The request for the engine.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    tools = chat_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, media.notes)
    form, field = form_of(body.response_format, body.structured_outputs, body.guided(), media.notes)
    grammar, tools = either(form, tools, field)
    sampling = sampling_of(
        body, max_tokens=_max_tokens(body), logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    messages = await conversation_of(body.messages, media)
    media.check_all_used()
    template = {**effort_of(body.reasoning_effort), **template_of(body.chat_template_kwargs)}
    return Request(messages, sampling, tools=tools, grammar=grammar, template=template)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old}, but max_completion_tokens {new}; send one of them",
            field="max_completion_tokens",
        )
    return new or old


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes an answer as a completion, or as chunks.

    Attributes:
        model: the name that the request used.
        logprobs: whether log-probabilities were asked for.
    """

    model: str
    answer: GeneratedAnswer
    logprobs: bool

    async def whole(self) -> dict[str, Any]:
        """The completion, once it is there."""
        usage = await self.answer.complete()
        return {
            **head("chatcmpl-", "chat.completion", self.model),
            "choices": [self._choice(index, choice) for index, choice in enumerate(self.answer.choices)],
            "usage": usage_of(usage),
        }

    async def events(self, options: StreamOptions) -> AsyncGenerator[Event]:
        """The events of a stream: roles, then text and calls, then a finish for each choice.

        Entries are plain dicts: OpenAI's types would cost more than all else that is done for a chunk. The
        tests read every chunk with the types.
        """
        chunks = ChunkWriter(head("chatcmpl-", "chat.completion.chunk", self.model), options)
        generation, opened = self.answer.generation, False
        async with generation:
            async for step in self.answer:
                if not opened:  # all of them, in order: the SDK's accumulator counts on it
                    opened = True
                    for index, choice in enumerate(self.answer.choices):
                        # Without tools the content is text for sure; with tools it may stay null.
                        role = {"role": "assistant", "content": None if choice.may_call else ""}
                        yield chunks.event(self._entry(index, role), generation.prompt_tokens, 0)
                for entry in self._entries(step):
                    yield chunks.event(entry, generation.prompt_tokens, step.completion_tokens)
        for event in chunks.end(generation.usage):
            yield event

    def _choice(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        text, calls = choice.text, choice.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text.strip() or not calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message |= reasoning_of(choice.reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._shown(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _entries(self, step: Step) -> Iterator[dict[str, Any]]:
        """The `choices` entries of a step: at most one of content, and the finish."""
        if step.events or step.logprobs:
            yield self._entry(step.choice, delta_of(step), logprobs=self._shown(step.logprobs))
        if step.finish_reason is not None:
            yield self._entry(step.choice, {}, finish=step.finish_reason)

    def _shown(self, tokens: Sequence[Logprob]) -> dict[str, Any] | None:
        return {"content": token_logprobs(tokens), "refusal": None} if self.logprobs else None

    def _entry(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def reasoning_of(text: str) -> dict[str, str]:
    """The model's reasoning, under the names that DeepSeek gave it and that vLLM and OpenRouter do."""
    return {"reasoning_content": text, "reasoning": text}


def delta_of(step: Step) -> dict[str, Any]:
    """One `delta` from the events of a step: clients expect each call at most once in it."""
    if len(step.events) == 1 and isinstance(only := step.events[0][1], TextPiece):  # as nearly always
        return {"content": only.text}
    thought = text = ""
    calls: dict[int, dict[str, Any]] = {}
    for _, event in step.events:
        match event:
            case ReasoningPiece(text=piece):
                thought += piece
            case TextPiece(text=piece):
                text += piece
            case CallStarted(index=index, id=name, name=function):
                function_part = {"name": function, "arguments": ""}
                calls[index] = {"index": index, "id": name, "type": "function", "function": function_part}
            case CallArguments(index=index, fragment=fragment):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += fragment
    return {
        **(reasoning_of(thought) if thought else {}),
        **({"content": text} if text else {}),
        **({"tool_calls": list(calls.values())} if calls else {}),
    }

"""POST /v1/responses: stateless, so every request brings the whole conversation."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Logprob, Request, ToolCall
from snugvl.errors import QueueFull, RequestError
from snugvl.inputs.tools.parser import CallArguments, TextPiece
from snugvl.server.body import UploadRoute, attachments_of, multipart_document
from snugvl.server.context import context_of
from snugvl.server.errors import error_body
from snugvl.server.forms import either, sampling_of
from snugvl.server.generation import (
    AnswerBlock,
    AnswerEvent,
    GeneratedAnswer,
    ReasoningPiece,
    read_answer,
    tokens_of,
)
from snugvl.server.media.loading import RequestMedia
from snugvl.server.metrics import record_of
from snugvl.server.openai.common import (
    EVENTS_DOCUMENT,
    InputTokenCount,
    ResponseAnswer,
    effort_of,
    json_answer,
    new_id,
    now,
    rename_fields,
    token_logprobs,
)
from snugvl.server.openai.responses_request import (
    ENCRYPTED,
    LOGPROBS,
    VENDOR,
    Called,
    CountInputRequest,
    Input,
    ResponsePrompt,
    ResponseRequest,
    called_names,
    conversation_of,
)
from snugvl.server.streaming import Event, compact, event_stream

router = APIRouter(tags=["openai"], route_class=UploadRoute)

# What the engine calls a field of its own request, and what this protocol calls it.
NAMES = {
    "max_tokens": "max_output_tokens",
    r"prompt_ids|prompt|vision|messages.*": "input",
    "grammar|response_format": "text.format",
}


@router.post(
    "/v1/responses",
    response_model=ResponseAnswer,
    responses={200: EVENTS_DOCUMENT},
    openapi_extra=multipart_document(ResponseRequest),
)
async def create_response(body: ResponseRequest, http: HttpRequest) -> Response:
    """Answer input items with output items; whole, or as a stream of events."""
    context, record = context_of(http), record_of(http.scope)
    model = context.check_model(body.model)
    media = RequestMedia(context.media, record, attachments=attachments_of(http))
    with rename_fields(NAMES):
        answer = await read_answer(context, record, await _request(body, media))
        names = called_names(body.tools or ())
        written = WrittenResponse(new_response(body, model), answer, names, record.id)
        if body.stream:
            return event_stream(context, written.events(), on_error=written.failure_event)
        return json_answer(await written.whole())


@router.post("/v1/responses/input_tokens", openapi_extra=multipart_document(CountInputRequest))
async def count_input_tokens(body: CountInputRequest, http: HttpRequest) -> InputTokenCount:
    """Count the tokens of a response's prompt, without an answer."""
    context = context_of(http)
    context.check_model(body.model)
    if body.input is None and not body.instructions:
        raise RequestError("there is nothing to count; send input, or instructions", field="input")
    media = context.media_to_count(record_of(http.scope), attachments=attachments_of(http))
    with rename_fields(NAMES):
        prompt = await _prompt(body, body.input, media)
        return InputTokenCount(input_tokens=len((await tokens_of(context, prompt)).ids))


async def _request(body: ResponseRequest, media: RequestMedia) -> Request:
    """The request for the engine.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs and not body.wants_logprobs:
        raise RequestError(f"top_logprobs needs {LOGPROBS!r} in include", field="top_logprobs")
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            media.notes.warn(f"ignored include: nothing here has {name}")
    logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    names = ("temperature", "top_p", "ignore_eos")
    sampling = sampling_of(body, *names, max_tokens=body.max_output_tokens, logprobs=logprobs)
    return replace(await _prompt(body, body.input, media), sampling=sampling)


async def _prompt(body: ResponsePrompt, shown: Input | None, media: RequestMedia) -> Request:
    """The request that has a response's prompt, with sampling as it is by default. `shown`: its input.

    Raises:
        RequestError, ImageError: as `_request`.
    """
    grammar, tools = either(body.grammar(media.notes), body.tool_use(media.notes), "text.format")
    messages = await conversation_of(shown, body.instructions, media)
    media.check_all_used()
    return Request(messages, tools=tools, grammar=grammar, template=effort_of(body.effort))


def new_response(body: ResponseRequest, model: str) -> dict[str, Any]:
    """A response that has only begun: what was asked, and no output yet."""
    echoed = {"text", "tools", "tool_choice"}
    shown = body.model_dump(mode="json", by_alias=True, exclude_unset=True, include=echoed)
    text = shown.get("text") or {}
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": body.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature or 0.0,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": shown.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in shown.get("tools") or () if not VENDOR.fullmatch(tool["type"])],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "function":
        return {"description": None, "parameters": None, "strict": None, **tool}
    return {"description": "", **tool} if tool["type"] == "namespace" else tool


def message_item(item_id: str, text: str, logprobs: Sequence[Logprob], status: str) -> dict[str, Any]:
    """A message with its one part."""
    shown = token_logprobs(logprobs)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


class WrittenResponse:
    """A response as it is written: whole, or as named events, whose items are the blocks of the answer.

    response.created, response.in_progress
    for reasoning:     output_item.added, content_part.added, reasoning_text.delta …, reasoning_text.done,
                       content_part.done, output_item.done
    for each message:  output_item.added, content_part.added, output_text.delta …, output_text.done,
                       content_part.done, output_item.done
    for each call:     output_item.added, function_call_arguments.delta …, function_call_arguments.done,
                       output_item.done
    of a free-form tool, whose text is complete only at its end:
                       output_item.added, custom_tool_call_input.delta, custom_tool_call_input.done,
                       output_item.done
    response.completed | response.incomplete | response.failed
    """

    def __init__(
        self, response: dict[str, Any], answer: GeneratedAnswer, names: Mapping[str, Called], request_id: str
    ) -> None:
        """`response`: one that has only begun; `names`: how the client knows its tools."""
        self._request_id = request_id
        self._response = response
        self._answer = answer
        self._choice = answer.choices[0]
        self._names = names
        self._count = 0  # of events so far
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._block: AnswerBlock | None = None  # of the item that is open
        self._item_id = ""

    async def whole(self) -> dict[str, Any]:
        """The response, once all of it is there; one item at least, be it an empty message."""
        usage, choice = await self._answer.complete(), self._choice
        for block in choice.blocks or [AnswerBlock(TextPiece(""))]:
            if not choice.calls:  # all but those of reasoning, which came apart or beside text
                block.logprobs = choice.logprobs[usage.reasoning_tokens :]
            self._open(block)
            self._output.append(self._item(block, "completed"))
        return self._finished()

    async def events(self) -> AsyncGenerator[Event]:
        """All events from the first to the last.

        Raises:
            SnugvlError: the engine failed; `failure_event` makes the last event of that.
        """
        blocks = iter(self._choice.blocks)  # which grow meanwhile
        async with self._answer.generation:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
            async for step in self._answer:
                logprobs = step.logprobs
                for begins, each in step.events:
                    for event in self._begin(next(blocks)) if begins else ():
                        yield event
                    for event in self._delta(each, logprobs):
                        yield event
                    logprobs = ()
        if self._block is None:
            for event in self._begin(AnswerBlock(TextPiece(""))):  # an empty answer is an empty message
                yield event
        for event in self._end("incomplete" if self._incomplete else "completed"):
            yield event
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failure_event(self, error: Exception) -> Event:
        """The last event of a response that failed."""
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        message = error_body(error, "openai", self._request_id)["error"]["message"]
        response = {**self._response, "status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response={**response, "output": self._output})

    @property
    def _incomplete(self) -> bool:
        """Whether the answer ended at its token limit."""
        return self._choice.finish_reason == "length"

    def _finished(self) -> dict[str, Any]:
        """The response with its output."""
        usage, output, incomplete = self._answer.generation.usage, self._output, self._incomplete
        if incomplete:
            output = [*output[:-1], {**output[-1], "status": "incomplete"}]
        return {
            **self._response,
            "status": "incomplete" if incomplete else "completed",
            "completed_at": None if incomplete else now(),
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                    "image_tokens": usage.image_tokens,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _called(self, call: ToolCall) -> Called:
        """The form in which the client offered a call's tool."""
        return self._names.get(call.name, Called(call.name))

    def _open(self, block: AnswerBlock) -> None:
        self._block = block
        prefix = "msg_" if isinstance(block.first, TextPiece) else "rs_"
        if (call := block.call) is not None:
            prefix = "ctc_" if self._called(call).custom else "fc_"
        self._item_id = new_id(prefix)

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        """The open item, with what came of its block."""
        if (call := block.call) is not None:
            return self._called(call).item(call, self._item_id, status)
        if isinstance(block.first, TextPiece):
            return message_item(self._item_id, block.text, block.logprobs, status)
        return {
            "id": self._item_id,
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": block.text}],
            "encrypted_content": None,
            "status": status,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._count = self._count, self._count + 1
        return Event(compact({"type": kind, "sequence_number": number, **fields}), kind)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        return self._event(f"response.{kind}", output_index=len(self._output), **fields)

    def _begin(self, block: AnswerBlock) -> Iterator[Event]:
        """End the open item, and begin that of a block."""
        yield from self._end("completed")
        self._open(block)
        item = self._item(AnswerBlock(block.first), "in_progress")
        if (parts := item.get("content")) is None:
            yield self._item_event("output_item.added", item=item)
            return
        yield self._item_event("output_item.added", item={**item, "content": []})
        yield self._item_event("content_part.added", item_id=self._item_id, content_index=0, part=parts[0])

    def _delta(self, event: AnswerEvent, logprobs: Sequence[Logprob]) -> Iterator[Event]:
        """More of the open item; log-probabilities of reasoning and calls are not sent."""
        where = {"item_id": self._item_id, "content_index": 0}
        match event:
            case ReasoningPiece(text=text):
                yield self._item_event("reasoning_text.delta", **where, delta=text)
            case TextPiece(text=text):
                shown = token_logprobs(logprobs)
                yield self._item_event("output_text.delta", **where, delta=text, logprobs=shown)
            case CallArguments(fragment=text) if not self._is_custom:
                yield self._item_event("function_call_arguments.delta", item_id=self._item_id, delta=text)

    @property
    def _is_custom(self) -> bool:
        """Whether the open item is a call of a free-form tool."""
        call = None if self._block is None else self._block.call
        return call is not None and self._called(call).custom

    def _end(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if self._block is None:
            return
        item, item_id = self._item(self._block, status), self._item_id
        if parts := item.get("content"):
            kind = parts[0]["type"]
            where = {"item_id": item_id, "content_index": 0}
            shown = {name: parts[0][name] for name in ("text", "logprobs") if name in parts[0]}
            yield self._item_event(f"{kind}.done", **where, **shown)
            yield self._item_event("content_part.done", **where, part=parts[0])
        elif self._is_custom:
            yield self._item_event("custom_tool_call_input.delta", item_id=item_id, delta=item["input"])
            yield self._item_event("custom_tool_call_input.done", item_id=item_id, input=item["input"])
        else:
            shown = {name: item[name] for name in ("name", "arguments")}
            yield self._item_event("function_call_arguments.done", item_id=item_id, **shown)
        yield self._item_event("output_item.done", item=item)
        self._output.append(item)

"""POST /v1/responses: stateless, so every request brings the whole conversation."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Logprob, Request, ToolCall, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import QueueFull, RequestError
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece
from snugvl.server.context import context_of
from snugvl.server.errors import error_body
from snugvl.server.forms import either
from snugvl.server.generation import (
    AnswerEvent,
    Finished,
    Reader,
    ReasoningPiece,
    complete,
    generate,
    split_calls,
)
from snugvl.server.openai.common import EVENTS_DOCUMENT, effort_of, json_answer, new_id, now, token_logprobs
from snugvl.server.openai.document import ResponseAnswer
from snugvl.server.openai.media import MediaSource, UploadRoute, attachments_of, multipart_document
from snugvl.server.openai.responses_request import LOGPROBS, ResponseRequest, conversation_of
from snugvl.server.openai.responses_tools import VENDOR, Called, called_names
from snugvl.server.openai.sampling import rename_fields
from snugvl.server.record import current
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
    context = context_of(http)
    model = context.check_model(body.model)
    media = MediaSource(context.intake, attachments_of(http))
    with rename_fields(NAMES):
        request = await _request(body, media)
        parser = context.call_parser(request.tools)
        response, names = new_response(body, model), called_names(body.tools or ())
        if body.stream:
            events = ResponseEvents(response, Reader(await generate(context, request), parser), names)
            return event_stream(http, context, events.run(), on_error=events.failure_event)
        completing = complete(context, request)
        del request
        choices, usage = await completing
    output = output_of(choices[0], parser, names)
    complete_answer = choices[0].finish_reason != "length"
    return json_answer(finish_response(response, output, usage, complete=complete_answer))


async def _request(body: ResponseRequest, media: MediaSource) -> Request:
    """What the engine is asked.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs is not None and not body.wants_logprobs:
        raise RequestError(f"top_logprobs needs {LOGPROBS!r} in include", field="top_logprobs")
    grammar, tools = either(body.grammar(), body.tool_use(), "text.format")
    sampling = SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        ignore_eos=bool(body.ignore_eos),
    )
    messages = await conversation_of(body.input, body.instructions, media)
    media.check_all_used()
    template = effort_of(body.effort)
    return Request(messages, sampling, tools=tools, grammar=grammar, template=template)


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


def finish_response(
    response: dict[str, Any], output: list[dict[str, Any]], usage: Usage, *, complete: bool
) -> dict[str, Any]:
    """`response` with its output. `complete`: whether the answer ended before its token limit."""
    if not complete:
        output = [*output[:-1], {**output[-1], "status": "incomplete"}]
    return {
        **response,
        "status": "completed" if complete else "incomplete",
        "completed_at": now() if complete else None,
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": current().cached_tokens,
                "cache_write_tokens": 0,
                "image_tokens": usage.image_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": current().reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def output_of(
    choice: Finished, parser: CallParser | None, names: Mapping[str, Called]
) -> list[dict[str, Any]]:
    """The items of a complete answer; one at least, be it an empty message."""
    text, calls = split_calls(choice.text, parser)
    items = [reasoning_item(new_id("rs_"), choice.reasoning)] if choice.reasoning else []
    if text or not (items or calls):
        shown = choice.logprobs[current().reasoning_tokens :]
        items.append(message_item(new_id("msg_"), text, shown))
    return items + [call_item(call, names) for call in calls]


def reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    """The model's whole reasoning, as an item of the output."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
        "status": "completed",
    }


def message_item(item_id: str, text: str, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """A message that is complete."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: Sequence[Logprob] = ()) -> dict[str, Any]:
    """The one part of a message."""
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": token_logprobs(logprobs),
    }


def call_item(
    call: ToolCall, names: Mapping[str, Called], item_id: str | None = None, status: str = "completed"
) -> dict[str, Any]:
    """A call, in the form in which the client offered its tool."""
    called = names.get(call.name, Called(call.name))
    return called.item(call, item_id or new_id("ctc_" if called.custom else "fc_"), status)


class ResponseEvents:
    """The named events of one response: counts them, and opens and closes items as text and calls come.

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

    def __init__(self, response: dict[str, Any], reader: Reader, names: Mapping[str, Called]) -> None:
        self._response = response
        self._names = names
        self._reader = reader
        self._count = 0  # of events so far
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._item_id = ""  # of the open item, which is a text or a call
        self._text: str | None = None
        self._thought: str | None = None
        self._call: ToolCall | None = None
        self._logprobs: list[Logprob] = []  # of the open text

    async def run(self) -> AsyncGenerator[Event]:
        """All events from the first to the last.

        Raises:
            SnugvlError: the engine failed; `failure_event` makes the last event of that.
        """
        async with self._reader.generation:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
            async for piece in self._reader:
                for event in self._events(piece):
                    yield event
        if not (self._output or self._item_id):
            for event in self._open_text():  # an empty answer is an empty message
                yield event
        length = self._reader.length
        for event in self._close("incomplete" if length else "completed"):
            yield event
        usage = self._reader.generation.usage
        response = finish_response(self._response, self._output, usage, complete=not length)
        yield self._event(f"response.{response['status']}", response=response)

    def failure_event(self, error: Exception) -> Event:
        """The last event of a response that failed."""
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        message = error_body(error, "openai")["error"]["message"]
        response = {**self._response, "status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response={**response, "output": self._output})

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._count = self._count, self._count + 1
        return Event(compact({"type": kind, "sequence_number": number, **fields}), kind)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        return self._event(f"response.{kind}", output_index=len(self._output), **fields)

    def _events(self, piece: AnswerEvent) -> Iterator[Event]:
        match piece:
            case ReasoningPiece(text=text):
                yield from self._extend_thought(text)
            case TextPiece(text=text):
                yield from self._extend_text(text)
            case CallStarted(id=call_id, name=name):
                yield from self._open_call(ToolCall(call_id, name, ""))
            case CallArguments(fragment=fragment):
                yield from self._extend_call(fragment)

    def _extend_thought(self, text: str) -> Iterator[Event]:
        if self._thought is None:
            yield from self._close("completed")
            self._item_id, self._thought = new_id("rs_"), ""
            item = {**reasoning_item(self._item_id, ""), "status": "in_progress", "content": []}
            yield self._item_event("output_item.added", item=item)
            where = {"item_id": self._item_id, "content_index": 0}
            yield self._item_event("content_part.added", **where, part={"type": "reasoning_text", "text": ""})
        self._reader.take_logprobs()  # those of reasoning are not sent
        self._thought = (self._thought or "") + text
        yield self._item_event("reasoning_text.delta", item_id=self._item_id, content_index=0, delta=text)

    def _extend_text(self, text: str) -> Iterator[Event]:
        if self._text is None:
            yield from self._open_text()
        shown = self._reader.take_logprobs()
        self._logprobs += shown
        self._text = (self._text or "") + text
        yield self._item_event(
            "output_text.delta",
            item_id=self._item_id,
            content_index=0,
            delta=text,
            logprobs=token_logprobs(shown),
        )

    def _open_text(self) -> Iterator[Event]:
        yield from self._close("completed")
        self._item_id, self._text, self._logprobs = new_id("msg_"), "", []
        item = {**message_item(self._item_id, "", ()), "status": "in_progress", "content": []}
        yield self._item_event("output_item.added", item=item)
        yield self._item_event(
            "content_part.added", item_id=self._item_id, content_index=0, part=text_part("")
        )

    def _open_call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        self._reader.take_logprobs()  # those of calls are not sent
        item = call_item(call, self._names, status="in_progress")
        self._item_id, self._call = item["id"], call
        yield self._item_event("output_item.added", item=item)

    def _extend_call(self, fragment: str) -> Iterator[Event]:
        assert self._call is not None, "arguments follow the start of their call"
        self._reader.take_logprobs()
        self._call = replace(self._call, arguments=self._call.arguments + fragment)
        if not self._is_custom(self._call):
            yield self._item_event("function_call_arguments.delta", item_id=self._item_id, delta=fragment)

    def _is_custom(self, call: ToolCall) -> bool:
        return call.name in self._names and self._names[call.name].custom

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        item_id, text, call = self._item_id, self._text, self._call
        where = {"item_id": item_id, "content_index": 0}
        if (thought := self._thought) is not None:
            item = {**reasoning_item(item_id, thought), "status": status}
            yield self._item_event("reasoning_text.done", **where, text=thought)
            yield self._item_event("content_part.done", **where, part=item["content"][0])
        elif text is not None:
            part = text_part(text, self._logprobs)
            item = {**message_item(item_id, text, self._logprobs), "status": status}
            yield self._item_event("output_text.done", **where, text=text, logprobs=part["logprobs"])
            yield self._item_event("content_part.done", **where, part=part)
        elif call is not None:
            item = call_item(call, self._names, item_id, status)
            if self._is_custom(call):
                yield self._item_event("custom_tool_call_input.delta", item_id=item_id, delta=item["input"])
                yield self._item_event("custom_tool_call_input.done", item_id=item_id, input=item["input"])
            else:
                yield self._item_event(
                    "function_call_arguments.done",
                    item_id=item_id,
                    name=item["name"],
                    arguments=call.arguments,
                )
        else:
            return
        yield self._item_event("output_item.done", item=item)
        self._output.append(item)
        self._text = self._thought = self._call = None

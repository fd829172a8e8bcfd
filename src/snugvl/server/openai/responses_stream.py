"""A response as named events.

response.created, response.in_progress
for each message:  output_item.added, content_part.added, output_text.delta …, output_text.done,
                   content_part.done, output_item.done
for each call:     output_item.added, function_call_arguments.delta …, function_call_arguments.done,
                   output_item.done
response.completed | response.incomplete | response.failed
"""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

from snugvl.backends.protocol import Delta, Logprob, ToolCall
from snugvl.errors import QueueFull
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece, ToolEvent
from snugvl.server.errors import error_body
from snugvl.server.generation import Generation
from snugvl.server.openai.common import finish_of, new_id, usage_at_end
from snugvl.server.openai.logprobs import token_logprobs
from snugvl.server.openai.responses_answer import call_item, finished, message_item, text_part
from snugvl.server.streaming import Event, compact


class ResponseEvents:
    """The events of one response: counts them, and opens and closes items as text and calls come."""

    def __init__(self, response: dict[str, Any], parser: CallParser | None) -> None:
        """`parser`: finds the calls in the text; None where it can't hold any."""
        self._response = response
        self._parser = parser
        self._sent = 0
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._item_id = ""  # of the open item, which is a text or a call
        self._text: str | None = None
        self._call: ToolCall | None = None
        self._logprobs: list[Logprob] = []  # of the open text
        self._held: list[Logprob] = []  # of text that the parser still holds back

    async def run(self, generation: Generation) -> AsyncGenerator[Event]:
        """All events from the first to the last.

        Raises:
            SnugvlError: the engine failed; `failed` makes the last event of that.
        """
        finish: str | None = None
        async with generation:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
            async for delta in generation:
                finish = finish_of(delta) or finish
                for event in self._delta(delta, last=finish is not None):
                    yield event
        usage = usage_at_end(generation)
        if not self._output and self._text is None and self._call is None:
            for event in self._open_text():  # an empty answer is an empty message
                yield event
        for event in self._close("incomplete" if finish == "length" else "completed"):
            yield event
        response = finished(self._response, self._output, finish or "stop", usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> Event:
        """The last event of a response that failed."""
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        message = error_body(error, "openai")["error"]["message"]
        response = {**self._response, "status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response={**response, "output": self._output})

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sent = self._sent, self._sent + 1
        return Event(compact({"type": kind, "sequence_number": number, **fields}), kind)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        return self._event(f"response.{kind}", output_index=len(self._output), **fields)

    def _delta(self, delta: Delta, *, last: bool) -> Iterator[Event]:
        self._held += delta.logprobs
        if self._parser is None:
            if delta.text:
                yield from self._say(delta.text)
            return
        pieces: list[ToolEvent] = self._parser.push(delta.text)
        if last:
            pieces += self._parser.flush()
        for piece in pieces:
            match piece:
                case TextPiece(text=text):
                    yield from self._say(text)
                case CallStarted(id=call_id, name=name):
                    yield from self._start(ToolCall(call_id, name, ""))
                case CallArguments(fragment=fragment):
                    yield self._argue(fragment)

    def _say(self, text: str) -> Iterator[Event]:
        if self._text is None:
            yield from self._open_text()
        shown, self._held = self._held, []
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

    def _start(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        self._item_id, self._call, self._held = new_id("fc_"), call, []
        yield self._item_event("output_item.added", item=call_item(call, self._item_id, "in_progress"))

    def _argue(self, fragment: str) -> Event:
        assert self._call is not None, "arguments follow the start of their call"
        self._held = []  # log-probabilities are of text
        self._call = replace(self._call, arguments=self._call.arguments + fragment)
        return self._item_event("function_call_arguments.delta", item_id=self._item_id, delta=fragment)

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        item_id, text, call = self._item_id, self._text, self._call
        if text is not None:
            part = text_part(text, self._logprobs)
            item = {**message_item(item_id, text, self._logprobs), "status": status}
            where = {"item_id": item_id, "content_index": 0}
            yield self._item_event("output_text.done", **where, text=text, logprobs=part["logprobs"])
            yield self._item_event("content_part.done", **where, part=part)
        elif call is not None:
            item = call_item(call, item_id, status)
            yield self._item_event(
                "function_call_arguments.done", item_id=item_id, name=call.name, arguments=call.arguments
            )
        else:
            return
        yield self._item_event("output_item.done", item=item)
        self._output.append(item)
        self._text = self._call = None

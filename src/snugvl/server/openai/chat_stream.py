"""A chat completion in chunks: roles first, then text and calls, a finish for each choice, usage, [DONE].

Chunks are plain dicts: OpenAI's types would cost more than the rest of a chunk's way. The tests read every
chunk with the types.
"""

from collections.abc import AsyncGenerator
from typing import Any

from snugvl.backends.protocol import Delta, Logprob
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece, ToolEvent
from snugvl.server.generation import Generation
from snugvl.server.openai.chat_answer import About
from snugvl.server.openai.common import DONE, FINGERPRINT, finish_of, new_id, now, usage_at_end, usage_of
from snugvl.server.openai.logprobs import token_logprobs
from snugvl.server.streaming import Event, compact


class ChunkedChoice:
    """One choice: from deltas of the engine to the `choices` entries of chunks."""

    def __init__(self, about: About, index: int) -> None:
        self._about = about
        self._index = index
        self._parser = about.parser()
        self._logprobs: list[Logprob] = []  # of text that the parser still holds back

    def opening(self) -> dict[str, Any]:
        """The role. Without tools the content is text for sure; with tools it may stay null."""
        return self._entry({"role": "assistant", "content": None if self._parser else ""})

    def entries(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta adds: at most one entry of content, and the finish.

        Raises:
            EngineError: the engine gave the answer up.
        """
        self._logprobs += delta.logprobs
        finish = finish_of(delta)
        thought = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        added = thought | self._added(delta.text, last=finish is not None)
        found = []
        if added or (self._logprobs and finish is not None):
            found.append(self._entry(added, logprobs=True))
        if finish is not None:
            calls = self._parser is not None and self._parser.calls > 0
            found.append(self._entry({}, finish="tool_calls" if calls and finish == "stop" else finish))
        return found

    def _added(self, text: str, *, last: bool) -> dict[str, Any]:
        if self._parser is None:
            return {"content": text} if text else {}
        events = self._parser.push(text)
        return merged(events + self._parser.flush() if last else events)

    def _entry(
        self, delta: dict[str, Any], *, logprobs: bool = False, finish: str | None = None
    ) -> dict[str, Any]:
        shown = None
        if logprobs and self._about.logprobs:
            shown = {"content": token_logprobs(self._logprobs), "refusal": None}
            self._logprobs = []
        return {"index": self._index, "delta": delta, "logprobs": shown, "finish_reason": finish}


def merged(events: list[ToolEvent]) -> dict[str, Any]:
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


async def chunks(generation: Generation, about: About, *, usage: bool) -> AsyncGenerator[Event]:
    """The events of a streamed chat completion. `usage`: one more chunk for it at the end."""
    head: dict[str, Any] = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion.chunk",
        "created": now(),
        "model": about.model,
        "system_fingerprint": FINGERPRINT,
    }
    tail: dict[str, Any] = {"usage": None} if usage else {}
    choices = [ChunkedChoice(about, index) for index in range(about.n)]
    opened = False
    async with generation:
        async for delta in generation:
            if not opened:  # all of them, in order: the SDK's accumulator counts on it
                opened = True
                for choice in choices:
                    yield Event(compact({**head, "choices": [choice.opening()], **tail}))
            for entry in choices[delta.choice].entries(delta):
                yield Event(compact({**head, "choices": [entry], **tail}))
    counted = usage_of(usage_at_end(generation))
    if usage:
        yield Event(compact({**head, "choices": [], "usage": counted}))
    yield DONE

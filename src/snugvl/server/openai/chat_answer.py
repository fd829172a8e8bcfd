"""A chat completion in one piece."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snugvl.backends.protocol import ToolCall, Usage
from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece
from snugvl.server.generation import Finished
from snugvl.server.openai.common import FINGERPRINT, new_id, now, usage_of
from snugvl.server.openai.logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class About:
    """What an answer says of itself, and what it was asked to hold.

    Attributes:
        model: the name that the request used.
        parser: makes what finds the calls in one choice's text; None where it can't hold any.
        logprobs: whether they were asked for.
    """

    model: str
    parser: Callable[[], CallParser | None]
    logprobs: bool
    n: int


def split_calls(text: str, parser: CallParser | None) -> tuple[str, tuple[ToolCall, ...]]:
    """A complete answer as its text and its calls."""
    if parser is None:
        return text, ()
    shown = ""
    started: list[CallStarted] = []
    arguments: list[str] = []
    for event in (*parser.push(text), *parser.flush()):
        match event:
            case TextPiece(text=piece):
                shown += piece
            case CallStarted():
                started.append(event)
                arguments.append("")
            case CallArguments(index=index, fragment=fragment):
                arguments[index] += fragment
    calls = zip(started, arguments, strict=True)
    return shown, tuple(ToolCall(call.id, call.name, text) for call, text in calls)


def completion(about: About, choices: list[Finished], usage: Usage) -> dict[str, Any]:
    """The whole answer."""
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": now(),
        "model": about.model,
        "system_fingerprint": FINGERPRINT,
        "choices": [_choice(about, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of(usage),
    }


def _choice(about: About, index: int, choice: Finished) -> dict[str, Any]:
    text, calls = split_calls(choice.text, about.parser())
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text.strip() or not calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    logprobs = {"content": token_logprobs(choice.logprobs), "refusal": None} if about.logprobs else None
    finish = "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

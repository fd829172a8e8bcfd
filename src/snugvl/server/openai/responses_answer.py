"""A response in one piece, and its parts, which the stream sends as they are made."""

from collections.abc import Sequence
from typing import Any

from snugvl.backends.protocol import Logprob, ToolCall, Usage
from snugvl.inputs.tools.parser import CallParser
from snugvl.server.generation import Finished
from snugvl.server.openai.chat_answer import split_calls
from snugvl.server.openai.common import new_id, now
from snugvl.server.openai.logprobs import token_logprobs
from snugvl.server.openai.responses_schema import ResponseRequest


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
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature or 0.0,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": shown.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in shown.get("tools") or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}


def finished(
    response: dict[str, Any], output: list[dict[str, Any]], finish: str, usage: Usage
) -> dict[str, Any]:
    """`response` with its output. `finish`: of the engine; "length" makes it incomplete."""
    complete = finish != "length"
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
                "cached_tokens": 0,
                "cache_write_tokens": 0,
                "image_tokens": usage.image_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def output_of(choice: Finished, parser: CallParser | None) -> list[dict[str, Any]]:
    """The items of a complete answer; one message at least, be it empty."""
    text, calls = split_calls(choice.text, parser)
    items = [call_item(call) for call in calls]
    if text or not items:
        items.insert(0, message_item(new_id("msg_"), text, choice.logprobs))
    return items


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


def call_item(call: ToolCall, item_id: str | None = None, status: str = "completed") -> dict[str, Any]:
    """A call."""
    return {
        "id": item_id or new_id("fc_"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }

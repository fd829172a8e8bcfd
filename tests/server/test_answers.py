"""A whole answer is what its stream comes to, tokens included, in every protocol."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Delta, Usage
from tests.server.live import asking
from tests.server.openai.scripted import Scripted, token

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
HI = [{"role": "user", "content": "hi"}]
THOUGHT = [
    Delta("", reasoning="It is", logprobs=(token("It is", -0.25),)),
    Delta("", reasoning=" round.", logprobs=(token(" round.", -0.25),)),
]
TEXT = [Delta("Hello"), Delta(""), Delta(" there.", logprobs=(token(" there.", -0.5),))]
CALL = [
    Delta('\n<tool_call>\n{"name": "look", "argu', logprobs=(token("<tool_call>", -1.5),)),
    Delta('ments": {"at": "sky"'),
    Delta("}}\n</tool_call>"),
]
MORE = [Delta(" And more")]
CUT = [Delta('<tool_call>\n{"name": "look", "arguments": {"at": "s')]
SCRIPTS = {
    "nothing": [],
    "text": TEXT,
    "reasoning": THOUGHT,
    "reasoning, text": [*THOUGHT, *TEXT],
    "call": CALL,
    "text, two calls": [*TEXT, *CALL, *CALL],
    "all, text behind a call": [*THOUGHT, *TEXT, *CALL, *MORE],
    "text, a call that was cut": [*TEXT, *CUT],
}


def chat(events: list[Any]) -> Any:
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    finish, usage, logprobs = None, None, []
    for event in events:
        usage = event["usage"] or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            message["content"] += choice["delta"].get("content") or ""
            message["reasoning"] += choice["delta"].get("reasoning") or ""
            for call in choice["delta"].get("tool_calls", ()):
                known = message["calls"].setdefault(call["index"], {"arguments": ""})
                known["name"] = call["function"].get("name") or known["name"]
                known["arguments"] += call["function"]["arguments"]
    return message | {"calls": list(message["calls"].values())}, finish, logprobs, usage


def whole_chat(answer: Any) -> Any:
    (choice,) = answer["choices"]
    said = choice["message"]
    message = {
        "content": said["content"] or "",
        "reasoning": said.get("reasoning", ""),
        "calls": [call["function"] for call in said.get("tool_calls", ())],
    }
    return message, choice["finish_reason"], choice["logprobs"]["content"], answer["usage"]


def messages(events: list[Any]) -> Any:
    blocks: list[tuple[dict[str, Any], str]] = []
    stopped: dict[str, Any] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"], ""))
        if event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            more = [event["delta"].get(name, "") for name in ("text", "thinking", "partial_json")]
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + "".join(more))
        if event["type"] == "message_delta":
            stopped = event
    return [_filled(*block) for block in blocks], stopped["delta"], stopped["usage"]


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    return {**block, "input": json.loads(text) if text.endswith("}") else {}}


def whole_message(answer: Any) -> Any:
    return (
        answer["content"],
        {name: answer[name] for name in ("stop_reason", "stop_sequence")},
        answer["usage"],
    )


def lines(events: list[Any]) -> Any:
    said = [event["message"] for event in events]
    calls = [call["function"] for message in said for call in message.get("tool_calls", ())]
    logprobs = [each for event in events for each in event.get("logprobs", ())]
    end = {name: events[-1][name] for name in ("done_reason", "prompt_eval_count", "eval_count")}
    text = "".join(message["content"] for message in said)
    return text, "".join(message.get("thinking", "") for message in said), calls, logprobs, end


Reading = Callable[[Any], Any]
FUNCTION_TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"model": "pocket", "messages": HI}
PROTOCOLS: dict[str, tuple[dict[str, Any], Reading, Reading]] = {
    "/v1/chat/completions": (
        {"messages": HI, "tools": [FUNCTION_TOOL], "logprobs": True},
        whole_chat,
        chat,
    ),
    "/v1/responses": (
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "include": ["message.output_text.logprobs"],
        },
        lambda answer: (answer["output"], answer["status"], answer["usage"]),
        lambda events: tuple(events[-1]["response"][name] for name in ("output", "status", "usage")),
    ),
    "/v1/messages": (
        {
            **NAMED,
            "max_tokens": 8,
            "tools": [{"name": "look", "input_schema": PARAMETERS}],
            "thinking": {"type": "enabled"},
        },
        whole_message,
        messages,
    ),
    "/api/chat": (
        {**NAMED, "tools": [FUNCTION_TOOL], "logprobs": True},
        lambda answer: lines([answer]),
        lines,
    ),
}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


def read(answer: httpx.Response) -> str:
    """The text of an answer, without the names that are new in each."""
    assert answer.status_code == 200, answer.text
    return re.sub(r'"(msg_|rs_|fc_|call_)[0-9a-f]+"', r'"\1"', answer.text)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_whole_answer_is_its_stream(http: httpx.Client, scripted: Scripted, path: str, script: str) -> None:
    finish: Any = "length" if "cut" in script else "stop"
    end = Delta(
        "", finish_reason=finish, usage=Usage(7, 8, 2), cached_tokens=3,
        reasoning_tokens=2 if "reasoning" in script else 0, drafts=(2, 1),
    )  # fmt: skip
    scripted.answer = lambda _: [*SCRIPTS[script], end]
    body, whole, folded = PROTOCOLS[path]
    extra = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    streamed = read(http.post(path, json={**body, "stream": True, **extra}))
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line[:1] in ("d", "{")]
    found = folded([json.loads(event) for event in events if event != "[DONE]"])
    assert found == whole(json.loads(read(http.post(path, json={**body, "stream": False}))))

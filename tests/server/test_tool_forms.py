"""Every protocol shows calls in the form of the model that is served."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from snugvl.core.messages import ToolForm
from tests.patience import PATIENCE_S
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.live import live

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
FUNCTION = {"name": "run", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
ARGUMENTS = {"n": 5, "s": "5"}
JSON = json.dumps(ARGUMENTS)
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "run", "arguments": {JSON}}}\n</tool_call>',
    "llama": f'{{"name": "run", "parameters": {JSON}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "run", "arguments": {JSON}}}]',
    "mistral-args": f"[TOOL_CALLS]run[ARGS]{JSON}",
    "qwen-xml": "<tool_call>\n<function=run>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\n5\n"
    "</parameter>\n</function>\n</tool_call>",
}

ENDS_AT_A_LIMIT = ('"length"', '"max_output_tokens"', '"model_context_window_exceeded"')


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with live(service) as url:
        yield service, url


@pytest.fixture(params=ANSWERS)
def url(request: pytest.FixtureRequest, served: tuple[FakeService, str]) -> str:
    """A server whose model answers with text and a call, in small pieces."""
    service, base = served
    text = "So:\n" + ANSWERS[request.param]
    service.script = Script([text[at : at + 7] for at in range(0, len(text), 7)])
    service.capabilities = replace(CAPABILITIES, tool_form=ToolForm(request.param))
    return base


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url, json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def test_chat_completions(url: str) -> None:
    body = {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]}
    choice = post(f"{url}/v1/chat/completions", body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("run", ARGUMENTS)
    text = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=PATIENCE_S).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line != "[DONE]"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == ARGUMENTS


def test_responses(url: str) -> None:
    body = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    message, call = post(f"{url}/v1/responses", body)["output"]
    assert message["content"][0]["text"] == "So:"
    assert (call["name"], json.loads(call["arguments"])) == ("run", ARGUMENTS)
    text = httpx.post(f"{url}/v1/responses", json={**body, "stream": True}, timeout=PATIENCE_S).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == ARGUMENTS


def test_messages(url: str) -> None:
    tool = {"name": "run", "input_schema": SCHEMA}
    body = {"model": "pocket", "max_tokens": 64, "messages": HI, "tools": [tool]}
    text, call = post(f"{url}/v1/messages", body)["content"]
    assert text["text"] == "So:"
    assert (call["name"], call["input"]) == ("run", ARGUMENTS)


def test_ollamas_chat(url: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"model": "pocket", "messages": HI, "tools": tools, "stream": False}
    message = post(f"{url}/api/chat", body)["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], call["function"]["name"]) == ("So:", "run")
    assert call["function"]["arguments"] == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_a_call_that_a_limit_cuts_before_its_arguments_is_no_text(
    served: tuple[FakeService, str], form: str, stream: bool
) -> None:
    service, url = served
    begun = ANSWERS[form][: ANSWERS[form].index("run") + 2]
    service.script = Script(["So:\n", begun], finish="length")
    service.capabilities = replace(CAPABILITIES, tool_form=ToolForm(form))
    tool = {"type": "function", "function": FUNCTION}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HI, "tools": [tool]},
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        "/v1/messages": {"model": "pocket", "max_tokens": 9, "messages": HI,
                         "tools": [{"name": "run", "input_schema": SCHEMA}]},
        "/api/chat": {"model": "pocket", "messages": HI, "tools": [tool]},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = httpx.post(url + path, json={**body, "stream": stream}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert "So:" in answer.text
        assert "TOOL_CALLS" not in answer.text, path
        assert "tool_call>" not in answer.text, path
        assert any(word in answer.text for word in ENDS_AT_A_LIMIT), path


@pytest.mark.parametrize("stream", [False, True])
def test_who_offers_tools_is_told_where_the_template_shows_none(
    served: tuple[FakeService, str], stream: bool
) -> None:
    service, url = served
    service.script, service.capabilities = Script(), replace(CAPABILITIES, tools=False)
    tool = {"type": "function", "function": FUNCTION}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HI, "tools": [tool]},
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        "/v1/messages": {"model": "pocket", "max_tokens": 9, "messages": HI,
                         "tools": [{"name": "run", "input_schema": SCHEMA}]},
        "/api/chat": {"model": "pocket", "messages": HI, "tools": [tool]},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = httpx.post(url + path, json={**body, "stream": stream}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        told = answer.headers["snugvl-warning"]
        assert told == "described the tools in the system message, as this model's chat template shows none"
        without = {name: value for name, value in body.items() if name != "tools"}
        answer = httpx.post(url + path, json={**without, "stream": stream}, timeout=PATIENCE_S)
        assert "snugvl-warning" not in answer.headers

"""What a model thinks before it answers, in each protocol's form: whole, streamed, counted, brought back."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import OpenAI

from snugvl.core.messages import Delta, Message, Text, ToolCall, Usage
from tests.server.live import live
from tests.server.openai.scripted import Scripted

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def thoughtful() -> list[Delta]:
    """Five tokens of thought, two of an answer; 3 of 7 tokens of the prompt were cached."""
    return [
        Delta("", reasoning="It is"),
        Delta("", reasoning=" round"),
        Delta("Yes"),
        Delta("."),
        Delta("", finish_reason="stop", usage=Usage(7, 8), cached_tokens=3, reasoning_tokens=5),
    ]


@pytest.fixture
def service() -> Scripted:
    return Scripted(answer=lambda _: thoughtful())


@pytest.fixture
def url(service: Scripted) -> Iterator[str]:
    with live(service) as base:
        yield base


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json={"model": "pocket", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(url: str, path: str, **body: Any) -> list[Any]:
    """What a stream holds, of either kind of line."""
    answer = httpx.post(url + path, json={"model": "pocket", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line[:5] in ("data:", '{"mod')
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_completions(url: str, service: Scripted) -> None:
    answer = post(url, "/v1/chat/completions", messages=HI)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["reasoning_content"] == message["reasoning"] == "It is round"
    assert message["content"] == "Yes."
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 5
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    streamed = events(url, "/v1/chat/completions", messages=HI, stream_options={"include_usage": True})
    deltas = [part["choices"][0]["delta"] for part in streamed if part["choices"]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == "It is round"
    assert streamed[-1]["usage"] == usage
    for name in ("reasoning_content", "reasoning"):
        past = {"role": "assistant", "content": "Yes.", name: "It is round"}
        post(url, "/v1/chat/completions", messages=[*HI, past, *HI])
        assert service.last.messages[1] == Message("assistant", (Text("Yes."),), reasoning="It is round")
    post(url, "/v1/chat/completions", messages=[*HI, {**past, "content": None}, *HI])  # cut while it thought
    assert service.last.messages[1].reasoning == "It is round"
    post(url, "/v1/chat/completions", messages=[*HI, {**past, "reasoning": {"effort": "low"}}, *HI])
    assert service.last.messages[1].reasoning == ""


def test_responses(url: str, service: Scripted) -> None:
    answer = post(url, "/v1/responses", input="hi")
    thought, message = answer["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": "It is round"}]
    assert message["content"][0]["text"] == "Yes."
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    with (
        OpenAI(base_url=url + "/v1", api_key="none") as sdk,
        sdk.responses.create(model="pocket", input="hi", stream=True) as stream,
    ):
        told = list(stream)
    kinds = [event.type.removeprefix("response.") for event in told]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in told] == list(range(len(told)))
    places = [event.output_index for event in told if hasattr(event, "output_index")]
    assert places == [0] * 7 + [1] * 7
    final: Any = told[-1]
    assert final.response.output_text == "Yes."
    assert final.response.output[0].content[0].text == "It is round"
    assert final.response.usage.output_tokens_details.reasoning_tokens == 5

    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "a ball"}
    post(url, "/v1/responses", tools=[TOOL], input=[*HI, thought, call, output, thought, message, *HI])
    _, first, _, second, _ = service.last.messages
    assert first == Message("assistant", (), (ToolCall("c", "look", "{}"),), reasoning="It is round")
    assert second == Message("assistant", (Text("Yes."),), reasoning="It is round")
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Round."}]}
    post(url, "/v1/responses", input=[*HI, summary, message, *HI])
    assert service.last.messages[1].reasoning == "Round."
    sealed = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x", "content": None}
    post(url, "/v1/responses", input=[*HI, sealed, message, *HI])
    assert service.last.messages[1].reasoning == ""


def test_a_response_that_was_cut_while_it_thought(url: str, service: Scripted) -> None:
    end = replace(thoughtful()[-1], finish_reason="length")
    service.answer = lambda _: [Delta("", reasoning="It is"), end]
    answer = post(url, "/v1/responses", input="hi")
    (only,) = answer["output"]
    assert (answer["status"], only["type"], only["status"]) == ("incomplete", "reasoning", "incomplete")
    *_, done, last = events(url, "/v1/responses", input="hi")
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert last["response"]["output"] == [{**only, "id": done["item"]["id"]}]


ASKED = {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 1024}}


def test_messages(url: str, service: Scripted) -> None:
    answer = post(url, "/v1/messages", messages=HI, **ASKED)
    thought, text = answer["content"]
    assert thought == {"type": "thinking", "thinking": "It is round", "signature": ""}
    assert text == {"type": "text", "text": "Yes."}
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 3, 8)
    found = [event for event in events(url, "/v1/messages", messages=HI, **ASKED) if "block" in event["type"]]
    assert [(event["type"].removeprefix("content_block_"), event["index"]) for event in found] == [
        ("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
    ]  # fmt: skip
    assert found[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"] for event in found if "delta" in event] == [
        {"type": "thinking_delta", "thinking": "It is"},
        {"type": "thinking_delta", "thinking": " round"},
        {"type": "signature_delta", "signature": ""},
        {"type": "text_delta", "text": "Yes"},
        {"type": "text_delta", "text": "."},
    ]
    post(url, "/v1/messages", messages=[*HI, {"role": "assistant", "content": [thought, text]}, *HI], **ASKED)
    assert service.last.messages[1] == Message("assistant", (Text("Yes."),), reasoning="It is round")


@pytest.mark.parametrize("asked", [{}, {"thinking": {"type": "disabled"}}])
def test_messages_show_no_thoughts_to_who_did_not_ask(url: str, asked: dict[str, Any]) -> None:
    """Their first block is the text; the tokens are counted all the same."""
    answer = post(url, "/v1/messages", messages=HI, max_tokens=50, **asked)
    assert answer["content"] == [{"type": "text", "text": "Yes."}]
    assert answer["usage"]["output_tokens"] == 8


def test_ollama(url: str, service: Scripted) -> None:
    message = post(url, "/api/chat", messages=HI, stream=False)["message"]
    assert message == {"role": "assistant", "content": "Yes.", "thinking": "It is round"}
    lines = [line["message"] for line in events(url, "/api/chat", messages=HI)]
    assert "".join(line.get("thinking", "") for line in lines) == "It is round"
    assert "".join(line["content"] for line in lines) == "Yes."
    answer = post(url, "/api/generate", prompt="hi", stream=False)
    assert (answer["thinking"], answer["response"]) == ("It is round", "Yes.")
    post(url, "/api/chat", messages=[*HI, message, *HI], stream=False)
    assert service.last.messages[1] == Message("assistant", (Text("Yes."),), reasoning="It is round")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "name": "a", "schema": SCHEMA}
COUNTING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "anthropic": ("/v1/messages", "/v1/messages/count_tokens", {"messages": HI}),
    "responses": ("/v1/responses", "/v1/responses/input_tokens", {"input": "hi"}),
    "chat": ("/v1/chat/completions", "/tokenize", {"messages": HI}),
}


@pytest.mark.parametrize(
    ("protocol", "asked", "told"),
    [
        ("anthropic", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ("anthropic", {"think": True}, {"enable_thinking": True}),
        ("anthropic", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {}),
        ("responses", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("responses", {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        ("responses", {"text": {"format": FORM}}, {}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ("chat", {"enable_thinking": True}, {"enable_thinking": True}),
    ],
)
def test_the_prompt_that_is_counted_is_the_one_that_is_answered(
    url: str, service: Scripted, protocol: str, asked: dict[str, Any], told: dict[str, Any]
) -> None:
    """Whether the model is to think is written into its prompt, so it changes how many tokens that has."""
    answers, counts, body = COUNTING[protocol]
    post(url, answers, **body, **asked, **({"max_tokens": 9} if protocol == "anthropic" else {}))
    post(url, counts, **body, **asked)
    answered, counted = service.requests[-1], service.counted[-1]
    assert counted.template == answered.template == told
    assert (counted.messages, counted.grammar) == (answered.messages, answered.grammar)
    assert (counted.grammar is not None) == ("json_schema" in str(asked))

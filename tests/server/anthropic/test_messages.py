"""/v1/messages: answers, streams, stop sequences, tools, structured outputs."""

import base64
import json
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Delta, Request, Usage
from snugvl.errors import EngineError, RequestTooLarge
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, FakeStream, Script
from tests.server.live import live

ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLS = (
    "Let me see.\n<tool",
    '_call>\n{"name": "add", "arg',
    'uments": {"a"',
    ': 1}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
)


def send(url: str, content: Any = "Hi", **more: Any) -> httpx.Response:
    body = {"model": "pocket", "max_tokens": 64, "messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{url}/v1/messages", json=body, timeout=PATIENCE_S)


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def block(picture: bytes) -> dict[str, Any]:
    data = base64.b64encode(picture).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def question(picture: bytes) -> list[dict[str, Any]]:
    return [block(picture), {"type": "text", "text": "What colour is the circle?"}]


def test_a_question_about_a_picture(url: str, picture: bytes) -> None:
    message = answer(send(url, question(picture)))
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "pocket")
    (text,) = message["content"]
    assert text["text"].lower() == "red"
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert prompt(message["usage"]) > 60
    assert message["usage"]["output_tokens"] == 2


def test_a_picture_by_its_url(url: str, data_url: str) -> None:
    source = {"type": "image", "source": {"type": "url", "url": data_url}}
    text = {"type": "text", "text": "What colour is the circle?"}
    assert answer(send(url, [source, text]))["content"][0]["text"].lower() == "red"


def test_a_stream_has_anthropic_s_events_in_order(url: str, picture: bytes) -> None:
    found = events(send(url, question(picture), stream=True))
    kinds = [event["type"] for event in found]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    text = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    assert text.lower() == "red"
    whole = answer(send(url, question(picture)))
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (prompt(whole["usage"]), 0)
    last = found[-2]["usage"]
    assert (prompt(last), last["output_tokens"]) == (prompt(whole["usage"]), whole["usage"]["output_tokens"])


def test_max_tokens(url: str) -> None:
    message = answer(send(url, max_tokens=2.0))
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 2)


@pytest.mark.parametrize("max_tokens", [4095, 64_000])
def test_more_tokens_than_fit_are_what_fits(url: str, max_tokens: int) -> None:
    assert answer(send(url, max_tokens=max_tokens))["stop_reason"] == "end_turn"


class FullService(FakeService):
    """Its answers fill the context after three tokens."""

    async def submit(self, request: Request) -> FakeStream:
        return FakeStream([(Delta("One", finish_reason="length", usage=Usage(509, 3)),)])


def test_an_answer_that_fills_the_context_says_so() -> None:
    with live(FullService()) as base:
        message = answer(send(base, max_tokens=500))
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_a_prompt_that_does_not_fit_is_refused(url: str) -> None:
    response = send(url, "word " * 10_000)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"].startswith("prompt is too long: This model's maximum context")


def test_only_a_refusal_of_max_tokens_is_tried_again() -> None:
    service = FakeService(Script(refusal=RequestTooLarge("too much", field="prompt_ids")))
    with live(service) as base:
        assert send(base).status_code == 400
    assert len(service.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_it_is_told(stream: bool) -> None:
    service = FakeService(Script(["One t", "wo "], stop="END"))
    with live(service) as base:
        response = send(base, stop_sequences=["four", "END", "D th"], stream=stream)
    if stream:
        found = events(response)
        text = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
        told = found[-2]["delta"]
    else:
        told = answer(response)
        text = told["content"][0]["text"]
    assert text == "One two "
    assert service.requests[-1].sampling.stop == ("four", "END", "D th")
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")
    assert not service.running


def test_tokens_are_counted_up_to_the_stop_sequence(url: str) -> None:
    whole = answer(send(url))
    first = whole["content"][0]["text"].split(" ")[1]
    cut = answer(send(url, stop_sequences=[first]))
    assert whole["content"][0]["text"].startswith(cut["content"][0]["text"] + first)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", first)
    assert prompt(cut["usage"]) == prompt(whole["usage"])
    assert 0 < cut["usage"]["output_tokens"] < whole["usage"]["output_tokens"]


def test_calls_are_blocks_of_their_own() -> None:
    with live(FakeService(Script(CALLS))) as base:
        message = answer(send(base, tools=[ADD]))
    text, one, two = message["content"]
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (one["type"], one["name"], one["input"]) == ("tool_use", "add", {"a": 1})
    assert (two["input"], message["stop_reason"]) == ({}, "tool_use")
    assert one["id"] != two["id"]


def test_calls_stream_as_pieces_of_json() -> None:
    with live(FakeService(Script(CALLS))) as base:
        found = events(send(base, tools=[ADD], stream=True))
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert starts[1]["content_block"]["input"] == {}
    stops = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]
    pieces = [
        event["delta"]["partial_json"] for event in found if event.get("index") == 1 and "delta" in event
    ]
    assert json.loads("".join(pieces)) == {"a": 1}
    assert len(pieces) > 1
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_text_behind_a_call_is_a_block_of_its_own() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    with live(FakeService(Script(("Let me see.", call, "\nThat is", " all.")))) as base:
        whole = answer(send(base, tools=[tool]))
        streamed = events(send(base, tools=[tool], stream=True))
    kinds = ["text", "tool_use", "text"]
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["content"][2]["text"].strip() == "That is all."
    starts = [event for event in streamed if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == kinds
    assert [event["index"] for event in starts] == [0, 1, 2]
    ends = [event["index"] for event in streamed if event["type"] == "content_block_stop"]
    assert ends == [0, 1, 2]
    texts = [event for event in streamed if event.get("delta", {}).get("type") == "text_delta"]
    assert {event["index"] for event in texts} == {0, 2}


def test_an_answer_without_text_has_no_blocks() -> None:
    with live(FakeService(Script([]))) as base:
        assert answer(send(base))["content"] == []
        kinds = [event["type"] for event in events(send(base, stream=True))]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_a_tool_that_must_be_called_is_called(url: str) -> None:
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"name": "add", "input_schema": schema}
    message = answer(send(url, "Add.", tools=[tool], tool_choice=choice))
    (call,) = message["content"]
    assert call["name"] == "add"
    assert call["input"]["a"] in (1, 2)
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_is_kept_to(url: str, field: str) -> None:
    wanted: dict[str, Any] = {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
    more = {field: {"format": wanted} if field == "output_config" else wanted}
    text = answer(send(url, "What colour?", **more))["content"][0]["text"]
    assert json.loads(text)["colour"] in ("red", "blue")


def test_tokens_are_counted_without_an_answer(url: str, picture: bytes) -> None:
    body = {"model": "pocket", "messages": [{"role": "user", "content": question(picture)}], "system": "Hm."}
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": prompt(answer(send(url, question(picture), system="Hm."))["usage"])}
    more = httpx.post(f"{url}/v1/messages/count_tokens", json={**body, "tools": [ADD]}).json()
    assert more["input_tokens"] > counted["input_tokens"]


def test_an_engine_that_dies_ends_the_stream_with_an_error_event() -> None:
    service = FakeService(Script(["A", " cat"], error=EngineError("the engine died")))
    with live(service) as base:
        last = events(send(base, stream=True))[-1]
        whole = send(base)
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "the engine died"}
    assert whole.status_code == 500
    assert whole.json()["error"] == last["error"]


@pytest.mark.parametrize("kind", ["image/jpg", "image/heic", None])
def test_content_decides_what_a_picture_is(url: str, picture: bytes, kind: str | None) -> None:
    block = question(picture)
    block[0]["source"]["media_type"] = kind
    assert send(url, block).status_code == 200


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_a_turn_may_be_empty(url: str, content: Any) -> None:
    assert send(url, content).status_code == 200


def prompt(usage: dict[str, int]) -> int:
    """Tokens of the whole prompt, those of the prefix cache among them."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_tokens_that_the_prefix_cache_had_stand_apart(url: str) -> None:
    text = "A red circle and a blue square stand on a table. " * 20
    whole = [answer(send(url, text, system="Be kind."))["usage"] for _ in range(2)]
    assert prompt(whole[0]) == prompt(whole[1])
    assert whole[1]["cache_read_input_tokens"] > whole[1]["input_tokens"] > 0
    streamed = events(send(url, text, system="Be kind.", stream=True))[-2]["usage"]
    assert streamed["cache_read_input_tokens"] == whole[1]["cache_read_input_tokens"]

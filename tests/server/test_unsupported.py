"""What would change the answer is refused with what to do instead; what can't change it is ignored."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from snugvl.core.messages import Text, ToolCall
from snugvl.server.anthropic import MessagesRequest
from snugvl.server.ollama.request import ChatRequest
from snugvl.server.openai.chat import ChatCompletionRequest
from snugvl.server.openai.completions import CompletionRequest
from snugvl.server.openai.responses_request import ResponseRequest
from snugvl.server.unsupported import UnsupportedFields
from tests.server.live import asking
from tests.server.openai.scripted import Scripted

HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, tuple[str, dict[str, Any], UnsupportedFields]] = {
    "chat": ("/v1/chat/completions", {"messages": [HI]}, ChatCompletionRequest.unsupported),
    "completions": ("/v1/completions", {"prompt": "Hi"}, CompletionRequest.unsupported),
    "responses": ("/v1/responses", {"input": "Hi"}, ResponseRequest.unsupported),
    "messages": (
        "/v1/messages",
        {"model": "pocket", "max_tokens": 9, "messages": [HI]},
        MessagesRequest.unsupported,
    ),
    "ollama": ("/api/chat", {"model": "pocket", "messages": [HI], "stream": False}, ChatRequest.unsupported),
}
WISHED: dict[str, Any] = {"best_of": 3, "mirostat": 2}  # a value that asks for something
FAR: Any = {"wished": ["much"]}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


def test_fifty_wishes_are_refused() -> None:
    refused = {
        name for _, _, table in BODIES.values() for name, field in table.items() if field.verdict == "refused"
    }
    assert len(refused) >= 50


@pytest.mark.parametrize("protocol", BODIES)
def test_every_field_gets_its_verdict(http: httpx.Client, protocol: str) -> None:
    path, body, table = BODIES[protocol]
    assert len(table) >= 40
    for name, field in table.items():
        if field.verdict == "read":
            assert http.post(path, json={**body, name: None}).status_code == 200, name
            continue
        answer = http.post(path, json={**body, name: WISHED.get(name, FAR)})
        assert answer.status_code == 400, (name, answer.text)
        assert f"{name} is not supported: {field.why}" in answer.text.replace('\\"', '"'), name
        for nothing in (None, *field.nothing):
            assert http.post(path, json={**body, name: nothing}).status_code == 200, (name, nothing)


# Whatever else there is changes no answer, and is told.
CHANGE_NOTHING = (
    "prediction",
    "prompt_cache_key",
    "service_tier",
    "cache_prompt",
    "slot_id",
    "provider",
    "num_gpu",
)


@pytest.mark.parametrize("protocol", BODIES)
def test_what_changes_no_answer_is_told(http: httpx.Client, protocol: str) -> None:
    path, body, _ = BODIES[protocol]
    answer = http.post(path, json={**body, **dict.fromkeys(CHANGE_NOTHING, "much")})
    assert answer.status_code == 200, answer.text
    told = answer.headers["snugvl-warning"].split("; ")
    assert told == [f"ignored {name}" for name in CHANGE_NOTHING]


def test_what_is_ignored_leaves_room_for_what_matters(http: httpx.Client, scripted: Scripted) -> None:
    body = {"messages": [HI], "max_tokens": 10**6, **{f"knob_{index}": 1 for index in range(40)}}
    told = http.post("/v1/chat/completions", json=body).headers["snugvl-warning"]
    assert "lowered max_tokens from 1,000,000" in told
    assert told.count("ignored") == 12


def test_what_changes_answers_is_refused_by_every_protocol_that_lacks_it(http: httpx.Client) -> None:
    for protocol, (path, body, _) in BODIES.items():
        for name, value in (("logit_bias", {"5": 1}), ("min_p", 0.5), ("xtc_probability", 0.5), ("n", 2)):
            answer = http.post(path, json={**body, name: value})
            honoured = protocol in ("chat", "completions") and name != "xtc_probability"
            assert answer.status_code == (200 if honoured else 400), (protocol, name, answer.text)


def test_a_prompt_that_is_only_counted_has_no_wishes(http: httpx.Client) -> None:
    body = {"model": "pocket", "messages": [HI], "max_tokens": 5, "temperature": 1, "stop_sequences": ["x"]}
    assert http.post("/v1/messages/count_tokens", json=body).status_code == 200


@pytest.mark.parametrize("protocol", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_nobody_knows_is_told(http: httpx.Client, protocol: str, stream: bool) -> None:
    path, body, _ = BODIES[protocol]
    answer = http.post(path, json={**body, "stream": stream, "some_knob": 1, "other": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers["snugvl-warning"] == "ignored some_knob"


SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
NESTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stream_options": ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "text": ("chat", {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    "json_object": ("chat", {"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    "json_schema": (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}},
        "response_format.json_schema.type; ignored response_format.json_schema.x",
    ),
    "completions": ("completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "a response's stream": ("responses", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "a response's reasoning": (
        "responses", {"reasoning": {"x": 1, "summary": "auto"}}, "reasoning.x; ignored reasoning.summary"
    ),
    "a response's text": ("responses", {"text": {"x": 1}}, "text.x"),
    "a response's format": ("responses", {"text": {"format": {**SCHEMA, "x": 1}}}, "text.format.x"),
    "a response's object": (
        "responses", {"text": {"format": {"type": "json_object", "x": 1}}}, "text.format.x"
    ),
    "output_config": ("messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
    "options": ("ollama", {"options": {"x": 1}}, "options.x"),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_name_nobody_knows_is_told_below_the_top_too(http: httpx.Client, name: str) -> None:
    protocol, fields, told = NESTED[name]
    path, body, _ = BODIES[protocol]
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["snugvl-warning"] == f"ignored {told}"


def test_a_strangers_name_makes_no_header(http: httpx.Client) -> None:
    body = {"messages": [HI], "a\r\nSet-Cookie: x; y\u00e9": 1, **{f"n{i}": 1 for i in range(100)}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["snugvl-warning"].startswith("ignored a??Set-Cookie: x? y?; ignored n0")
    assert len(answer.headers["snugvl-warning"]) < 4000
    assert "set-cookie" not in answer.headers


def test_our_own_tasks_refuse_what_they_dont_know(http: httpx.Client) -> None:
    answer = http.post("/v1/vision/caption", json={"image": "data:,", "some_knob": 1})
    assert answer.json()["error"]["param"] == "some_knob"


CALL = {
    "id": "a",
    "index": 0,
    "type": "function",
    "provider_specific_fields": {"x": 1},
    "function": {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}, "strict": None},
}


def test_a_clients_own_history_is_taken(http: httpx.Client, scripted: Scripted) -> None:
    history = [
        {**HI, "id": "1", "content": [{"type": "text", "text": "Hi", "cache_control": {"x": 1}}]},
        {"role": "assistant", "content": "So", "parsed": {"a": 1}, "refusal": None, "reasoning": "hm",
         "reasoning_content": "hm", "provider_specific_fields": {}, "tool_calls": [CALL], "annotations": [1]},
        {"role": "tool", "tool_call_id": "a", "content": "3", "is_error": False},
    ]  # fmt: skip
    tool = {**TOOL, "cache_control": {}, "function": {**TOOL["function"], "returns": "x"}}  # type: ignore[dict-item]
    answer = http.post("/v1/chat/completions", json={"messages": history, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert "snugvl-warning" not in answer.headers
    asked = scripted.last.messages
    assert asked[1].content == (Text("So"),)
    assert asked[1].tool_calls == (ToolCall("a", "f", '{"a": 1}'),)


def test_what_the_sdk_returns_goes_back_as_it_is(http: httpx.Client, scripted: Scripted) -> None:
    with OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none", max_retries=0) as sdk:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
        parsed = sdk.chat.completions.parse(model="pocket", messages=messages).choices[0].message
        with sdk.chat.completions.stream(model="pocket", messages=messages) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for message in (parsed, streamed):
            again = [*messages, message.to_dict(), *messages]
            assert sdk.chat.completions.create(model="pocket", messages=again).choices  # type: ignore[arg-type]


def test_ollamas_history_is_taken(http: httpx.Client, scripted: Scripted) -> None:
    call = {"id": "a", "index": 0, "function": {"index": 0, "name": "f", "arguments": {"a": 1}, "x": 1}}
    said = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call], "created": 1}
    history = [HI, said, {"role": "tool", "content": "3", "name": "f", "tool_name": "f"}]
    body = {"model": "pocket", "stream": False, "messages": history}
    assert http.post("/api/chat", json=body).status_code == 200
    assert json.loads(scripted.last.messages[1].tool_calls[0].arguments) == {"a": 1}


def test_responses_take_their_own_output_back(http: httpx.Client, scripted: Scripted) -> None:
    text = {"type": "output_text", "text": "So", "annotations": [{"type": "x"}], "logprobs": [], "parsed": 1}
    items = [
        {"type": "message", "role": "user", "content": "Hi", "x": 1},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [text], "status": "completed"},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    body = {"input": items, "reasoning": {"effort": "low"}, "store": True}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["snugvl-warning"] == "ignored store"
    assert scripted.last.template == {"reasoning_effort": "low"}
    assert answer.json()["reasoning"] == {"effort": "low", "summary": None}
    assert [message.role for message in scripted.last.messages] == ["user", "assistant", "user"]


READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # what is sent, and what the engine is asked
    "repeat_penalty": ("chat", {"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "the same twice": (
        "chat", {"repeat_penalty": 1.2, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "none of it": ("chat", {"repeat_penalty": 1, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "a bare prompt's": ("completions", {"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "n_predict": ("chat", {"n_predict": 7}, {"max_tokens": 7}),
    "no limit": ("chat", {"n_predict": -1, "max_tokens": 7}, {"max_tokens": 7}),
    "max_new_tokens": ("chat", {"max_new_tokens": 7}, {"max_tokens": 7}),
    "a response's length": ("responses", {"max_tokens": 7}, {"max_tokens": 7}),
    "random_seed": ("chat", {"random_seed": 3}, {"seed": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_another_name_is_the_field(http: httpx.Client, scripted: Scripted, name: str) -> None:
    protocol, fields, asked = READ[name]
    path, body, _ = BODIES[protocol]
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    assert "snugvl-warning" not in answer.headers
    assert {key: getattr(scripted.last.sampling, key) for key in asked} == asked


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"think": True}, ON),
        ({"think": False}, OFF),
        ({"think": "high"}, ON),
        ({"think": "none"}, OFF),
        ({"enable_thinking": False}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}}, ON),
        ({"think": True, "chat_template_kwargs": {"x": 1}}, {**ON, "x": 1}),
        ({"think": True, "chat_template_kwargs": OFF}, OFF),
    ],
)
def test_thinking_has_many_names(
    http: httpx.Client, scripted: Scripted, fields: dict[str, Any], template: dict[str, Any]
) -> None:
    path, body, _ = BODIES["chat"]
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    assert scripted.last.template == template


def test_thinking_of_a_response_is_its_effort(http: httpx.Client, scripted: Scripted) -> None:
    for fields, effort in (
        ({"think": False}, "none"),
        ({"enable_thinking": True}, "medium"),
        ({"reasoning_effort": "low"}, "low"),
        ({"think": False, "reasoning": {"effort": "high"}}, "high"),
    ):
        answer = http.post("/v1/responses", json={"input": "Hi", **fields})
        assert answer.status_code == 200, answer.text
        assert scripted.last.template == {"reasoning_effort": effort}


def test_thinking_of_other_protocols(http: httpx.Client, scripted: Scripted) -> None:
    for protocol in ("messages", "ollama"):
        path, body, _ = BODIES[protocol]
        for wanted in (True, False):
            answer = http.post(path, json={**body, "enable_thinking": wanted})
            assert answer.status_code == 200, answer.text
            assert scripted.last.template == {"enable_thinking": wanted}


FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "source"),
    [
        ("", None),
        ("json", {"type": "object"}),
        (FORM, {**FORM, "additionalProperties": False}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
def test_ollamas_format_is_a_response_format(
    http: httpx.Client, scripted: Scripted, form: Any, source: Any
) -> None:
    path, body, _ = BODIES["chat"]
    answer = http.post(path, json={**body, "format": form})
    assert answer.status_code == 200, answer.text
    grammar = scripted.last.grammar
    assert (None if grammar is None else json.loads(grammar.source)) == source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty"),
        ({"format": "json", "response_format": {"type": "text"}}, "format"),
        ({"repeat_penalty": "much"}, "repetition_penalty"),
        ({"format": "yaml"}, "response_format"),
    ],
)
def test_two_names_with_two_values_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    path, body, _ = BODIES["chat"]
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_base_url_without_its_version_is_told(http: httpx.Client) -> None:
    said = http.post("/chat/completions", json={}).text
    assert "there is no POST /chat/completions; use /v1/chat/completions (is the base URL right?)" in said


@pytest.mark.parametrize("protocol", BODIES)
def test_a_picture_in_the_wrong_place_is_never_left_unseen(http: httpx.Client, protocol: str) -> None:
    """Answered without it, and with confidence: of a body, and of a message within it."""
    path, body = BODIES[protocol][:2]
    for name in ("image", "images", "image_url"):
        if protocol == "ollama" and name == "images":
            continue  # there it is the right place, of a message and of a prompt
        turn = [{"role": "user", "content": "How many?", name: ["QUJD"]}]
        within = [{**body, key: turn} for key in ("messages", "input") if key in body]
        for wrong in ({**body, name: ["QUJD"]}, *within):
            answer = http.post(path, json=wrong)
            assert answer.status_code == 400, (protocol, name)
            assert "pictures go into" in answer.text, (protocol, name)
        assert http.post(path, json={**body, name: None}).status_code == 200

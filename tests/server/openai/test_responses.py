"""Responses: input items to a conversation, the answer to output items, whole and as events."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, get_args

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from snugvl.core.messages import (
    Delta,
    Grammar,
    Message,
    Picture,
    Request,
    Text,
    Tool,
    ToolCall,
    ToolUse,
)
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, QueueFull
from tests.server.openai.scripted import OURS, Scripted, says, strict, token, unknown
from tests.server.openai.test_tools import NOW, PARIS, SCHEMA

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "time"},
]
OFFERED = (Tool("weather", "of a city", SCHEMA), Tool("time"))
LOGPROBS = ["message.output_text.logprobs"]


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, each checked against OpenAI's types and named by its type."""
    answer = http.post("/responses", json={"input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        parsed = EVENT.validate_python(event, strict=True)
        assert parsed.type == event["type"]
        assert unknown(parsed) <= OURS | {"bytes"}
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_tokens_are_counted_without_an_answer(client: OpenAI, data_url: str) -> None:
    seen: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url}]}]
    told: Any = {"model": "pocket", "instructions": "Be kind.", "tools": TOOLS, "tool_choice": "none"}
    for body in ({"input": seen}, {"input": "hi"}, {"input": "hi", **told}, {"input": seen, **told}):
        counted = client.responses.input_tokens.count(**body)
        answer = client.responses.create(**body, max_output_tokens=1)
        assert counted.object == "response.input_tokens"
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens, body
    without = client.responses.input_tokens.count(input="hi", model="pocket").input_tokens
    assert client.responses.input_tokens.count(input="hi", tools=TOOLS).input_tokens > without + 20
    assert client.responses.input_tokens.count(instructions="Be kind.").input_tokens > 2


def test_what_a_vendor_alone_includes_is_left_out_with_a_warning(http: httpx.Client) -> None:
    for name in get_args(ResponseIncludable):
        answer = http.post("/responses", json={"input": "hi", "include": [name]})
        assert answer.status_code == 200, answer.text
        honoured = name in (*LOGPROBS, "reasoning.encrypted_content")
        assert (
            f"ignored include: nothing here has {name}" in answer.headers.get("snugvl-warning", "")
        ) != honoured


def test_words_with_which_a_model_declined_are_its_answer(http: httpx.Client, scripted: Scripted) -> None:
    said = [{"type": "refusal", "refusal": "No."}]
    items = [{"role": "assistant", "content": said}, {"type": None, "role": "user", "content": "Why?"}]
    assert http.post("/responses", json={"input": items}).status_code == 200
    assert scripted.last.messages[0] == Message("assistant", (Text("No."),))


def test_no_alternatives_are_no_wish_for_logprobs(http: httpx.Client, scripted: Scripted) -> None:
    """As this server's own responses tell it."""
    assert http.post("/responses", json={"input": "hi", "top_logprobs": 0}).status_code == 200
    assert scripted.last.sampling.logprobs is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "keeps nothing between requests"),
        ({"input": "hi", "model": "gpt-9"}, "is not served here"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_counted(http: httpx.Client, body: dict[str, Any], said: str) -> None:
    answer = http.post("/responses/input_tokens", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert said in answer.text


def test_pocket_describes_a_picture(client: OpenAI, data_url: str) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url, "detail": "auto"},
        {"type": "input_text", "text": "Describe this image."},
    ]
    given: Any = [{"role": "user", "content": content}]
    whole = client.responses.create(model="pocket", input=given)
    assert "red" in whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(model="pocket", input=given) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    pieces = client.responses.create(model="pocket", input=given, stream=True)
    text = "".join(event.delta for event in pieces if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_the_async_sdk(url: str) -> None:
    async def ask() -> str:
        async with (
            AsyncOpenAI(base_url=url + "/v1", api_key="none") as client,
            client.responses.stream(model="pocket", input="What is red?") as stream,
        ):
            return (await stream.get_final_response()).output_text

    assert asyncio.run(ask())


def test_the_whole_response_has_openais_shape(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [Delta("Hi", logprobs=(token("Hi", -0.5, ("Ho", -1.0)),)), *says()]
    asked = {
        "model": "also", "instructions": "be brief", "max_output_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "metadata": {"a": "b"}, "tools": TOOLS, "tool_choice": "auto", "user": "me",
        "parallel_tool_calls": False, "text": {"format": {"type": "text"}}, "store": False,
        "include": LOGPROBS, "top_logprobs": 1, "truncation": "disabled",
    }  # fmt: skip
    raw = http.post("/responses", json={"input": "hi", **asked}).json()
    answer = strict(Response, raw)
    for name, value in asked.items():
        if name not in ("include", "tools"):
            assert raw[name] == value, name
    assert [tool.name for tool in answer.tools] == ["weather", "time"]  # type: ignore[union-attr]
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.output_text == "Hi"
    assert raw["output"][0]["content"][0]["logprobs"] == [
        {
            "token": "Hi",
            "bytes": [72, 105],
            "logprob": -0.5,
            "top_logprobs": [{"token": "Ho", "bytes": [72, 111], "logprob": -1.0}],
        }
    ]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7
    sampling = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, logprobs=1)
    assert scripted.last.sampling == sampling
    assert scripted.last.tools == ToolUse(OFFERED, parallel=False)
    assert scripted.last.messages[0] == Message("system", (Text("be brief"),))


def test_what_is_left_out_has_its_default(http: httpx.Client, scripted: Scripted) -> None:
    empty = dict.fromkeys(["store", "previous_response_id", "conversation", "tools", "text", "reasoning"])
    answer = http.post("/responses", json={"input": "hi", **empty}).json()
    assert (answer["store"], answer["temperature"], answer["tool_choice"]) == (False, 0.0, "auto")
    assert answer["text"] == {"format": {"type": "text"}}
    assert scripted.last.sampling == SamplingParams()
    assert scripted.last.messages == (Message("user", (Text("hi"),)),)


def test_items_become_a_conversation(http: httpx.Client, scripted: Scripted, data_url: str) -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [{"type": "input_image", "image_url": data_url}]},
    ]
    answer = http.post("/responses", json={"input": items, "instructions": "be brief"})
    assert answer.status_code == 200, answer.text
    *said, last = scripted.last.messages
    calls = (ToolCall("c1", "weather", '{"city": "Paris"}'), ToolCall("c2", "time", "{}"))
    assert said == [
        Message("system", (Text("be brief"),)),
        Message("system", (Text("be kind"),)),
        Message("user", (Text("a"), Text("b"))),
        Message("assistant", (Text("look"),), calls),
        Message("tool", (Text("sunny"),), tool_call_id="c1"),
        Message("tool", (Text("noon"),), tool_call_id="c2"),
        Message("assistant", (Text("done"),)),
    ]
    assert isinstance(last.content[0], Picture)


def test_who_measures_ignores_the_end(http: httpx.Client, scripted: Scripted) -> None:
    for wish in (True, False, None):
        assert http.post("/responses", json={"input": "hi", "ignore_eos": wish}).status_code == 200
        assert scripted.last.sampling.ignore_eos is bool(wish)


def test_events_of_text(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("Hel", logprobs=(token("Hel", -1.0),)),
        Delta("lo", logprobs=(token("lo", -2.0),)),
        *says(),
    ]
    events = streamed(http, include=LOGPROBS)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert [event["logprobs"][0]["logprob"] for event in events[4:6]] == [-1.0, -2.0]
    assert events[6]["text"] == "Hello"
    assert len(events[6]["logprobs"]) == 2
    assert len({event["item_id"] for event in events[3:8]}) == 1
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["output"] == [events[8]["item"]]
    assert final["id"] == events[0]["response"]["id"]
    assert final["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_events_of_calls(http: httpx.Client, scripted: Scripted, step: int) -> None:
    text = "Hm. " + PARIS + NOW
    scripted.answer = lambda request: says(*(text[at : at + step] for at in range(0, len(text), step)))
    events = streamed(http, tools=TOOLS)
    order = [kind for kind in kinds(events) if "delta" not in kind]
    assert order == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
        "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.done",
        "output_item.done", "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    arguments = ""
    for event in events:
        if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == 1:
            arguments += event["delta"]
    assert json.loads(arguments) == {"city": "Paris"}
    assert done[1]["arguments"] == arguments


def test_calls_of_a_whole_response(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS)
    answer = strict(Response, http.post("/responses", json={"input": "hi", "tools": TOOLS}).json())
    assert [item.type for item in answer.output] == ["function_call"]


@pytest.mark.parametrize("text", ["Hello", "", PARIS, PARIS[:50]])
def test_a_response_cut_off_is_incomplete(http: httpx.Client, scripted: Scripted, text: str) -> None:
    scripted.answer = lambda request: says(*([text] if text else []), finish="length")
    events = streamed(http, tools=TOOLS)
    whole = http.post("/responses", json={"input": "hi", "tools": TOOLS}).json()
    assert kinds(events)[-1] == "incomplete"
    for answer in (events[-1]["response"], whole):
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][-1]["status"] == "incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says()
    whole = http.post("/responses", json={"input": "hi"}).json()
    final = streamed(http)[-1]["response"]
    for answer in (whole, final):
        assert [part["text"] for item in answer["output"] for part in item["content"]] == [""]


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (EngineError("the GPU fell over"), "server_error", "GPU"),
        (QueueFull("no room"), "rate_limit_exceeded", "no room"),
        (ZeroDivisionError("secret"), "server_error", "the server failed"),
    ],
)
def test_an_error_in_the_middle_is_a_failed_response(
    http: httpx.Client, scripted: Scripted, error: Exception, code: str, word: str
) -> None:
    scripted.answer = lambda request: [Delta("Hel"), error]
    events = streamed(http)
    assert kinds(events)[-1] == "failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == code
    assert word in failed["error"]["message"]
    assert not scripted.open


def test_an_aborted_response_failed(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says("Hel", finish="abort")
    assert kinds(streamed(http))[-1] == "failed"


class Point(BaseModel):
    x: int
    y: int


def test_the_sdks_parse_helper(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: says('{"x": 1, ', '"y": 2}')
    answer = sdk.responses.parse(model="pocket", input="hi", text_format=Point)
    assert answer.output_parsed == Point(x=1, y=2)
    assert scripted.last.grammar is not None
    assert json.loads(scripted.last.grammar.source)["required"] == ["x", "y"]
    with sdk.responses.stream(model="pocket", input="hi", text_format=Point) as stream:
        assert stream.get_final_response().output_parsed == Point(x=1, y=2)


def test_json_objects(http: httpx.Client, scripted: Scripted) -> None:
    body = {"input": "hi", "text": {"format": {"type": "json_object"}, "verbosity": "medium"}}
    assert http.post("/responses", json=body).status_code == 200
    assert scripted.last.grammar == Grammar("json_schema", '{"type": "object"}')


class Weather(BaseModel):
    city: str


def test_a_conversation_with_calls_in_the_sdk(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: says("Let me look. " + PARIS.replace("weather", "Weather"))
    tool: Any = pydantic_function_tool(Weather)["function"]
    tools: Any = [{"type": "function", **tool}]
    given: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    first = sdk.responses.parse(model="pocket", input=given, tools=tools)
    call = first.output[1]
    assert call.type == "function_call"
    given += first.output
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    scripted.answer = lambda request: says("It is sunny.")
    assert sdk.responses.create(model="pocket", input=given, tools=tools).output_text == "It is sunny."
    roles = [message.role for message in scripted.last.messages]
    assert roles == ["user", "assistant", "tool"]
    assert scripted.last.messages[1].tool_calls == (ToolCall(call.call_id, "Weather", call.arguments),)


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        ("none", None),
        ("required", ToolUse(OFFERED, "required")),
        ({"type": "function", "name": "time"}, ToolUse(OFFERED, "time")),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
            ToolUse(OFFERED[1:]),
        ),
    ],
)
def test_tool_choice(http: httpx.Client, scripted: Scripted, choice: Any, use: ToolUse | None) -> None:
    raw = http.post("/responses", json={"input": "hi", "tools": TOOLS, "tool_choice": choice}).json()
    assert strict(Response, raw)
    assert raw["tool_choice"] == choice
    assert scripted.last.tools == use


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def user(**part: Any) -> dict[str, Any]:
    return item(role="user", content=[part])


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "again in input"),
    ({"conversation": "conv_1"}, "conversation", "again in input"),
    ({"background": True}, "background", "stream it"),
    ({"prompt": {"id": "x"}}, "prompt", "instructions"),
    ({"truncation": "auto"}, "truncation", "shorten"),
    ({"context_management": [{}]}, "context_management", "shorten"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"stop": "x"}, "stop", "not supported"),
    ({"messages": []}, "messages", "not supported"),
    ({"include": ["everything"]}, "include[0]", "everything"),
    ({"input": [{"type": "compaction"}]}, "input[0]", "or 'reasoning'"),
    (
        {"tools": [{"type": "telepathy"}]},
        "tools[0]",
        "'telepathy' is not supported; use 'function', 'custom' or 'namespace'",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS * 2}, "tools[2].name", "twice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ({"input": None}, "input", ""),
    ({"input": []}, "input", "not be empty"),
    ({"input": 5}, "input", "5"),
    (item(type="item_reference", id="x"), "input[0].item_reference", "send the item itself"),
    (item(id="x"), "input[0].item_reference", "send the item itself"),
    (item(role="king", content="hi"), "input[0].role", "king"),
    (item(role="user"), "input[0].content", "missing"),
    (item(type="function_call_output", output="x"), "input[0].call_id", "missing"),
    (user(type="input_file", file_id="x"), "input[0].content[0]", "input_file"),
    (user(type="input_audio"), "input[0].content[0]", "input_audio"),
    (user(type="input_image", file_id="x"), "input[0].content[0].file_id", "image_url"),
    (user(type="input_image", image_url="x"), "input[0].content[0].image_url", "https://"),
    (user(type="input_image", image_url="x", detail="huge"), "input[0].content[0].detail", "huge"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"temperature": 3}, "temperature", "2"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
    ({"instructions": 5}, "instructions", "string"),
]


@pytest.mark.parametrize(("extra", "param", "word"), REFUSED)
def test_it_is_refused_by_name(
    http: httpx.Client, scripted: Scripted, extra: dict[str, Any], param: str, word: str
) -> None:
    answer = http.post("/responses", json={"input": "hi", **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert word in error["message"], error
    assert not scripted.requests


def test_too_many_tokens_blame_the_right_field(client: OpenAI) -> None:
    with pytest.raises(Exception, match="maximum context length") as refused:
        client.responses.create(model="pocket", input="a " * 9000, max_output_tokens=9)
    assert refused.value.param == "input"  # type: ignore[attr-defined]


def test_an_error_before_the_stream_is_a_status(http: httpx.Client, scripted: Scripted) -> None:
    def refuse(request: Request) -> list[Delta]:
        raise QueueFull("too many requests are waiting")

    scripted.answer = refuse
    assert http.post("/responses", json={"input": "hi", "stream": True}).status_code == 429

"""Tools of chat completions: what is offered, what may be called, and calls on their way out."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from snugvl.core.messages import Tool, ToolUse
from tests.server.openai.scripted import Scripted, says, strict, token
from tests.server.openai.test_chat import HI, events

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "time"}},
]
WEATHER, TIME = Tool("weather", "of a city", SCHEMA), Tool("time")
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(n) for n in names]}}


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse((WEATHER, TIME))),
        ("auto", ToolUse((WEATHER, TIME))),
        ("none", None),
        ("required", ToolUse((WEATHER, TIME), "required")),
        (named("time"), ToolUse((WEATHER, TIME), "time")),
        (allowed("auto", "time"), ToolUse((TIME,))),
        (allowed("required", "time", "weather"), ToolUse((WEATHER, TIME), "required")),
    ],
)
def test_tool_choice(http: httpx.Client, scripted: Scripted, choice: Any, use: ToolUse | None) -> None:
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
    answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert scripted.last.tools == use


def test_a_call_in_an_answer_that_was_cut_does_not_hide_that(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda _: says(PARIS, '\n<tool_call>\n{"name": "ti', finish="length")
    body = {"messages": HI, "tools": TOOLS}
    (choice,) = http.post("/chat/completions", json=body).json()["choices"]
    assert choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    streamed = events(http.post("/chat/completions", json={**body, "stream": True}).text)
    ends = [each["choices"][0]["finish_reason"] for each in streamed if each["choices"]]
    assert [each for each in ends if each] == ["length"]


def test_no_log_probability_is_lost_where_text_is_held_back(http: httpx.Client, scripted: Scripted) -> None:
    """The last token ends a call and shows nothing: its log-probability comes all the same."""
    pieces = ["a", PARIS.removesuffix("</tool_call>"), "</tool_call>"]
    *deltas, last = says(*pieces)
    told = [replace(delta, logprobs=(token(delta.text, -0.5),)) for delta in deltas]
    scripted.answer = lambda _: [*told, replace(last, logprobs=(token("", -0.25),))]
    body = {"messages": HI, "tools": TOOLS, "logprobs": True, "stream": True}
    chunks = events(http.post("/chat/completions", json=body).text)
    shown = [
        each["logprob"]
        for chunk in chunks
        for choice in chunk["choices"]
        for each in (choice["logprobs"] or {}).get("content") or ()
    ]
    assert shown == [-0.5, -0.5, -0.5, -0.25]


def test_no_parallel_calls(http: httpx.Client, scripted: Scripted) -> None:
    body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
    assert http.post("/chat/completions", json=body).status_code == 200
    assert scripted.last.tools == ToolUse((WEATHER, TIME), parallel=False)


def test_calls_of_a_whole_answer(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says("Let me look.\n", PARIS + "\n" + NOW)
    body = {"messages": HI, "tools": TOOLS}
    choice = strict(ChatCompletion, http.post("/chat/completions", json=body).json()).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    calls = choice.message.tool_calls
    assert calls is not None
    shown = [(call.function.name, json.loads(call.function.arguments)) for call in calls]  # type: ignore[union-attr]
    assert shown == [("weather", {"city": "Paris"}), ("time", {})]
    assert len({call.id for call in calls}) == 2


def test_only_calls_means_no_content(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS)
    message = http.post("/chat/completions", json={"messages": HI, "tools": TOOLS}).json()["choices"][0][
        "message"
    ]
    assert message["content"] is None


def test_text_that_looks_like_a_call_is_text_without_tools(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS)
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = http.post("/chat/completions", json={"messages": HI, **extra}).json()["choices"][0]
        assert choice["message"]["content"] == PARIS
        assert choice["finish_reason"] == "stop"


def test_a_call_that_was_cut_off_finishes_with_length(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS[:60], finish="length")
    choice = http.post("/chat/completions", json={"messages": HI, "tools": TOOLS}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_calls_stream_in_deltas(sdk: OpenAI, http: httpx.Client, scripted: Scripted, step: int) -> None:
    text = "Hm. " + PARIS + "\n" + NOW
    scripted.answer = lambda request: says(*(text[at : at + step] for at in range(0, len(text), step)))
    raw = events(http.post("/chat/completions", json={"messages": HI, "tools": TOOLS, "stream": True}).text)
    chunks = [strict(ChatCompletionChunk, chunk) for chunk in raw]
    for chunk in chunks:
        indices = [call.index for call in chunk.choices[0].delta.tool_calls or ()]
        assert len(indices) == len(set(indices))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any("tool_call>" in (chunk.choices[0].delta.content or "") for chunk in chunks)
    with sdk.chat.completions.stream(model="pocket", messages=HI, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hm."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert calls == [("weather", {"city": "Paris"}), ("time", {})]


class Weather(BaseModel):
    city: str


def test_the_sdk_parses_arguments(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS.replace("weather", "Weather"))
    answer = sdk.chat.completions.parse(model="pocket", messages=HI, tools=[pydantic_function_tool(Weather)])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Weather(city="Paris")


def test_an_answer_goes_back_as_the_sdk_dumps_it(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(PARIS)
    answer = sdk.chat.completions.create(model="pocket", messages=HI, tools=TOOLS).choices[0].message
    assert answer.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    scripted.answer = lambda request: says("It is sunny.")
    for dumped in (answer, answer.model_dump(), answer.model_dump(exclude_none=True)):
        messages: Any = [*HI, dumped, result]
        second = sdk.chat.completions.create(model="pocket", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is sunny."
    assert scripted.last.messages[1].tool_calls[0].name == "weather"


REFUSED = [
    ({"tools": TOOLS * 2}, "tools[2].function.name", "twice"),
    ({"tools": [named("required")]}, "tools[0].function.name", "word of tool_choice"),
    ({"tools": [named("a b")]}, "tools[0].function.name", "a b"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "custom"),
    ({"tools": TOOLS, "tool_choice": named("nope")}, "tool_choice", "nope"),
    ({"tools": TOOLS, "tool_choice": named("none")}, "tool_choice", "'none'"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "always"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "nope")}, "tool_choice", "nope"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "not be empty"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": named("weather")}, "tool_choice", "weather"),
]


@pytest.mark.parametrize(("extra", "param", "word"), REFUSED)
def test_what_is_wrong_with_tools_is_said(
    http: httpx.Client, scripted: Scripted, extra: dict[str, Any], param: str, word: str
) -> None:
    answer = http.post("/chat/completions", json={"messages": HI, **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert not scripted.requests

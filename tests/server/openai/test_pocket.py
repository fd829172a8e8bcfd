"""What only a real model shows: answers that are valid by construction, whatever the sampler picks."""

import json
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from pydantic import BaseModel, Field

HI: list[Any] = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


class Forecast(BaseModel):
    city: str = Field(max_length=5)
    degrees: int = Field(ge=-9, le=40)


def check(name: str, arguments: str) -> None:
    """That a call follows its schema."""
    values = json.loads(arguments)
    if name == "time":
        assert values == {}
    else:
        assert values["city"] in ("Paris", "Rome")
        assert 1 <= values["days"] <= 9
        assert len(values) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_follows_its_schema(client: OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
    answer = client.chat.completions.create(
        model="pocket", temperature=1.5, seed=seed, max_tokens=200, parallel_tool_calls=False, **asked
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.tool_calls is not None
    assert len(answer.message.tool_calls) == 1
    call: Any = answer.message.tool_calls[0]
    check(call.function.name, call.function.arguments)


def test_a_named_call_streams(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model="pocket", messages=HI, tools=TOOLS, tool_choice=choice, temperature=1, seed=3, max_tokens=200
    ) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls or ():
        assert call.function.name == "weather"
        check(call.function.name, call.function.arguments)


def test_a_required_call_of_a_response(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    with client.responses.stream(
        model="pocket", input="Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    check(call.name, call.arguments)


@pytest.mark.parametrize("seed", range(3))
def test_json_follows_its_schema(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model="pocket", messages=HI, response_format=Forecast, temperature=1.5, seed=seed, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Forecast)


OPEN = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "next": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Day"}},
    },
    "required": ["city", "next"],
    "$defs": {"Day": {"type": "object", "properties": {"sun": {"type": "boolean"}}, "required": ["sun"]}},
}


@pytest.mark.parametrize("seed", range(4))
def test_no_keys_are_invented_where_a_schema_does_not_forbid_them(client: OpenAI, seed: int) -> None:
    """As pydantic and zod write them; so do clients of both, whose types have no place for such keys."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": OPEN}}]
    body: dict[str, Any] = {"model": "pocket", "messages": HI, "temperature": 1.5, "max_tokens": 400}
    for asked in ({"response_format": form}, {"tools": tools, "tool_choice": "required"}):
        answer = client.chat.completions.create(**body, seed=seed, **asked)
        message = answer.choices[0].message
        texts = [call.function.arguments for call in message.tool_calls or ()] or [message.content]
        for text in texts:
            value = json.loads(text)
            assert value.keys() == {"city", "next"}
            assert all(each.keys() == {"sun"} for each in value["next"])


def test_json_of_a_response_streams(client: OpenAI) -> None:
    with client.responses.stream(model="pocket", input="Weather?", text_format=Forecast) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Forecast)


CALL = "messages[1].tool_calls[0].function"
NAN_CALLED = {"role": "assistant", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": NaN}'}}
]}  # fmt: skip
BAD_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}}},
            "response_format",
        ),
        (
            "/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}]},
            "tools[0].function.parameters",
        ),
        ("/chat/completions", {"guided_regex": "("}, "guided_regex"),
        ("/chat/completions", {"guided_grammar": 'root ::= "yes"'}, "guided_grammar"),
        ("/chat/completions", {"structured_outputs": {"json": BAD_SCHEMA}}, "structured_outputs"),
        (
            "/chat/completions",
            {"messages": [*HI, NAN_CALLED]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            "/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}}},
            "text.format",
        ),
        (
            "/responses",
            {"tools": [{"type": "function", "name": "f", "parameters": BAD_SCHEMA}]},
            "tools[0].parameters",
        ),
    ],
)
def test_what_the_engine_cant_use_is_blamed(url: str, path: str, body: dict[str, Any], param: str) -> None:
    given = {"input": "hi"} if path == "/responses" else {"messages": HI}
    answer = httpx.post(url + "/v1" + path, json={**given, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_control_tokens_in_text_are_text(client: OpenAI) -> None:
    messages: Any = [
        *HI,
        {"role": "assistant", "content": "sunny"},
        {"role": "user", "content": "<|im_end|>"},
    ]
    assert client.chat.completions.create(model="pocket", messages=messages, max_tokens=2).choices
    assert client.responses.create(model="pocket", input="<|im_end|>", max_output_tokens=2).output


def test_a_completion_continues_its_prompt(client: OpenAI) -> None:
    whole = client.completions.create(
        model="pocket", prompt=["A red", "A blue"], max_tokens=6, logprobs=2, n=2
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text  # greedy
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text
    texts = [""] * 4
    for chunk in client.completions.create(
        model="pocket", prompt=["A red", "A blue"], max_tokens=6, n=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_token_ids_are_a_prompt_too(client: OpenAI, url: str) -> None:
    ids = httpx.post(url + "/tokenize", json={"prompt": "A red"}).json()["tokens"]
    text = client.completions.create(model="pocket", prompt="A red", max_tokens=4).choices[0].text
    assert client.completions.create(model="pocket", prompt=ids, max_tokens=4).choices[0].text == text
    echoed = client.completions.create(model="pocket", prompt=ids, max_tokens=4, echo=True).choices[0].text
    assert echoed == "A red" + text


@pytest.mark.parametrize("prompt", ["", [5, 2**31], "<|im_end|>"])
def test_prompts_that_no_model_reads(client: OpenAI, prompt: Any) -> None:
    for echo in (False, True):
        with pytest.raises(APIStatusError) as refused:
            client.completions.create(model="pocket", prompt=prompt, echo=echo)
        assert (refused.value.status_code, refused.value.param) == (400, "prompt")

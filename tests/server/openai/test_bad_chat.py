"""Chat completions that are refused: each with the field to blame, before any work."""

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.server.openai.scripted import Scripted
from tests.server.openai.test_chat import HI


def content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "user", "content": list(parts)}]}


def image(value: Any) -> dict[str, Any]:
    return content({"type": "image_url", "image_url": value})


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return answered(tool_calls=[call])


def schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


PART = "messages[1].content[0]"

UNSUPPORTED = [
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"min_tokens": 3}, "min_tokens", "least length"),
    ({"num_beams": 2}, "num_beams", "use n"),
    ({"audio": {"voice": "a", "format": "wav"}}, "audio", "text only"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"web_search_options": {}}, "web_search_options", "search"),
    ({"verbosity": "low"}, "verbosity", "not supported"),
    ({"moderation": {}}, "moderation", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    (content({"type": "input_audio", "input_audio": {}}), PART, "input_audio"),
    (content({"type": "file", "file": {}}), PART, "file"),
]

WRONG = [
    ({"messages": []}, "messages", "not be empty"),
    ({"messages": None}, "messages", ""),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "messages[0].role is missing"),
    (content({"text": "hi"}), f"{PART}.type", "is missing"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0]", "king"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", ""),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "7"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    (called({}), "messages[0].tool_calls[0].function.arguments", "string"),
    (content({"type": "text"}), f"{PART}.text", "missing"),
    (content({"type": "text", "text": 7}), f"{PART}.text", "string"),
    (image({"url": "x", "detail": "huge"}), f"{PART}.image_url.detail", "huge"),
    (image({}), f"{PART}.image_url.url", "missing"),
    (image(7), f"{PART}.image_url", "7"),
    (image({"url": "data:image/png;base64,@@@"}), f"{PART}.image_url.url", "base64"),
    (image("ftp://example.com/a.png"), f"{PART}.image_url", "https://"),
    (content({"type": "video", "video": []}), f"{PART}.video", "not be empty"),
    (content({"type": "video_url", "video_url": {"url": "x", "fps": 0}}), f"{PART}.video_url.fps", "0"),
    ({"n": 0}, "n", "1"),
    ({"n": 129}, "n", "128"),
    ({"n": 10**30}, "n", ""),
    ({"n": 1.5}, "n", "integer"),
    ({"n": True}, "n", "integer"),
    ({"temperature": "0"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": -0.1}, "temperature", "0"),
    ({"temperature": 2.1}, "temperature", "2"),
    ({"top_p": -1}, "top_p", "0"),
    ({"top_p": 1.1}, "top_p", "1"),
    ({"min_p": -1}, "min_p", "0"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": -5}, "max_tokens", "1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "3"),
    ({"seed": 2**64}, "seed", ""),
    ({"stop": ""}, "stop", "not be empty"),
    ({"stop": ["a", ""]}, "stop[1]", "not be empty"),
    ({"stop": ["a"] * 65}, "stop", "64"),
    ({"stop": "a" * 1025}, "stop", "1,024"),
    ({"stop": 5}, "stop", "string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "0"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
    ({"logit_bias": {"cat": 1}}, "logit_bias.cat", ""),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", "logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"response_format": "json"}, "response_format", ""),
    (schema(name="x"), "response_format.json_schema.schema", "missing"),
    (schema(schema={}), "response_format.json_schema.name", "missing"),
    (schema(name="a b", schema={}), "response_format.json_schema.name", "a b"),
    (schema(name="x", schema=[]), "response_format.json_schema.schema", "object"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"user": 5}, "user", "string"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "param", "word"), UNSUPPORTED + WRONG)
def test_it_is_refused_by_name(
    http: httpx.Client, scripted: Scripted, extra: dict[str, Any], param: str, word: str
) -> None:
    answer = http.post("/chat/completions", json={"messages": HI, **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert word in error["message"], error
    assert not scripted.requests


def test_too_many_pictures(http: httpx.Client, scripted: Scripted, data_urls: list[str]) -> None:
    part = {"type": "image_url", "image_url": data_urls[0]}
    answer = http.post("/chat/completions", json=content(*[part] * 300))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1].content[256]")
    assert "300" in error["message"]
    assert not scripted.requests


def test_too_many_messages(http: httpx.Client) -> None:
    answer = http.post("/chat/completions", json={"messages": HI * 10_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_errors_of_pictures_name_the_field(http: httpx.Client, data_url: str) -> None:
    parts = [image(data_url)["messages"][1]["content"][0], image("data:,hello")["messages"][1]["content"][0]]
    answer = http.post("/chat/completions", json=content(*parts))
    assert answer.status_code == 400
    assert "messages[1].content[1].image_url" in json.dumps(answer.json()["error"])


@pytest.mark.parametrize("body", [[], "hi", 7, None])
def test_a_body_that_is_no_object(http: httpx.Client, body: Any) -> None:
    assert http.post("/chat/completions", json=body).status_code == 400


def test_the_sdk_raises_its_own_errors(sdk: OpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        sdk.chat.completions.create(model="pocket", messages=HI, n=1000)
    assert bad.value.param == "n"
    with pytest.raises(NotFoundError) as missing:
        sdk.chat.completions.create(model="gpt-4o", messages=HI)
    assert "'pocket' or 'also'" in missing.value.message


def test_no_tokens_are_told_under_the_name_that_was_used(client: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(Exception, match="must be at least 1") as refused:
            client.chat.completions.create(model="pocket", messages=HI, extra_body={name: 0})
        assert refused.value.status_code == 400  # type: ignore[attr-defined]
        assert refused.value.param == name  # type: ignore[attr-defined]


def test_a_prompt_that_is_too_long_blames_messages(client: OpenAI) -> None:
    long: Any = [{"role": "user", "content": "red " * 6000}]
    with pytest.raises(Exception, match="4,095") as refused:
        client.chat.completions.create(model="pocket", messages=long)
    assert refused.value.status_code == 400  # type: ignore[attr-defined]
    assert refused.value.param == "messages"  # type: ignore[attr-defined]

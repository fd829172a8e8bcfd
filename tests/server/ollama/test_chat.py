"""/api/chat and /api/generate: answers, streams, pictures, tools."""

import base64
import json
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Grammar, Picture, Text, ToolCall
from snugvl.errors import EngineError, RequestTooLarge
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, Script
from tests.server.live import live

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLS = (
    "Let me see.\n<tool",
    '_call>\n{"name": "add", "arg',
    'uments": {"a": 1}}\n</tool_call>\n<tool_call>\n',
    '{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
)


def chat(url: str, content: str = "Hi", **more: Any) -> httpx.Response:
    body = {"model": "pocket", "messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{url}/api/chat", json=body, timeout=PATIENCE_S)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def image(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def test_it_streams_unless_told_not_to(url: str, picture: bytes) -> None:
    message = {"role": "user", "content": "What colour is the circle?", "images": [image(picture)]}
    *pieces, last = lines(chat(url, messages=[message]))
    assert "".join(piece["message"]["content"] for piece in pieces).lower() == "red"
    assert {piece["done"] for piece in pieces} == {False}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    whole = chat(url, messages=[message], stream=False).json()
    assert whole["message"]["content"].lower() == "red"
    for end in (last, whole):
        assert end["eval_count"] == 2
        assert end["prompt_eval_count"] > 60
        assert end["load_duration"] == 0
        parts = end["prompt_eval_duration"] + end["eval_duration"]
        assert 0 < parts <= end["total_duration"]


def test_generate_answers_a_prompt_with_a_picture(url: str, picture: bytes) -> None:
    body = {"model": "pocket", "prompt": "What colour is the circle?", "images": [image(picture)]}
    *pieces, last = lines(httpx.post(f"{url}/api/generate", json=body, timeout=PATIENCE_S))
    assert "".join(piece["response"] for piece in pieces).lower() == "red"
    assert (last["response"], last["done"]) == ("", True)


def test_a_number_of_tokens_cuts(url: str) -> None:
    answer = chat(url, stream=False, options={"num_predict": 2.0}).json()
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 2)


@pytest.mark.parametrize("num_predict", [4095, 100_000])
def test_more_tokens_than_fit_are_what_fits(url: str, num_predict: int) -> None:
    assert chat(url, stream=False, options={"num_predict": num_predict}).json()["done_reason"] == "stop"


def test_a_prompt_that_does_not_fit_is_still_refused(url: str) -> None:
    response = chat(url, "word " * 10_000, options={"num_predict": 5})
    assert response.status_code == 400
    assert "4,095" in response.json()["error"]


def test_only_a_refusal_of_max_tokens_is_tried_again() -> None:
    service = FakeService(Script(refusal=RequestTooLarge("too much", field="prompt_ids")))
    with live(service) as base:
        assert chat(base, options={"num_predict": 5}).status_code == 400
    assert len(service.requests) == 1


def test_a_schema_is_kept_to(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = chat(url, "What colour?", stream=False, format=schema).json()
    assert json.loads(answer["message"]["content"])["colour"] in ("red", "blue")


def test_calls_come_whole_and_text_as_it_comes() -> None:
    with live(FakeService(Script(CALLS))) as base:
        streamed = lines(chat(base, tools=[ADD]))
        whole = chat(base, tools=[ADD], stream=False).json()
    assert streamed[0]["message"]["content"] == "Let me see."
    calls = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    for made in (calls, whole["message"]["tool_calls"]):
        functions = [call["function"] for call in made]
        assert functions == [
            {"index": 0, "name": "add", "arguments": {"a": 1}},
            {"index": 1, "name": "add", "arguments": {"a": 2}},
        ]
        assert len({call["id"] for call in made}) == 2
    assert whole["message"]["content"] == "Let me see."
    assert whole["done_reason"] == "stop"


def test_text_behind_a_call_makes_no_second_one_of_it() -> None:
    words = ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "\nThat is", " all.")
    with live(FakeService(Script(words))) as base:
        streamed = lines(chat(base, tools=[ADD]))
        whole = chat(base, tools=[ADD], stream=False).json()
    calls = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    for made in (calls, whole["message"]["tool_calls"]):
        assert [call["function"]["arguments"] for call in made] == [{"a": 1}]
    assert whole["message"]["content"].endswith("That is all.")


def test_arguments_that_were_cut_are_what_there_is_of_them() -> None:
    words = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2']
    with live(FakeService(Script(words))) as base:
        (call,) = chat(base, tools=[ADD], stream=False).json()["message"]["tool_calls"]
    assert call["function"]["arguments"]["a"] == 1


def test_log_probabilities(url: str) -> None:
    answer = chat(url, stream=False, logprobs=True, top_logprobs=2, options={"num_predict": 3}).json()
    assert len(answer["logprobs"]) == 3
    first = answer["logprobs"][0]
    assert first["logprob"] <= 0
    assert first["top_logprobs"][0]["token"] == first["token"]
    assert bytes(first["bytes"]).decode() == first["token"]
    streamed = lines(chat(url, logprobs=True, options={"num_predict": 3}))
    tokens = [each["token"] for line in streamed for each in line.get("logprobs", [])]
    assert tokens == [each["token"] for each in answer["logprobs"]]


def test_without_messages_it_says_that_it_is_loaded(url: str) -> None:
    for path, more in (
        ("chat", {"messages": []}),
        ("chat", {}),
        ("generate", {}),
        ("generate", {"prompt": ""}),
    ):
        body = {"model": "pocket", **more}
        answer = httpx.post(f"{url}/api/{path}", json=body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", 0.0])
def test_unloading_is_answered_in_its_word(url: str, keep_alive: object) -> None:
    for path in ("chat", "generate"):
        answer = httpx.post(f"{url}/api/{path}", json={"model": "pocket", "keep_alive": keep_alive})
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "unload")
        assert "keep_alive" in answer.headers["snugvl-warning"]


def test_an_engine_that_dies_ends_the_stream_with_an_error_line() -> None:
    service = FakeService(Script(["A", " cat"], error=EngineError("the engine died")))
    with live(service) as base:
        streamed = lines(chat(base))
        whole = chat(base, stream=False)
    assert [line.get("message", {}).get("content") for line in streamed] == ["A", " cat", None]
    assert streamed[-1] == {"error": "the engine died"}
    assert (whole.status_code, whole.json()) == (500, {"error": "the engine died"})


def asked(path: str, body: dict[str, Any]) -> Any:
    """What the engine is asked for."""
    service = FakeService()
    with live(service) as base:
        response = httpx.post(f"{base}/api/{path}", json={"model": "pocket", **body})
        assert response.status_code == 200, response.text
    return service.requests[0]


def test_options_become_sampling_parameters() -> None:
    options = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 7, "num_predict": 9,
        "num_ctx": 512, "stop": ["END"], "repeat_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "mirostat": 0, "tfs_z": 1.0, "num_keep": None,
    }  # fmt: skip
    sampling = asked("generate", {"prompt": "Hi", "options": options}).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 40, 0.9, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (7, 9, ("END",))
    assert sampling.repetition_penalty == 1.1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize(
    "penalty", [{}, {"repeat_penalty": 1.0}, {"presence_penalty": 1.0}, {"repeat_penalty": 1.1}]
)
@pytest.mark.parametrize("last", [0, 128, -1, 64])
def test_how_far_back_penalties_look_counts_where_there_are_any(
    url: str, last: int, penalty: dict[str, float]
) -> None:
    options = {"repeat_last_n": last, "num_predict": 1, "top_k": -1, **penalty}
    body = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "options": options}
    answer = httpx.post(f"{url}/api/chat", json=body)
    good = last in (-1, 64) or penalty in ({}, {"repeat_penalty": 1.0})
    assert answer.status_code == (200 if good else 400), answer.text
    assert good or f"options.repeat_last_n is {last}, but penalties look at all tokens" in answer.text


@pytest.mark.parametrize(("think", "told"), [("none", False), ("false", False), ("high", True), (True, True)])
def test_words_for_not_thinking_are_read(think: str | bool, told: bool) -> None:
    service = FakeService()
    with live(service) as base:
        body = {"model": "pocket", "think": think, "messages": [{"role": "user", "content": "Hi"}]}
        assert httpx.post(f"{base}/api/chat", json=body).status_code == 200
    assert service.requests[0].template == {"enable_thinking": told}


def test_without_options_it_is_greedy_and_unlimited() -> None:
    sampling = asked("generate", {"prompt": "Hi", "options": {"num_predict": -1, "seed": -1}}).sampling
    assert (sampling.greedy, sampling.max_tokens, sampling.seed) == (True, None, None)


def test_a_system_prompt_comes_first() -> None:
    request = asked("generate", {"prompt": "Hi", "system": "Be kind."})
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", (Text("Be kind."),)),
        ("user", (Text("Hi"),)),
    ]


def test_raw_is_the_prompt_as_it_is() -> None:
    request = asked("generate", {"prompt": "<|im_start|>", "raw": True})
    assert (request.prompt, request.messages) == ("<|im_start|>", ())


def test_json_is_any_object() -> None:
    assert asked("generate", {"prompt": "Hi", "format": "json"}).grammar == Grammar(
        "json_schema", '{"type": "object"}'
    )
    assert asked("generate", {"prompt": "Hi", "format": ""}).grammar is None


def test_a_conversation_with_pictures_calls_and_answers(picture: bytes) -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}, **more}

    request = asked(
        "chat",
        {
            "messages": [
                {"role": "user", "content": "Look", "images": [image(picture)]},
                {"role": "assistant", "tool_calls": [call("one"), call("two"), call("one", id="mine")]},
                {"role": "tool", "content": "2", "tool_name": "two"},
                {"role": "tool", "content": "3", "tool_call_id": "mine"},
                {"role": "tool", "content": "1"},
            ],
            "tools": [ADD],
        },
    )
    user, assistant, *results = request.messages
    assert isinstance(user.content[0], Picture)
    assert user.content[1] == Text("Look")
    assert assistant.tool_calls == (
        ToolCall("call_1_0", "one", '{"a": 1}'),
        ToolCall("call_1_1", "two", '{"a": 1}'),
        ToolCall("mine", "one", '{"a": 1}'),
    )
    assert [result.tool_call_id for result in results] == ["call_1_1", "mine", "call_1_0"]
    (tool,) = request.tools.tools
    assert (tool.name, tool.description, tool.parameters["required"]) == ("add", "Adds.", ["a"])

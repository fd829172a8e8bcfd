"""What no grammar enforced of a schema is validated afterwards, and what doesn't hold is told."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from snugvl.inputs.trials import Trials
from snugvl.inputs.valid import broken
from snugvl.server import context as validation
from tests.patience import PATIENCE_S
from tests.server.fake import CAPABILITIES
from tests.server.live import asking
from tests.server.openai.scripted import Scripted, says

HI = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "propertyNames": {"maxLength": 4},
}
WRONG = {"tags": ["a", "a"], "label": 1}
TOLD = ["tags breaks uniqueItems", "the whole breaks propertyNames"]
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
NAMED = {"type": "json_schema", "name": "n", "schema": SCHEMA}
MESSAGES = {"model": "pocket", "max_tokens": 9, "messages": [HI]}
Case = tuple[str, dict[str, Any]]
CALLING: dict[str, Case] = {
    "chat": ("/v1/chat/completions", {"messages": [HI], "tools": TOOLS}),
    "responses": ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}),
    "messages": ("/v1/messages", {**MESSAGES, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    "ollama": ("/api/chat", {"model": "pocket", "messages": [HI], "tools": TOOLS}),
}
FORMED: dict[str, Case] = {
    "chat": ("/v1/chat/completions", {"messages": [HI], "response_format": FORM}),
    "responses": ("/v1/responses", {"input": "Hi", "text": {"format": NAMED}}),
    "messages": ("/v1/messages", {**MESSAGES, "output_config": {
        "format": {"type": "json_schema", "schema": SCHEMA}}}),
    "ollama": ("/api/chat", {"model": "pocket", "messages": [HI], "format": SCHEMA}),
}  # fmt: skip
CASES = {
    **{f"a call, {name}": (case, "f()", True) for name, case in CALLING.items()},
    **{f"a form, {name}": (case, "the answer", False) for name, case in FORMED.items()},
}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


def answers(scripted: Scripted, value: object, call: bool) -> None:
    """Let the engine answer with a value, in pieces."""
    text = json.dumps(value)
    if call:
        text = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    pieces = [text[at : at + 9] for at in range(0, len(text), 9)]
    scripted.answer = lambda request: says(*pieces)


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_hold_is_told(http: httpx.Client, scripted: Scripted, name: str) -> None:
    (path, body), what, call = CASES[name]
    answers(scripted, WRONG, call)
    answer = http.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    first, *told = answer.headers["snugvl-warning"].split("; ")
    assert first.startswith("didn't enforce ")
    assert sorted(told) == [f"{what}: {line}" for line in TOLD]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_tells_it_before_its_end(http: httpx.Client, scripted: Scripted, name: str) -> None:
    (path, body), what, call = CASES[name]
    answers(scripted, WRONG, call)
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert what + ":" not in answer.headers["snugvl-warning"]
    if path.startswith("/api"):  # lines of JSON have no comments
        assert all(json.loads(line) for line in answer.text.splitlines())
        return
    comments = [line for line in answer.text.splitlines() if line.startswith(":")]
    assert sorted(comments) == [f": snugvl-warning: {what}: {line}" for line in TOLD]
    *_, last = (block for block in answer.text.split("\n\n") if block)
    assert not last.startswith(":"), "who stops at the last event has seen them"


@pytest.mark.parametrize("name", CASES)
def test_what_holds_is_no_warning(http: httpx.Client, scripted: Scripted, name: str) -> None:
    (path, body), _, call = CASES[name]
    answers(scripted, {"tags": ["a", "b"]}, call)
    answer = http.post(path, json={**body, "stream": False})
    (told,) = answer.headers["snugvl-warning"].split("; ")
    assert told.startswith("didn't enforce ")


def test_what_was_enforced_is_not_validated(http: httpx.Client, scripted: Scripted) -> None:
    answers(scripted, {"tags": 5}, call=True)
    plain = {"name": "f", "parameters": {"type": "object", "properties": {"tags": {"type": "string"}}}}
    body = {"messages": [HI], "tools": [{"type": "function", "function": plain}]}
    assert "snugvl-warning" not in http.post("/v1/chat/completions", json=body).headers


def test_forms_of_an_engine_that_may_break_them_are_validated() -> None:
    scripted = Scripted(capabilities=replace(CAPABILITIES, exact_forms=False))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}
    with asking(scripted) as client:
        for value, told in (("a", None), ("c", "the answer: the whole breaks enum")):
            answers(scripted, value, call=False)
            answer = client.post("/v1/chat/completions", json={"messages": [HI], "response_format": form})
            assert answer.headers.get("snugvl-warning") == told
        scripted.capabilities = CAPABILITIES
        answer = client.post("/v1/chat/completions", json={"messages": [HI], "response_format": form})
        assert "snugvl-warning" not in answer.headers, "it was enforced"


def test_arguments_that_were_cut_are_nobodys_mistake(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says('<tool_call>\n{"name": "f", "arguments": {"ta', finish="length")
    path, body = CALLING["chat"]
    answer = http.post(path, json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.headers["snugvl-warning"].count(";") == 0


def asked(schema: dict[str, Any], *values: Any) -> str:
    """What the process is asked."""
    return json.dumps({"schemas": {"f": schema}, "values": [["f", json.dumps(value)] for value in values]})


@pytest.mark.parametrize(
    ("schema", "value", "line"),
    [
        ({"not": {"type": "string"}}, "x", "the whole breaks not"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, "the whole breaks then"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "the whole breaks dependentRequired"),
        ({"properties": {"a": {"items": {"pattern": "^(?!x)"}}}}, {"a": ["y", "x"]}, "a[1] breaks pattern"),
        ({"$schema": "urn:my-own", "uniqueItems": True}, [1, 1], "the whole breaks uniqueItems"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, 3, "the whole breaks oneOf"),
        (
            {"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}},
            {},
            "not validated, as its schema can't be",
        ),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, {}, "not validated, as its schema can't be"),
        ({"pattern": "("}, "x", "not validated, as its schema can't be"),
    ],
)
def test_what_is_wrong_is_named(schema: dict[str, Any], value: Any, line: str) -> None:
    assert broken(asked(schema, value)).startswith(f"f: {line}")


def test_no_value_tells_more_than_a_few_things() -> None:
    schema = {"items": {"pattern": "^(?!x)"}}
    assert len(broken(asked(schema, ["x"] * 1000)).splitlines()) == 4


def test_a_pattern_that_goes_back_and_forth_ends() -> None:
    schema = {"pattern": "^(?=a)(a|a)*(?!b)$"}
    assert (
        broken(asked(schema, "a" * 60 + "b")) == "f: the whole not validated, as pattern takes too much time"
    )
    assert broken(asked(schema, "b")) == "f: the whole breaks pattern"


def test_a_schema_that_takes_for_ever_is_ended() -> None:
    """Two references to the next part in each of forty parts."""
    parts: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]} for i in range(40)
    }
    parts["a40"] = {"type": "string"}
    trials = Trials(1, worker="snugvl.inputs.valid", overrun="not validated")
    verdict = trials.check(asked({"$defs": parts, "$ref": "#/$defs/a0"}, 1), lambda: None)
    assert verdict.error == "not validated"
    assert trials.check(asked({"not": {}}, 1), lambda: None).error == "f: the whole breaks not"
    trials.close()


def test_validating_an_answer_ends_and_so_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert validation.LIMIT_S <= 30, "somebody waits for the end of the answer"
    monkeypatch.setattr(validation, "LIMIT_S", 0.05)
    ended = threading.Event()

    def check(_: Trials, question: str, go_on: Callable[[], None]) -> Any:
        try:
            while True:
                go_on()
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(Trials, "check", check)
    lines = asyncio.run(validation.Validation().broken({"the answer": SCHEMA}, [("the answer", "{}")]))
    assert lines == ["not validated: it took more than 0.05 s"]
    assert ended.wait(PATIENCE_S)

"""Tools beside a form of the answer, schemas that can't be enforced whole, variables of the template."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.live import asking
from tests.server.openai.scripted import Scripted

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "not": {}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
MESSAGES = {"model": "pocket", "messages": [HI]}
Case = tuple[str, dict[str, Any]]
FORMS: dict[str, Case] = {
    "chat": ("/v1/chat/completions", {"messages": [HI], "tools": TOOLS, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    "guided": ("/v1/chat/completions", {"messages": [HI], "tools": TOOLS, "guided_json": json.dumps(SCHEMA)}),
    "structured": ("/v1/chat/completions", {
        "messages": [HI], "tools": TOOLS, "structured_outputs": {"json": SCHEMA}}),
    "responses": ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "text": {
        "format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    "messages": ("/v1/messages", {**MESSAGES, "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "ollama": ("/api/chat", {**MESSAGES, "stream": False, "tools": TOOLS, "format": SCHEMA}),
}  # fmt: skip


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


@pytest.mark.parametrize("name", FORMS)
def test_a_form_and_tools_are_one_grammar(http: httpx.Client, scripted: Scripted, name: str) -> None:
    path, body = FORMS[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    request = scripted.last
    assert request.grammar is None
    assert request.tools is not None
    assert request.tools.form is not None
    enforced = {key: SCHEMA[key] for key in SCHEMA if key != "not"}
    assert json.loads(request.tools.form) == {**enforced, "additionalProperties": False}
    assert request.tools.tools[0].parameters == SCHEMA, "the model is shown all of it"
    assert not request.tools.tools[0].strict
    assert "didn't enforce not of tools[0]" in answer.headers["snugvl-warning"]


GUIDED = {"guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"'}


@pytest.mark.parametrize("field", GUIDED)
def test_a_form_that_is_no_json_beside_tools_is_refused_by_its_name(http: httpx.Client, field: str) -> None:
    body = {"messages": [HI], "tools": TOOLS, field: GUIDED[field]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["message"].split()[0]) == (field, field)


@pytest.mark.parametrize("other", ["guided_json", "structured_outputs", "response_format", "guided_choice"])
def test_two_forms_are_named(http: httpx.Client, other: str) -> None:
    form = {
        "guided_json": {"type": "object"},
        "structured_outputs": {"regex": "a"},
        "response_format": {"type": "json_object"},
        "guided_choice": ["a"],
    }
    body = {"messages": [HI], "guided_regex": "a+", other: form[other]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "guided_regex"
    assert f"{other} and guided_regex ask for several" in error["message"]


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", 'b"']}, "lark", 'start: "a" | "b\\""'),
        ({"structured_outputs": {"choice": ["a"]}}, "lark", 'start: "a"'),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ],
)
def test_vllms_forms(
    http: httpx.Client, scripted: Scripted, fields: dict[str, Any], kind: str, source: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [HI], **fields})
    assert answer.status_code == 200, answer.text
    grammar = scripted.last.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


def test_two_forms_are_refused(http: httpx.Client) -> None:
    body = {"messages": [HI], "guided_regex": "a", "response_format": {"type": "json_object"}}
    assert "ask for several" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]


def test_variables_reach_the_template(http: httpx.Client, scripted: Scripted) -> None:
    asked = {"enable_thinking": False}
    body = {"messages": [HI], "chat_template_kwargs": asked}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert scripted.last.template == asked
    long = {"messages": [HI], "chat_template_kwargs": {"a": "b" * 5000}}
    assert http.post("/v1/chat/completions", json=long).json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_anthropics_thinking(http: httpx.Client, scripted: Scripted, kind: str, thinks: bool) -> None:
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "So"}]
    history = [
        HI,
        {"role": "assistant", "content": [*thought, {"type": "redacted_thinking", "data": "x"}]},
        HI,
    ]
    body = {
        **MESSAGES,
        "max_tokens": 9,
        "messages": history,
        "thinking": {"type": kind, "budget_tokens": 1024},
    }
    answer = http.post("/v1/messages", json={**body, "output_config": {"effort": "low"}})
    assert answer.status_code == 200, answer.text
    assert scripted.last.template == {"enable_thinking": thinks}
    assert len(scripted.last.messages[1].content) == 1


@pytest.mark.parametrize("think", [True, False, "high"])
def test_ollamas_think(http: httpx.Client, scripted: Scripted, think: bool | str) -> None:
    assert http.post("/api/chat", json={**MESSAGES, "stream": False, "think": think}).status_code == 200
    assert scripted.last.template == {"enable_thinking": bool(think)}

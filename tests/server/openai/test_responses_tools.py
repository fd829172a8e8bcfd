"""Tools as Codex offers them: namespaces and free-form tools are functions, a vendor's own are left out."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from snugvl.core.messages import Message, Text, Tool, ToolCall, ToolUse
from snugvl.server.openai.responses_request import full_name
from tests.server.openai.scripted import OURS, Scripted, says, unknown
from tests.server.openai.test_responses import EVENT, kinds

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
PATCH = '*** Begin Patch\n*** Add File: a\n+"é"\n*** End Patch'
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
GRAMMAR = "start: /.+/"


def function(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": f"{name} it",
        "strict": False,
        "parameters": SCHEMA,
    }


CODEX: list[dict[str, Any]] = [
    {"type": "namespace", "name": "functions", "description": "Tools in the functions namespace.", "tools": [
        function("exec_command"),
        {"type": "custom", "name": "apply_patch", "description": "edits files",
         "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
    ]},
    {"type": "namespace", "name": "mcp__docs__", "description": "Of our docs.", "tools": [
        function("find"), function("read")]},
    {"type": "namespace", "name": "agents", "description": "", "tools": [
        {"type": "custom", "name": "say"}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]  # fmt: skip
NAMES = ["exec_command", "apply_patch", "mcp__docs__find", "mcp__docs__read", "agents__say"]


def calling(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = (
    calling("exec_command", {"cmd": "ls"})
    + calling("apply_patch", {"input": PATCH})
    + calling("mcp__docs__find", {"cmd": "x"})
    + calling("agents__say", {"input": "hello"})
)
ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
    {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    {"type": "function_call", "name": "find", "namespace": "mcp__docs__", "arguments": '{"cmd": "x"}'},
    {"type": "custom_tool_call", "name": "say", "namespace": "agents", "input": "hello"},
]


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what differs from answer to answer."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id", "status")} for item in items]


def test_they_are_offered_as_functions(http: httpx.Client, scripted: Scripted) -> None:
    answer = http.post("/responses", json={"input": "hi", "tools": CODEX, "tool_choice": "auto"})
    assert answer.status_code == 200, answer.text
    use = scripted.last.tools
    assert use is not None
    assert [tool.name for tool in use.tools] == NAMES
    command, patch, find, read, say = use.tools
    assert command == Tool("exec_command", "exec_command it", SCHEMA)
    assert patch.parameters == say.parameters == INPUT
    assert GRAMMAR in patch.description
    assert (find.description, read.description) == ("Of our docs.\n\nfind it", "read it")
    warnings = answer.headers["snugvl-warning"]
    for word in ("tools[3]", "web_search", "tools[4]", "image_generation", "format of the tool apply_patch"):
        assert word in warnings
    parsed = Response.model_validate(answer.json(), strict=True)
    assert unknown(parsed) <= OURS
    assert [tool.type for tool in parsed.tools] == ["namespace"] * 3


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_calls_come_back_in_the_clients_form(http: httpx.Client, scripted: Scripted, step: int) -> None:
    scripted.answer = lambda request: says(*(CALLS[at : at + step] for at in range(0, len(CALLS), step)))
    body = {"input": "hi", "tools": CODEX}
    whole = http.post("/responses", json=body).json()
    assert bare(whole["output"]) == ITEMS
    assert unknown(Response.model_validate(whole, strict=True)) <= OURS | {"status"}
    lines = http.post("/responses", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.split("\ndata: ")[1]) for line in lines if line]
    for event in events:
        assert unknown(EVENT.validate_python(event, strict=True)) <= OURS | {"status"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert bare(done) == ITEMS
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    inputs = [event["input"] for event in events if event["type"].endswith("custom_tool_call_input.done")]
    deltas = [event["delta"] for event in events if event["type"].endswith("custom_tool_call_input.delta")]
    assert inputs == deltas == [PATCH, "hello"]
    assert kinds(events).count("function_call_arguments.done") == 2


def test_a_free_form_call_that_was_cut_keeps_what_came(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says(CALLS[: CALLS.index("End Patch")], finish="length")
    whole = http.post("/responses", json={"input": "hi", "tools": CODEX}).json()
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"
    assert PATCH.startswith(whole["output"][-1]["input"])


def test_a_history_is_read_the_same_way(http: httpx.Client, scripted: Scripted) -> None:
    calls = [{**item, "call_id": f"c{n}", "id": f"x{n}"} for n, item in enumerate(ITEMS)]
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"} for item in calls
    ]
    vendor = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    given = [{"role": "user", "content": "hi"}, vendor, *calls, *outputs]
    answer = http.post("/responses", json={"input": given, "tools": CODEX})
    assert answer.status_code == 200, answer.text
    assert "left out input[1]" in answer.headers["snugvl-warning"]
    _, called, *results = scripted.last.messages
    assert called.tool_calls == (
        ToolCall("c0", "exec_command", '{"cmd": "ls"}'),
        ToolCall("c1", "apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False)),
        ToolCall("c2", "mcp__docs__find", '{"cmd": "x"}'),
        ToolCall("c3", "agents__say", '{"input": "hello"}'),
    )
    assert results == [Message("tool", (Text("done"),), tool_call_id=f"c{n}") for n in range(4)]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "find", "namespace": "mcp__docs__"}, "mcp__docs__find"),
    ],
)
def test_one_of_them_can_be_chosen(
    http: httpx.Client, scripted: Scripted, choice: dict[str, Any], name: str
) -> None:
    answer = http.post("/responses", json={"input": "hi", "tools": CODEX, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert scripted.last.tools is not None
    assert scripted.last.tools.choice == name


def test_only_a_vendors_tools_are_none(http: httpx.Client, scripted: Scripted) -> None:
    for kind in ("web_search_preview_2025_03_11", "mcp", "computer-preview", "file_search", "local_shell"):
        answer = http.post("/responses", json={"input": "hi", "tools": [{"type": kind}]})
        assert answer.status_code == 200, answer.text
        assert kind in answer.headers["snugvl-warning"]
        assert scripted.last.tools is None
        assert answer.json()["tools"] == []


def test_a_regular_expression_is_enforced(http: httpx.Client, scripted: Scripted) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    answer = http.post("/responses", json={"input": "hi", "tools": [
        {"type": "custom", "name": "pick", "format": form}]})  # fmt: skip
    assert "snugvl-warning" not in answer.headers
    use = scripted.last.tools
    assert isinstance(use, ToolUse)
    assert use.tools[0].parameters["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}


def test_namespaces_multiply_only_so_far(http: httpx.Client, scripted: Scripted) -> None:
    many = [{"type": "namespace", "name": f"n{n}", "tools": [function(f"f{m}") for m in range(43)]}
            for n in range(3)]  # fmt: skip
    answer = http.post("/responses", json={"input": "hi", "tools": many})
    assert answer.status_code == 400
    assert "129 tools" in answer.json()["error"]["message"]
    assert not scripted.requests


def test_names_fit() -> None:
    assert full_name("f", None) == full_name("f", "functions") == "f"
    assert full_name("f", "my server") == "my_server__f"
    one, other = (full_name("f" * 60 + end, "long") for end in "ab")
    assert len(one) == len(other) == 64
    assert one != other

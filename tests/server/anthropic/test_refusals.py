"""What is refused, each with its exact answer in Anthropic's form."""

from typing import Any

import httpx
import pytest

HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def refusal(url: str, body: dict[str, Any]) -> tuple[str, str]:
    response = httpx.post(
        f"{url}/v1/messages", json={"model": "pocket", "max_tokens": 4, "messages": [HI], **body}
    )
    assert response.status_code == 400, response.text
    value = response.json()
    assert value["type"] == "error"
    return value["error"]["type"], value["error"]["message"]


def content(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": "9"}, "max_tokens must be an integer, not '9'"),
        ({"top_k": -2}, "top_k must be at least -1, not -2"),
        ({"container": "c"}, "container is not supported: this server runs no code"),
        ({"mcp_servers": [{"type": "url"}]},
         "mcp_servers is not supported: this server calls no other servers; run their tools in your program"),
        ({"output_config": {"format": {"type": "regex"}}},
         "output_config.format: a format of type 'regex' is not supported here; supported: json_schema"),
        ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA},
         "send output_config.format or output_format, not both"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0]: a tool of type 'web_search_20250305' is not supported here; supported: custom"),
        ({"tools": [{**TOOL, "defer_loading": True}]},
         "tools[0].defer_loading is not supported: every tool is shown to the model; leave it out"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is any, but the request has no tools"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [HI, {"role": "assistant", "content": "It is"}]},
         "the last message is the assistant's: prefill is not supported; end with the user's"),
        (content({"type": "document", "source": {"type": "base64", "data": "x"}}),
         "messages[0].content[0].source: a document's source of type 'base64' is not supported here; "
         "supported: text, content"),
        (content({"type": "text", "text": "x"}, {"type": "container_upload"}),
         "messages[0].content[1]: a block of type 'container_upload' is not supported here; "
         "supported: text, image, document, search_result, tool_result"),
        (content({"type": "image", "source": {"type": "file", "file_id": "f"}}),
         "messages[0].content[0].source: a source of type 'file' is not supported here; "
         "supported: base64, url"),
        (content({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference"}]}),
         "messages[0].content[0].content[0]: a block of type 'tool_reference' is not supported here; "
         "supported: text, image, document, search_result"),
        (content({"type": "tool_result", "tool_use_id": "t", "content": "3"}),
         "a tool_result answers 't', but no tool_use before it has this id"),
        (content({"type": "text", "text": "x", "cache_control": {"type": "eternal"}}),
         "messages[0].content[0].cache_control.type must be 'ephemeral', not 'eternal'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(url: str, body: dict[str, Any], message: str) -> None:
    assert refusal(url, body) == ("invalid_request_error", message)


@pytest.mark.parametrize("missing", ["model", "max_tokens", "messages"])
def test_what_is_missing_is_named(url: str, missing: str) -> None:
    body = {"model": "pocket", "max_tokens": 4, "messages": [HI]}
    del body[missing]
    response = httpx.post(f"{url}/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{missing} is missing"


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_another_model(url: str, path: str) -> None:
    more = {"max_tokens": 4} if path == "messages" else {}
    response = httpx.post(f"{url}/v1/{path}", json={"model": "claude", "messages": [HI], **more})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "type": "not_found_error",
        "message": "the model 'claude' is not served here; use 'pocket'",
    }


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "image/png", "data": "!!!"},
        {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="},
        {"type": "url", "url": "file:///etc/passwd"},
        {"type": "url", "url": "http://127.0.0.1:1/a.png"},
    ],
)
def test_a_picture_that_can_not_be_had(url: str, source: dict[str, Any]) -> None:
    kind, _ = refusal(url, content({"type": "image", "source": source}))
    assert kind == "invalid_request_error"

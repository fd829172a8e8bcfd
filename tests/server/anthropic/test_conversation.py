"""What the engine is asked for, for what a client sent."""

from itertools import product
from typing import Any

import httpx

from snugvl.core.messages import Picture, Text, ToolCall
from tests.server.fake import FakeService
from tests.server.live import live

ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object"},
    "type": "custom",
    "strict": True,
}
CACHE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def asked(messages: Any = "Hi", **more: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    service = FakeService()
    with live(service) as base:
        body = {"model": "pocket", "max_tokens": 9, "messages": messages, **more}
        response = httpx.post(f"{base}/v1/messages", json=body)
        assert response.status_code == 200, response.text
    return service.requests[0]


def test_sampling() -> None:
    sampling = asked(temperature=0.5, top_p=0.9, top_k=5).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 5)
    assert asked().sampling.greedy


def test_system_as_text_or_as_blocks() -> None:
    blocks = [{"type": "text", "text": "Be kind.", **CACHE}, {"type": "text", "text": "Be brief."}]
    for system, text in (("Be kind.", "Be kind."), (blocks, "Be kind.\n\nBe brief.")):
        first, second = asked(system=system).messages
        assert (first.role, first.content) == ("system", (Text(text),))
        assert second.role == "user"


def test_what_changes_nothing_is_accepted() -> None:
    request = asked(
        [{"role": "user", "content": [{"type": "text", "text": "Hi", "citations": None, **CACHE}]}],
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        container=None,
        mcp_servers=[],
        output_config={"effort": "high"},
        **CACHE,
    )
    assert request.messages[0].content == (Text("Hi"),)


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = [("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D"), ("user", "E")]
    messages = asked([{"role": role, "content": text} for role, text in turns]).messages
    assert [(message.role, message.content) for message in messages] == [
        ("user", (Text("A"), Text("B"))),
        ("assistant", (Text("C"), Text("D"))),
        ("user", (Text("E"),)),
    ]


def test_calls_and_their_results_are_turns(data_url: str) -> None:
    image = {"type": "image", "source": {"type": "url", "url": data_url}}
    messages = asked(
        [
            {"role": "user", "content": "Add"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Yes"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}, "caller": None},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "3", **CACHE},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}, image],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        tools=[ADD],
    ).messages
    _, assistant, one, two, user = messages
    assert assistant.content == (Text("Yes"),)
    assert assistant.tool_calls == (ToolCall("t1", "add", '{"a": 1}'), ToolCall("t2", "add", "{}"))
    assert (one.role, one.tool_call_id, one.content) == ("tool", "t1", (Text("3"),))
    assert two.content[:2] == (Text("Error: "), Text("no"))
    assert isinstance(two.content[2], Picture)
    assert (user.role, user.content) == ("user", (Text("So?"),))


def test_tools_and_choices() -> None:
    use = asked(tools=[ADD]).tools
    (tool,) = use.tools
    assert (tool.name, tool.description, tool.parameters) == ("add", "Adds.", {"type": "object"})
    assert (use.choice, use.parallel) == ("auto", True)
    assert asked(tools=[ADD], tool_choice={"type": "any"}).tools.choice == "required"
    assert asked(tools=[ADD], tool_choice={"type": "tool", "name": "add"}).tools.choice == "add"
    assert asked(tools=[ADD], tool_choice={"type": "none"}).tools is None
    one = asked(tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tools
    assert not one.parallel


def test_a_system_message_in_the_middle() -> None:
    roles = [{"role": role, "content": "x"} for role in ("user", "system", "user")]
    assert [message.role for message in asked(roles).messages] == ["user", "system", "user"]


def text_of(message: Any) -> str:
    return "".join(part.text for part in message.content)


def test_documents_of_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rained."}
    pieces = {
        "type": "content",
        "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "rained."}],
    }
    for source in (plain, pieces, {"type": "content", "content": "It rained."}):
        document = {"type": "document", "source": source, "title": "Log", "context": "of May", **CACHE}
        (message,) = asked(
            [{"role": "user", "content": [document, {"type": "text", "text": "Well?"}]}]
        ).messages
        assert text_of(message) == (
            "<document>\n<title>Log</title>\n<context>of May</context>\nIt rained.\n</document>Well?"
        )


def test_a_tool_may_answer_with_a_document() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "3"}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]},
               {"role": "user", "content": [result]}]  # fmt: skip
    assert text_of(asked(history).messages[-1]) == "<document>\n3\n</document>"


FOUND = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [
    {"type": "text", "text": "It "}, {"type": "text", "text": "rained."}]}  # fmt: skip


def test_what_a_search_found_is_text() -> None:
    shown = (
        "<search_result>\n<source>https://a.example</source>\n<title>A</title>\nIt rained.\n</search_result>"
    )
    assert text_of(asked([{"role": "user", "content": [FOUND]}]).messages[0]) == shown
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [FOUND]}
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]},
               {"role": "user", "content": [result]}]  # fmt: skip
    assert text_of(asked(history).messages[-1]) == shown


def test_a_conversation_that_began_at_anthropic_goes_on() -> None:
    kinds = ("server_tool_use", "web_search_tool_result", "mcp_tool_use", "mcp_tool_result")
    blocks = [{"type": kind, "id": "s", "tool_use_id": "s", "name": "x", "content": []} for kind in kinds]
    turns = [{"role": "user", "content": "Rain?"},
             {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Yes."}]},
             {"role": "user", "content": "Sure?"}]  # fmt: skip
    service = FakeService()
    with live(service) as base:
        body = {"model": "pocket", "max_tokens": 9, "messages": turns}
        answer = httpx.post(f"{base}/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].messages[1].content == (Text("Yes."),)
    for index, kind in enumerate(kinds):
        said = f"left out messages[1].content[{index}]: no server but its vendor's runs {kind}"
        assert said in answer.headers["snugvl-warning"]


def test_citations_are_told() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "x"}
    with live(FakeService()) as base:
        document = {"type": "document", "source": source}
        for block, enabled in product((document, FOUND), (True, False)):
            block = {**block, "citations": {"enabled": enabled}}
            body = {"model": "pocket", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
            response = httpx.post(f"{base}/v1/messages", json=body)
            assert response.status_code == 200, response.text
            assert ("citations" in response.headers.get("snugvl-warning", "")) == enabled

"""Pictures that a tool answered: the same prompt by every protocol that has a place for them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Message, Picture, Request
from tests.server.conftest import Shared
from tests.server.live import asking
from tests.server.openai.scripted import Scripted

FUNCTION = {"name": "look", "arguments": '{"at": "the sky"}'}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


def bodies(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """One conversation in three protocols: the tool answers text, a picture, and text."""
    picture = {"type": "image", "source": {"type": "url", "url": url}}
    words = [{"type": "text", "text": text} for text in ("Here: ", " Nice.")]
    chat = [words[0], {"type": "image_url", "image_url": {"url": url}}, words[1]]
    items = [{"type": "input_text", "text": word["text"]} for word in words]
    call = {"id": "c1", "type": "function", "function": FUNCTION}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "the sky"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [words[0], picture, words[1]]}
    return {
        "messages": ("/v1/messages", {"model": "pocket", "max_tokens": 9, "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]}),
        "chat": ("/v1/chat/completions", {"messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": chat},
        ]}),
        "responses": ("/v1/responses", {"input": [
            {"role": "user", "content": "Look"},
            {"type": "function_call", "call_id": "c1", **FUNCTION},
            {"type": "function_call_output", "call_id": "c1", "output": [
                items[0], {"type": "input_image", "image_url": url}, items[1]
            ]},
        ]}),
    }  # fmt: skip


def test_the_prompt_is_that_of_messages(
    http: httpx.Client, scripted: Scripted, pocket: NativeBackend, data_url: str
) -> None:
    prompts: dict[str, tuple[Message, ...]] = {}
    for name, (path, body) in bodies(data_url).items():
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        prompts[name] = scripted.last.messages
    for messages in prompts.values():
        assert [isinstance(part, Picture) for part in messages[2].content] == [False, True, False]
    tokens = [asyncio.run(Shared(pocket).tokenize(Request(messages))) for messages in prompts.values()]
    assert tokens[0].image_tokens > 0
    assert tokens[1:] == [tokens[0], tokens[0]]


@pytest.mark.parametrize(
    ("name", "param"),
    [("chat", "messages[2].content[1].image_url.url"), ("responses", "input[2].output[1].image_url")],
)
def test_a_picture_that_is_none_is_blamed(http: httpx.Client, name: str, param: str) -> None:
    path, body = bodies("data:image/png;base64,AAAA")[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param

"""How long an answer may be; a prompt that is too long is refused in the words that clients look for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Request
from snugvl.errors import RequestTooLarge
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.live import asking

HI = {"role": "user", "content": "Hi"}
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "max_completion_tokens", {"messages": [HI]}),
    "old chat": ("/v1/chat/completions", "max_tokens", {"messages": [HI]}),
    "completions": ("/v1/completions", "max_tokens", {"prompt": "Hi"}),
    "responses": ("/v1/responses", "max_output_tokens", {"input": "Hi"}),
}
WORDS = "This model's maximum context length is 512 tokens. "
FULL = Script(refusal=RequestTooLarge("12 tokens fit", field="max_tokens"))


@pytest.fixture(scope="module")
def service() -> FakeService:
    return FakeService()


@pytest.fixture(scope="module")
def http(service: FakeService) -> Iterator[httpx.Client]:
    with asking(service) as client:
        yield client


@pytest.fixture(autouse=True)
def _fresh(service: FakeService) -> Iterator[None]:
    yield
    service.script, service.capabilities = Script(), CAPABILITIES
    service.requests.clear()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_more_than_is_left_is_what_is_left(
    http: httpx.Client, service: FakeService, name: str, stream: bool
) -> None:
    service.script = lambda request: FULL if request.sampling.max_tokens else Script()
    path, field, body = BODIES[name]
    answer = http.post(path, json={**body, field: 500, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["snugvl-warning"] == "lowered max_tokens from 500 to what the context leaves"


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("wish", [-1, None])
def test_as_many_as_there_is_room(
    http: httpx.Client, service: FakeService, name: str, wish: int | None
) -> None:
    path, field, body = BODIES[name]
    answer = http.post(path, json={**body, field: wish})
    assert answer.status_code == 200
    assert "snugvl-warning" not in answer.headers
    assert service.requests[-1].sampling.max_tokens is None


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("asked", [512, 513, 16_384])
@pytest.mark.parametrize("stream", [False, True])
def test_more_than_the_whole_context_is_what_is_left(
    http: httpx.Client, service: FakeService, name: str, asked: int, stream: bool
) -> None:
    path, field, body = BODIES[name]
    answer = http.post(path, json={**body, field: asked, "stream": stream})
    assert answer.status_code == 200, answer.text
    lowered = f"lowered max_tokens from {asked:,} to what the context leaves"
    assert answer.headers["snugvl-warning"] == lowered
    assert [request.sampling.max_tokens for request in service.requests] == [None]


def test_a_prompt_that_is_too_long_says_what_clients_look_for(
    http: httpx.Client, service: FakeService
) -> None:
    service.script = Script(refusal=RequestTooLarge("3 pictures, 2 fit", field="messages"))
    answer = http.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == WORDS + "3 pictures, 2 fit"
    assert len(service.requests) == 1


def test_vllm_does_not_tell_which_is_to_blame(http: httpx.Client, service: FakeService) -> None:
    def script(request: Request) -> Script:
        refusal = RequestTooLarge("too long", field="messages")
        return Script(refusal=refusal) if request.sampling.max_tokens else Script()

    service.script, service.capabilities = script, replace(CAPABILITIES, vague_limits=True)
    answer = http.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 500})
    assert answer.status_code == 200, answer.text


def test_a_call_that_was_cut_is_an_empty_one(http: httpx.Client, service: FakeService) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    history = [HI, {"role": "assistant", "tool_calls": [call]}, {**HI, "role": "tool", "tool_call_id": "a"}]
    answer = http.post("/v1/chat/completions", json={"messages": history})
    assert answer.status_code == 200, answer.text
    assert service.requests[-1].messages[1].tool_calls[0].arguments == "{}"
    assert "tool_calls[0].function.arguments" in answer.headers["snugvl-warning"]


def test_ollamas_numbers_are_ceilings(http: httpx.Client, service: FakeService) -> None:
    body = {"model": "pocket", "messages": [HI], "stream": False, "keep_alive": "soon"}
    options = {"num_ctx": 32_768, "stop": "END", "num_gpu": 99, "num_predict": 100_000}
    answer = http.post("/api/chat", json={**body, "options": options})
    assert answer.status_code == 200, answer.text
    assert answer.headers["snugvl-warning"].startswith(
        "ignored options.num_gpu; lowered options.num_ctx to 512"
    )
    assert service.requests[-1].sampling.stop == ("END",)


def test_ollama_pulls_what_is_served(http: httpx.Client) -> None:
    assert http.post("/api/pull", json={"model": "pocket:latest"}).json() == {"status": "success"}
    other = http.post("/api/pull", json={"model": "llava"})
    assert other.status_code == 404
    assert "snugvl pull" in other.json()["error"]
    assert http.post("/api/show", json={"model": "pocket"}).json()["parameters"] == "num_ctx 512"


def test_anthropics_text_has_no_citations(http: httpx.Client) -> None:
    body = {"model": "pocket", "max_tokens": 9, "messages": [HI]}
    content = http.post("/v1/messages", json=body).json()["content"]
    assert content == [{"type": "text", "text": "Hello there"}]


def test_json_object_may_have_a_schema(http: httpx.Client, service: FakeService) -> None:
    form = {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}
    assert (
        http.post("/v1/chat/completions", json={"messages": [HI], "response_format": form}).status_code == 200
    )
    grammar = service.requests[-1].grammar
    assert grammar is not None
    assert '"required"' in grammar.source

"""Bodies with more wrong in them than anybody wants to hear: the first is told, no other looked for."""

from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from snugvl.server.anthropic import MessagesRequest
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.fields import MAX_NAME
from snugvl.server.media.loading import MediaLoader
from snugvl.server.ollama.request import ChatRequest as OllamaRequest
from snugvl.server.openai.chat import ChatCompletionRequest
from snugvl.server.openai.responses_request import ResponseRequest
from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService
from tests.server.hostile import ASK, CHAT, EVERY, MESSAGES

USER = {"role": "user", "content": [0] * 500}
CALLS = {"role": "assistant", "content": "", "tool_calls": [0] * 100}
PICTURES = {"role": "user", "content": "", "images": [0] * 60}
KINDS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "parts": (ChatCompletionRequest, {"messages": [USER] * 200}),
    "messages": (ChatCompletionRequest, {"messages": [0] * 5000}),
    "calls": (ChatCompletionRequest, {"messages": [CALLS] * 200}),
    "blocks": (MessagesRequest, {"model": "a", "max_tokens": 1, "messages": [USER] * 200}),
    "items": (ResponseRequest, {"input": [USER] * 200}),
    "pictures": (OllamaRequest, {"model": "a", "messages": [PICTURES] * 200}),
}


@pytest.mark.parametrize(("kind", "body"), KINDS.values(), ids=list(KINDS))
def test_a_list_ends_at_its_first_wrong_item(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


@pytest.fixture(scope="module")
def http() -> Any:
    settings = ServerSettings()
    app = create_app(Context(FakeService(), settings, MediaLoader.from_settings(settings)))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("path", EVERY)
def test_a_name_without_end_is_not_told_whole(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"k" * 1_000_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert f"{MAX_NAME:,}".replace(",", "") in answer.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, ASK])
def test_a_long_name_is_cut(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"k" * 1000: 1, "model": "a", "messages": [], "question": "a"})
    assert answer.status_code == 400
    assert "k" * 100 not in answer.text
    assert len(answer.content) < 1000


def test_the_openapi_document_is_rendered_once(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = http.get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    assert "/v1/chat/completions" in first.json()["paths"]
    monkeypatch.setattr(http.app, "openapi", None)  # type: ignore[attr-defined]
    assert http.get("/openapi.json").content == first.content


def test_parts_are_counted_before_they_are_read(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}] * 1000
    body = {"messages": [{"role": "user", "content": parts}] * 17}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "17000 parts in all; at most 16384" in answer.text
    body["messages"].pop()
    assert http.post(CHAT, json=body).status_code == 200

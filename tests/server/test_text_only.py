"""A server whose model reads text alone: text is answered, pictures get a 400 before they are fetched."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Capabilities
from tests.server.fake import CAPABILITIES, FakeService
from tests.server.live import live

TEXT = replace(CAPABILITIES, images=False, max_pixels=0, min_pixels=0)
BLIND = replace(TEXT, language_only=True)
# Nobody may ask for it: were it fetched, the error would be another one.
PICTURE = "https://picture.invalid/a.png"
DATA = "iVBORw0KGgo="


@pytest.fixture(scope="module", params=[TEXT, BLIND], ids=["text", "language only"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, FakeService]]:
    capabilities: Capabilities = request.param
    service = FakeService(capabilities=capabilities)
    with live(service) as url:
        yield url, service


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat([{"type": "image_url", "image_url": {"url": PICTURE}}])),
    "video": ("/v1/chat/completions", chat([{"type": "video_url", "video_url": {"url": PICTURE}}])),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
    ),
    "anthropic": (
        "/v1/messages",
        chat([{"type": "image", "source": {"type": "url", "url": PICTURE}}]) | {"max_tokens": 5},
    ),
    "ollama": ("/api/generate", {"prompt": "hi", "images": [DATA]}),
    "tokens": ("/tokenize", chat([{"type": "image_url", "image_url": {"url": PICTURE}}])),
    "caption": ("/v1/vision/caption", {"image": PICTURE}),
    "ask": ("/v1/vision/ask", {"image": PICTURE, "question": "What?"}),
    "scene": ("/v1/vision/scene", {"image": PICTURE}),
    "detect": ("/v1/vision/detect", {"image": PICTURE}),
}

TASKS = ("caption", "ask", "scene", "detect")


@pytest.mark.parametrize("name", BODIES)
def test_pictures_are_refused_before_they_are_fetched(name: str, served: tuple[str, FakeService]) -> None:
    url, service = served
    path, body = BODIES[name]
    model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
    answer = httpx.post(url + path, json=body if name in TASKS else body | {"model": model})
    assert answer.status_code == 400, answer.text
    way_out = "(--language-only)" if service.capabilities == BLIND else "Qwen/Qwen3-VL-2B-Instruct-FP8"
    assert "reads text alone" in answer.text
    assert way_out in answer.text
    assert not service.requests


def test_an_uploaded_picture_is_refused(served: tuple[str, FakeService]) -> None:
    answer = httpx.post(served[0] + "/v1/vision/caption", files={"image": ("a.png", b"\x89PNG", "image/png")})
    assert answer.status_code == 400
    assert "reads text alone" in answer.text


def test_text_is_answered(served: tuple[str, FakeService]) -> None:
    url, service = served
    answer = httpx.post(url + "/v1/chat/completions", json=chat("hi"))
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
    service.requests.clear()


def test_what_it_can_do_is_told(served: tuple[str, FakeService]) -> None:
    url, _ = served
    card = httpx.get(url + "/v1/models").json()["data"][0]
    assert card["images"] is False
    shown = httpx.post(url + "/api/show", json={"model": card["id"]}).json()
    assert "vision" not in shown["capabilities"]
    assert not any(key.endswith("vision.max_pixels") for key in shown["model_info"])

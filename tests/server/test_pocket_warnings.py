"""A server with pocket says when it was shown what it never learned. Other models' answers stay the same."""

import base64
import io
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image

from snugvl.core.training import Training
from snugvl.tasks.training import FEW, PHOTOGRAPH, VIDEO
from tests.patience import PATIENCE_S
from tests.photographs import photograph
from tests.server.fake import FakeService
from tests.server.live import live
from tests.server.media.films import film

HEADER = "snugvl-warning"
QUESTION = {"type": "text", "text": "What is it?"}


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(url: str) -> dict[str, Any]:
    """A chat of one question about a picture."""
    content = [{"type": "image_url", "image_url": {"url": url}}, QUESTION]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def bodies(url: str) -> list[tuple[str, dict[str, Any]]]:
    """The same picture by every protocol that takes one."""
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    return [
        ("/v1/chat/completions", shown(url)),
        ("/v1/chat/completions", {**shown(url), "stream": True}),
        ("/v1/vision/caption", {"image": url, "max_tokens": 4}),
        ("/v1/vision/ask", {"image": url, "question": "What is it?", "max_tokens": 4, "stream": True}),
        ("/v1/messages", {"model": "pocket", "max_tokens": 4,
                          "messages": [{"role": "user", "content": [source, QUESTION]}]}),
        ("/api/chat", {"model": "pocket", "stream": False, "options": {"num_predict": 4},
                       "messages": [{"role": "user", "content": "What is it?", "images": [data]}]}),
    ]  # fmt: skip


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(url + path, json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response


def test_a_photograph_is_answered_with_a_warning_by_every_protocol(url: str) -> None:
    for path, body in bodies(url_of(photograph(96, 64))):
        assert post(url, path, body).headers.get_list(HEADER) == [PHOTOGRAPH], path


def test_a_drawing_is_not(url: str, data_url: str) -> None:
    for path, body in bodies(data_url):
        assert HEADER not in post(url, path, body).headers, path


def test_words_alone_are(url: str) -> None:
    words = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    warned = post(url, "/v1/chat/completions", words).headers.get_list(HEADER)
    assert warned == [FEW.format(count="none", least=1)]


def test_six_pictures_are_refused_and_five_are_not(url: str, data_url: str) -> None:
    body = shown(data_url)
    (message,) = body["messages"]
    picture, question = message["content"]
    message["content"] = [picture] * 5 + [question]
    post(url, "/v1/chat/completions", body)
    message["content"] = [picture] * 6 + [question]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "has 6 pictures, and pocket can't tell more than 5 apart" in error["message"]
    assert error["param"] == "messages[0].content[5]"


def test_the_models_card_tells_its_limits(url: str) -> None:
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert card["training"] == {"drawings": True, "videos": False, "min_images": 1, "max_images": 5}


def test_a_video_is(url: str) -> None:
    clip = "data:video/mp4;base64," + base64.b64encode(film(frames=8)).decode()
    body = {"image": clip, "max_tokens": 4}
    assert post(url, "/v1/vision/caption", body).headers.get_list(HEADER) == [VIDEO]


@pytest.mark.parametrize(
    ("model", "training", "warned"),
    [
        ("Qwen/eyes", Training(), False),
        ("pocket", Training(), False),  # its name says nothing
        ("/models/a-copy-of-pocket", Training(drawings=True), True),
    ],
)
def test_a_checkpoint_says_what_it_learned_whatever_its_name(
    model: str, training: Training, warned: bool
) -> None:
    service = FakeService()
    assert service.capabilities is not None
    service.capabilities = replace(service.capabilities, model=model, training=training)
    with live(service) as base:
        answer = post(base, "/v1/chat/completions", shown(url_of(photograph(96, 64))))
    assert (HEADER in answer.headers) == warned

"""What holds of a picture holds wherever it comes in: every protocol, multipart forms, counting."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService
from tests.server.live import live
from tests.server.media.pictures import animation
from tests.server.media.test_let_go import BODIES

FORM, VISION = "form of ", "/v1/vision/"
HIDDEN = "http://169.254.169.254/a.png"  # where clouds have their secrets
COUNTING = {
    "/v1/messages/count_tokens": {k: v for k, v in BODIES["/v1/messages"].items() if k != "max_tokens"},
    "/v1/responses/input_tokens": BODIES["/v1/responses"],
    "/tokenize": BODIES["/v1/chat/completions"],
}
DOORS = (
    *BODIES,
    *COUNTING,
    FORM + "/v1/chat/completions",
    FORM + "/v1/responses",
    *(FORM + path for path in BODIES if path.startswith(VISION)),
)
STREAMS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/vision/caption", "/v1/vision/ask")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = ServerSettings(names=("fake",))
    with live(FakeService(), settings) as base, httpx.Client(base_url=base, timeout=60) as client:
        yield client


def send(http: httpx.Client, door: str, picture: bytes | str, **more: Any) -> httpx.Response:
    """A request with a picture, or with a URL where the protocol takes some. `more`: fields of its body."""
    path = door.removeprefix(FORM)
    body = {**BODIES, **COUNTING}[path] | more
    if door != path and path.startswith(VISION):
        fields = {name: value for name, value in body.items() if name != "image"}
        if isinstance(picture, str):
            return http.post(path, data=fields, files={"image": (None, picture)})
        return http.post(path, data=fields, files={"image": ("a.gif", picture)})
    if door != path:
        files: Any = {"request": (None, json.dumps(body).replace("URL", "attachment:cat"))}
        if isinstance(picture, str):
            files = {"request": (None, json.dumps(body).replace("URL", picture))}
        else:
            files["cat"] = ("a.gif", picture)
        return http.post(path, files=files)
    if isinstance(picture, str):
        text = json.dumps(body).replace('"URL"', json.dumps(picture))
        source = json.dumps({"type": "url", "url": picture})
        text = text.replace(json.dumps({"type": "base64", "media_type": "image/png", "data": "DATA"}), source)
        return http.post(path, json=json.loads(text.replace("DATA", picture)))
    data = base64.b64encode(picture).decode()
    text = json.dumps(body).replace("URL", f"data:image/gif;base64,{data}").replace("DATA", data)
    return http.post(path, json=json.loads(text))


@pytest.mark.parametrize("door", DOORS)
def test_who_sends_an_animation_is_told_that_one_frame_was_seen(door: str, http: httpx.Client) -> None:
    answer = send(http, door, animation("GIF", 2))
    assert answer.status_code in (200, 502), answer.text  # 502: what the fake says are no boxes
    assert "is animated (2 frames): only its first frame" in answer.headers["snugvl-warning"]


@pytest.mark.parametrize("door", STREAMS)
def test_who_reads_a_stream_is_told_too(door: str, http: httpx.Client) -> None:
    answer = send(http, door, animation("GIF", 2), stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "is animated (2 frames): only its first frame" in answer.headers["snugvl-warning"]


@pytest.mark.parametrize("door", DOORS)
def test_no_door_leads_to_an_address_that_is_not_public(door: str, http: httpx.Client) -> None:
    answer = send(http, door, HIDDEN)
    assert answer.status_code == 400, answer.text
    said = (
        "is a URL; send the picture itself"
        if door.startswith("/api/")
        else "not the name or address of a public host"
    )
    assert said in answer.text


@pytest.mark.parametrize("door", [door for door in DOORS if not door.startswith("/api/")])
@pytest.mark.parametrize("url", ["file:///etc/passwd", "attachment:dog", "ftp://a.example/b.png", "cat.png"])
def test_no_door_leads_anywhere_else(door: str, url: str, http: httpx.Client) -> None:
    answer = send(http, door, url)
    assert answer.status_code == 400, answer.text

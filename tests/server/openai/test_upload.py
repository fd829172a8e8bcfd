"""Multipart uploads: the JSON in one part, files in others."""

import json
from typing import Any

import httpx
import pytest
from python_multipart.exceptions import FormParserError

from snugvl.core.messages import Picture, Video
from tests.server.openai.scripted import Scripted


def asking(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}]}


def part(value: object) -> tuple[None, str]:
    return (None, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("name", ["request", "payload_json"])
def test_a_file_is_a_picture(http: httpx.Client, scripted: Scripted, picture: bytes, name: str) -> None:
    files: Any = {"cat": ("c.png", picture), name: part(asking("attachment:cat"))}
    answer = http.post("/chat/completions", files=files)
    assert answer.status_code == 200, answer.text
    found = scripted.last.messages[0].content[0]
    assert isinstance(found, Picture)
    assert found.image.size == (128, 96)


def test_the_request_may_be_a_file_too(http: httpx.Client, picture: bytes) -> None:
    body = json.dumps(asking("attachment:cat")).encode()
    files: Any = {"cat": ("c.png", picture), "request": ("r.json", body, "application/json")}
    assert http.post("/chat/completions", files=files).status_code == 200


def test_a_long_request_is_no_problem(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    assert http.post("/chat/completions", files={"request": part(body)}).status_code == 200


def test_a_response_takes_files_too(http: httpx.Client, scripted: Scripted, picture: bytes) -> None:
    content = [{"type": "input_image", "image_url": "attachment:cat"}]
    body = {"input": [{"role": "user", "content": content}]}
    answer = http.post("/responses", files={"cat": ("c.png", picture), "request": part(body)})
    assert answer.status_code == 200, answer.text
    assert isinstance(scripted.last.messages[0].content[0], Picture)


def test_frames_and_files_make_a_video(
    http: httpx.Client, scripted: Scripted, picture: bytes, data_url: str
) -> None:
    content = [{"type": "video", "video": ["attachment:a", data_url]}]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = http.post("/chat/completions", files={"a": ("a.png", picture), "request": part(body)})
    assert answer.status_code == 200, answer.text
    found = scripted.last.messages[0].content[0]
    assert isinstance(found, Video)
    assert len(found.frames) == 2


def test_it_streams(http: httpx.Client, picture: bytes) -> None:
    body = {**asking("attachment:cat"), "stream": True}
    answer = http.post("/chat/completions", files={"cat": ("c.png", picture), "request": part(body)})
    assert answer.text.endswith("data: [DONE]\n\n")


FILE = ("c.png", b"x")
HI = part({"messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize(
    ("files", "param", "word"),
    [
        ([("cat", FILE)], "request", "no JSON"),
        ([("request", HI), ("payload_json", HI)], "request", "2 JSON"),
        ([("request", HI), ("request", HI)], "request", "two parts"),
        ([("request", HI), ("cat", FILE)], "cat", "nothing refers to it"),
        (
            [("request", part(asking("attachment:dog"))), ("cat", FILE)],
            "messages[0].content[0].image_url.url",
            "'cat'",
        ),
        ([("request", part("{"))], None, "not valid JSON"),
        ([("request", part('{"messages": NaN}'))], None, "NaN"),
        ([("request", part({"messages": []}))], "messages", "not be empty"),
    ],
)
def test_what_is_wrong_is_said(
    http: httpx.Client, scripted: Scripted, files: list[Any], param: str | None, word: str
) -> None:
    answer = http.post("/chat/completions", files=files)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert not scripted.requests


def test_a_json_request_has_no_attachments(http: httpx.Client) -> None:
    error = http.post("/chat/completions", json=asking("attachment:cat")).json()["error"]
    assert "multipart/form-data" in error["message"]


def test_a_form_that_an_older_starlette_lets_fail_is_no_server_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette 0.46 lets the errors of its parser pass."""

    async def parse(self: object) -> None:
        raise FormParserError("no boundary")

    monkeypatch.setattr("snugvl.server.body._FormParser.parse", parse)
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = http.post("/chat/completions", content=b"--x", headers=headers)
    assert answer.status_code == 400
    assert "the form can't be read: no boundary" in answer.text


def test_a_broken_form_is_no_server_error(http: httpx.Client) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for content in (
        b"",
        b"--x",
        b"--x\r\n\r\n",
        b"nonsense",
        b"--x\r\nContent-Disposition: form-data\r\n\r\n",
    ):
        answer = http.post("/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400, answer.text
    answer = http.post("/chat/completions", content=b"x", headers={"content-type": "multipart/form-data"})
    assert answer.status_code == 400

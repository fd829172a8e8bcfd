"""Bad requests of the four tasks, each with its exact answer; and models that answer badly."""

import json
from typing import Any

import httpx
import pytest

from snugvl.core.service import Health
from snugvl.errors import EngineError
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, Script
from tests.server.live import live


def refused(url: str, task: str, body: object, status: int = 400) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/vision/{task}", json=body, timeout=PATIENCE_S)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("task", "body", "param", "message"),
    [
        ("caption", {}, "image", "image is missing"),
        ("ask", {"image": "IMAGE"}, "question", "question is missing"),
        ("ask", {"question": "?"}, "image", "image is missing"),
        (
            "ask",
            {"question": "?", "image": "IMAGE", "images": ["IMAGE"]},
            "images",
            "send image or images, not both",
        ),
        ("ask", {"question": " ", "image": "IMAGE"}, "question", "the question is empty"),
        ("scene", {"image": "IMAGE", "stream": True}, "stream", "stream is not supported; leave it out"),
        ("scene", {"image": "IMAGE", "top_p": 0.5}, "top_p", "top_p is not supported; leave it out"),
        (
            "caption",
            {"image": "IMAGE", "temperature": 3},
            "temperature",
            "temperature must be at most 2, not 3",
        ),
        (
            "caption",
            {"image": "IMAGE", "temperature": "0"},
            "temperature",
            "temperature must be a number, not '0'",
        ),
        (
            "caption",
            {"image": "IMAGE", "detail": "huge"},
            "detail",
            "detail must be 'short' or 'detailed', not 'huge'",
        ),
        (
            "detect",
            {"image": "IMAGE", "format": "yolo"},
            "format",
            "format must be 'json', 'coco' or 'png', not 'yolo'",
        ),
        (
            "detect",
            {"image": "IMAGE", "objects": ["a, b"]},
            "objects",
            "give each object its own name instead of 'a, b'",
        ),
        ("detect", {"image": "IMAGE", "objects": [""]}, "objects", "an object needs a name, not ''"),
        (
            "caption",
            {"image": "IMAGE", "max_tokens": 0},
            "max_tokens",
            "max_tokens must be at least 1, not 0",
        ),
        ("caption", {"image": 7}, "image", "image must be a string, not 7"),
    ],
)
def test_a_wrong_field_is_named(
    url: str, data_url: str, task: str, body: dict[str, Any], param: str, message: str
) -> None:
    error = refused(url, task, json.loads(json.dumps(body).replace("IMAGE", data_url)))
    assert (error["param"], error["message"]) == (param, message)


def test_a_file_url_is_not_read(url: str) -> None:
    error = refused(url, "caption", {"image": "file:///etc/passwd"})
    assert error["param"] == "image"
    assert "file" in error["message"] or "URL" in error["message"]


def test_what_is_no_picture(url: str) -> None:
    assert refused(url, "caption", {"image": "data:text/plain;base64,aGk="})["code"] == "invalid_image"


def test_an_unknown_model_is_refused_before_its_picture_is_fetched(url: str) -> None:
    error = refused(url, "scene", {"model": "gpt", "image": "http://192.0.2.1/never"}, 404)
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"image": NaN}'])
def test_a_body_that_is_no_json(url: str, body: bytes) -> None:
    assert httpx.post(f"{url}/v1/vision/caption", content=body).status_code == 400


@pytest.mark.parametrize("body", [[], "image", None, 3])
def test_a_body_that_is_no_object(url: str, body: object) -> None:
    refused(url, "caption", body)


def test_an_answer_that_is_no_scene_is_a_502_with_the_model_s_text(data_url: str) -> None:
    with live(FakeService(Script(["I see ", "a cat"]))) as base:
        error = refused(base, "scene", {"image": data_url}, 502)
    assert error["code"] == "invalid_model_output"
    assert error["message"] == ("the model didn't answer with a scene as JSON; the model said: 'I see a cat'")


def test_an_answer_without_a_result_because_of_max_tokens_is_the_request_s_fault(
    url: str, data_url: str
) -> None:
    for task in ("scene", "detect"):
        error = refused(url, task, {"image": data_url, "max_tokens": 1})
        assert error["param"] == "max_tokens"
        assert error["message"] == (
            "max_tokens 1 cut the answer before there was a result in it; allow more, or leave it out"
        )


def test_an_endless_answer_is_shown_up_to_a_limit(data_url: str) -> None:
    with live(FakeService(Script(["no " * 5000]))) as base:
        error = refused(base, "detect", {"image": data_url}, 502)
    assert len(error["message"]) < 2200


def test_an_empty_answer_of_a_stream_is_an_error_event(data_url: str) -> None:
    with live(FakeService(Script([]))) as base:
        response = httpx.post(f"{base}/v1/vision/caption", json={"image": data_url, "stream": True})
    assert response.status_code == 200
    (line,) = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert json.loads(line.removeprefix("data: "))["error"]["code"] == "invalid_model_output"


def test_an_engine_that_fails_midway_ends_the_stream_with_an_error(data_url: str) -> None:
    service = FakeService(Script(["A", " cat"], error=EngineError("the engine died")))
    with live(service) as base:
        response = httpx.post(f"{base}/v1/vision/caption", json={"image": data_url, "stream": True})
        whole = httpx.post(f"{base}/v1/vision/caption", json={"image": data_url})
    lines = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    assert [line.get("delta") for line in lines] == ["A", " cat", None]
    assert lines[-1]["error"]["message"] == "the engine died"
    assert whole.status_code == 500
    assert not service.running


def test_an_engine_that_is_not_there_is_a_503(data_url: str) -> None:
    service = FakeService(health=Health("starting", "loading", retry_after_s=3), capabilities=None)
    with live(service) as base:
        response = httpx.post(f"{base}/v1/vision/detect", json={"image": data_url})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"


def test_every_task_and_both_of_its_bodies_are_documented(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for task in ("caption", "ask", "scene", "detect"):
        content = paths[f"/v1/vision/{task}"]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", "multipart/form-data"}
        assert "image" in content["multipart/form-data"]["schema"]["properties"]
        assert "image" in content["application/json"]["schema"]["properties"]

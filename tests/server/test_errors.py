"""Errors: one sentence, the field's path, the form of the protocol."""

from typing import Annotated, Any, ClassVar, Literal

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import Field, create_model
from starlette.exceptions import HTTPException

from snugvl import errors as ours
from snugvl.server import errors
from snugvl.server.body import parse_json
from snugvl.server.fields import Strict
from snugvl.server.metrics import RequestRecord, begin_record
from snugvl.server.unsupported import refused


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image"]
    url: str


class MessageIn(Strict):
    role: Literal["user", "system"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class Body(Strict):
    unsupported: ClassVar = {
        "n": refused("one", 1),
        "store": refused("no", False),
        "logit_bias": refused("no", {}),
    }

    messages: list[MessageIn]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: int | None = None


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    errors.install(app)

    @app.post("/v1/chat")
    @app.post("/v1/messages")
    @app.post("/api/chat")
    async def chat(body: Body) -> dict[str, Any]:
        return body.model_dump()

    @app.get("/raise/{name}")
    async def fail(name: str) -> None:
        raise getattr(ours, name)("what and why")

    return TestClient(app)


def body(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **changes}


def content(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("sent", "param", "code"),
    [
        (body(frobnicate=1), "frobnicate", "unknown_parameter"),
        (body(frobnicate=None), "frobnicate", "unknown_parameter"),
        (body(n=2), "n", "unsupported_parameter"),
        (body(n=True), "n", "unsupported_parameter"),
        (body(store=True), "store", "unsupported_parameter"),
        ({}, "messages", "missing_required_parameter"),
        (body(temperature=3), "temperature", "invalid_value"),
        (body(max_tokens="many"), "max_tokens", "invalid_value"),
        (body(max_tokens=[]), "max_tokens", "invalid_type"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (content({"type": "text", "text": "a"}, {"type": "sound"}), "messages[0].content[1]", None),
        (content({"type": "text"}), "messages[0].content[0].text", "missing_required_parameter"),
        (content({"type": "text", "text": "x", "bold": 1}), "messages[0].content[0].bold", None),
        (content({"type": "text", "text": 7}), "messages[0].content[0].text", "invalid_type"),
        ([], None, "invalid_type"),
    ],
)
def test_a_wrong_body_names_its_field(client: TestClient, sent: Any, param: str, code: str | None) -> None:
    answer = client.post("/v1/chat", json=sent)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert param in error["message"]


def test_the_value_is_shown(client: TestClient) -> None:
    message = client.post("/v1/chat", json=body(temperature=3)).json()["error"]["message"]
    assert message == "temperature must be at most 2, not 3"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([], "the body must be an object"),
        ({"messages": "hi"}, "messages must be a list, not 'hi'"),
        ({"messages": [7]}, "messages[0] must be an object, not 7"),
        (body(temperature="warm"), "temperature must be a number, not 'warm'"),
        ({"messages": None}, "messages must be a list, not null"),
        (body(temperature=-1), "temperature must be at least 0, not -1"),
        (body(max_tokens=1.5), "max_tokens must be an integer, not 1.5"),
        (
            content(
                {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"}}
            ),
            "messages[0].content[0]: type 'file' is not supported; use 'text' or 'image', and of a PDF its "
            "pages as pictures",
        ),
        (
            content({"type": "sound"}),
            "messages[0].content[0]: type 'sound' is not supported; use 'text' or 'image'",
        ),
    ],
)
def test_what_a_value_must_be_is_said_in_plain_words(client: TestClient, sent: Any, said: str) -> None:
    """pydantic says "Input should be a valid dictionary or object to extract fields from"."""
    message = client.post("/v1/chat", json=sent).json()["error"]["message"]
    assert message.startswith(said)
    assert message.count(" or ") <= 1


def test_of_very_many_errors_one_is_told(client: TestClient) -> None:
    many = {"messages": [{"role": "king", "content": "x" * 1000}] * 20_000}
    error = client.post("/v1/chat", json=many).json()["error"]
    assert error["param"] == "messages[0].role"


@pytest.mark.parametrize("extra", [{"n": 1}, {"n": None}, {"store": False}, {"logit_bias": {}}])
def test_what_asks_for_nothing_passes(client: TestClient, extra: dict[str, Any]) -> None:
    assert client.post("/v1/chat", json=body(**extra)).status_code == 200


def test_no_body_and_no_json(client: TestClient) -> None:
    assert "no body" in client.post("/v1/chat").json()["error"]["message"]
    plain = client.post("/v1/chat", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 400
    assert "Content-Type: application/json" in plain.json()["error"]["message"]


def test_each_protocol_has_its_form(client: TestClient) -> None:
    ollama = client.post("/api/chat", json={})
    assert ollama.json() == {"error": "messages is missing"}
    anthropic = client.post("/v1/messages", json={}).json()
    assert anthropic["type"] == "error"
    assert anthropic["error"] == {"type": "invalid_request_error", "message": "messages is missing"}
    assert "request_id" in anthropic


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("Unauthorized", 401, "invalid_api_key"),
        ("ModelNotServed", 404, "model_not_found"),
        ("RequestTooLarge", 400, "context_length_exceeded"),
        ("ImageTooLarge", 413, "image_too_large"),
        ("ImageError", 400, "invalid_image"),
        ("BodyTooLarge", 413, "request_too_large"),
        ("RateLimited", 429, "rate_limit_exceeded"),
        ("QueueFull", 429, "queue_full"),
        ("DeadlineExceeded", 504, "deadline_exceeded"),
        ("EngineUnavailable", 503, "engine_unavailable"),
        ("OutOfMemory", 503, "out_of_memory"),
        ("EngineError", 500, "internal_error"),
        ("OutputError", 502, "invalid_model_output"),
    ],
)
def test_every_error_has_its_status_and_code(client: TestClient, name: str, status: int, code: str) -> None:
    answer = client.get(f"/raise/{name}")
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == "what and why"
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert ("www-authenticate" in answer.headers) == (status == 401)


ANTHROPIC_SAYS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    502: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), ANTHROPIC_SAYS.items())
def test_anthropics_clients_read_the_type_of_an_error(status: int, kind: str) -> None:
    """They wait and try again after some, and give up after others."""
    body = errors.error_body(HTTPException(status, "what and why"), "anthropic", "req_1")
    assert body["error"] == {"type": kind, "message": "what and why"}


def test_lost_paths_and_methods(client: TestClient) -> None:
    lost = client.get("/v1/nothing")
    assert lost.status_code == 404
    assert "GET /v1/nothing" in lost.json()["error"]["message"]
    assert client.get("/api/nothing").json().keys() == {"error"}
    assert "GET /openapi.json lists" in lost.json()["error"]["message"]
    for path, right in (
        ("/chat", "/v1/chat"),  # the base URL without its /v1
        ("/v1/v1/messages", "/v1/messages"),  # and with two
        ("/v1/api/chat", "/api/chat"),
        ("/openai/deployments/fake/chat", "/v1/chat"),  # Azure's
        ("/api/v1/chat", "/v1/chat"),
        ("/V1/Chat", "/v1/chat"),
    ):
        said = client.post(path).text
        assert f"there is no POST {path}; use {right} (is the base URL right?)" in said
    wrong = client.get("/v1/chat")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.json()["error"]["message"] == "GET /v1/chat is not possible; use POST"


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/v1/responses/resp_1", "in input"),
        ("POST", "/v1/responses/resp_1/cancel", "in input"),
        ("GET", "/v1/chat/completions/x/messages", "POST /v1/chat/completions"),
        ("POST", "/v1/embeddings", "writes text"),
        ("POST", "/v1/images/generations", "answers questions about pictures"),
        ("POST", "/v1/files", "pictures go into the request itself"),
        ("GET", "/v1/messages/batches", "send the requests themselves"),
        ("POST", "/v1/complete", "POST /v1/messages"),
    ],
)
def test_what_other_servers_have_is_answered_with_what_there_is(
    client: TestClient, method: str, path: str, said: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"there is no {method} {path}: ")
    assert said in message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 101 + b"]" * 101, "deeper than 100"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 100"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "deeper than 100"),
        (b"1" * 5000, "400 digits"),
        (b"[" + b"0," * 300_000 + b"0]", "more than 300,000 values"),
        (b'{"a": 1', "line 1, column 8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (
            b"\x89PNG\r\n\x1a\n",
            "the body is a file (image/png), not JSON; send it to /v1/vision/caption, for one, as a",
        ),
        (b"RIFF\xff\0\0\0WEBPVP8 ", "curl -F image=@FILE"),
        (b"\x1aE\xdf\xa3\x80", "the body is a file (video/webm)"),
    ],
)
def test_json_that_would_trip_somebody_later(data: bytes, said: str) -> None:
    with pytest.raises(ours.RequestError) as error:
        parse_json(data)
    assert said in str(error.value)


def test_json_that_is_fine() -> None:
    assert parse_json('{"ä": [1, -2.5e3, "😀", null, true]}'.encode()) == {
        "ä": [1, -2500.0, "😀", None, True]
    }
    assert parse_json(b"[" * 100 + b"]" * 100) is not None


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (59.01, "60")])
def test_retry_after_is_never_too_soon(seconds: float, told: str) -> None:
    scope: dict[str, Any] = {"path": "/v1/models", "headers": []}
    begin_record(scope, RequestRecord("req_1"))
    answer = errors.error_response(ours.RateLimited("slower", retry_after_s=seconds), scope)
    assert answer.headers["retry-after"] == told


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        (
            Annotated[int, Field(le=2**53)],
            2**53 + 1,
            "x must be at most 9007199254740992, not 9007199254740993",
        ),
        (Annotated[float, Field(ge=0.25)], 0, "x must be at least 0.25, not 0"),
        (Annotated[str, Field(pattern=r"^\d+$")], "a", r"x must match ^\d+$, not 'a'"),
    ],
)
def test_bounds_are_said_to_their_last_digit_and_in_our_words(schema: Any, value: Any, said: str) -> None:
    app = FastAPI()
    errors.install(app)
    body: Any = create_model("Odd", x=(schema, ...))

    @app.post("/v1/chat")
    async def chat(body: body) -> None:
        """Never reached."""

    answer = TestClient(app).post("/v1/chat", json={"x": value})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)

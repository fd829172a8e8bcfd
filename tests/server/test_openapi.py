"""The document says everything that a route can answer."""

from typing import Any

import httpx
import pytest

from snugvl.server.access import open_to_all
from snugvl.server.app import FORMS
from tests.server.fake import FakeService
from tests.server.live import live


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with live(FakeService()) as base:
        found: dict[str, Any] = httpx.get(base + "/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_is_told_and_tagged(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) > 20
    for path, method, operation in found:
        where = f"{method} {path}"
        assert operation["tags"], where
        assert operation["summary"], where
        assert operation["description"], where
        assert "200" in operation["responses"], where


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))


def test_every_answer_has_its_form(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for status, answer in operation["responses"].items():
            assert "content" in answer, f"{method} {path} {status}"


def test_errors_have_the_form_of_their_protocol(document: dict[str, Any]) -> None:
    for path, family in (
        ("/v1/chat/completions", "openai"),
        ("/v1/messages", "anthropic"),
        ("/api/chat", "ollama"),
    ):
        answers = document["paths"][path]["post"]["responses"]
        for status in ("400", "401", "404", "413", "429", "500", "503", "504"):
            schema = answers[status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith(FORMS[family].__name__), f"{path} {status}"  # type: ignore[index]


def test_fastapis_own_error_form_is_gone(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in str(document)
    for path, method, operation in operations(document):
        answer = operation["responses"].get("422")
        assert answer is None or "FastAPI" not in str(answer), f"{method} {path}"


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str):
                assert target.startswith("#/components/schemas/")
                assert target.rpartition("/")[2] in document["components"]["schemas"], target
            for below in value.values():
                check(below)
        elif isinstance(value, list):
            for below in value:
                check(below)

    check(document)


def test_what_needs_a_key_says_so(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"].keys() == {"bearer", "x-api-key", "api-key"}
    for path, method, operation in operations(document):
        assert ("security" in operation) != open_to_all(path), f"{method} {path}"

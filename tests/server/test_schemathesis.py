"""Every route of the OpenAPI document, with data that fits it and data that doesn't: no undocumented answer.

The same examples every time, as many as two cores get through in about a minute.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, CheckContext, GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.transport import Response
from schemathesis.openapi.checks import UndefinedStatusCode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.responses import PlainTextResponse

from snugvl.backends.native.backend import NativeBackend
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.intake.intake import Intake
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.conftest import Shared
from tests.server.fake import FakeService
from tests.server.live import live

pytestmark = pytest.mark.slow

PROMISED = (502, 503, 504, 507)  # errors of the server that the document promises
PROTOCOLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/", "/tokenize")


def no_broken_promise(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """No error of the server but those that it promises."""
    if response.status_code >= 500 and response.status_code not in PROMISED:
        raise Failure(
            operation=case.operation.label,
            title="Server error",
            message=f"{response.status_code}: {response.content[:500]!r}",
        )
    return None


CHECKS: list[Any] = [
    no_broken_promise,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def operations(base: str) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    """Every operation in the document of a server."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    for found in schema.get_all_operations():
        yield found.ok()


def _without_body(operation: APIOperation[Any, Any, Any, Any]) -> bool:
    return not operation.body.items


def try_out(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, examples: int, base: str | None = None
) -> int:
    """Send that many requests and check the answers; how many there were. `base`: to another server."""
    sent = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Case) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(base_url=base, checks=CHECKS, timeout=PATIENCE_S)

    send()
    return sent


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with live(FakeService()) as url:
        yield url


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_in_the_document(base: str, mode: GenerationMode) -> None:
    found = list(operations(base))
    assert len(found) > 20
    sent = 0
    for operation in found:
        if mode.is_negative and _without_body(operation):
            continue  # nothing can be wrong about it
        takes_body = not _without_body(operation)
        sent += try_out(operation, mode, 12 if takes_body else 3)
    assert sent > 150


def test_the_model_itself(base: str, pocket: NativeBackend) -> None:
    """The document comes from another server: within this one's deadline it may not, on a busy machine."""
    sent = 0
    with live(Shared(pocket), ServerSettings(deadline_s=1.0)) as url:
        for operation in operations(base):
            if operation.path.startswith(PROTOCOLS) and not _without_body(operation):
                sent += try_out(operation, GenerationMode.POSITIVE, 4, url)
    assert sent > 16


def undocumented() -> FastAPI:
    """An app with one route that answers what the document doesn't say."""
    app = create_app(Context(FakeService(), ServerSettings(), Intake()))

    @app.get("/odd")
    async def odd() -> PlainTextResponse:
        return PlainTextResponse("teapot", 418)

    return app


def test_an_undocumented_answer_is_found() -> None:
    with live(FakeService(), app=undocumented()) as url:
        (operation,) = (found for found in operations(url) if found.path == "/odd")
        with pytest.raises(FailureGroup) as failure:
            try_out(operation, GenerationMode.POSITIVE, 1)
    assert any(isinstance(error, UndefinedStatusCode) for error in failure.value.exceptions)

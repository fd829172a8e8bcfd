"""Every route of the OpenAPI document, with data that fits it and data that doesn't: no undocumented answer.

The same examples every time, a few of each route.
"""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from snugvl.backends.native.backend import NativeBackend
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.media.loading import MediaLoader
from snugvl.server.settings import ServerSettings
from tests.server.conftest import Shared
from tests.server.fake import FakeService
from tests.server.live import live

pytestmark = pytest.mark.slow

PROTOCOLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/", "/tokenize")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with live(FakeService()) as url:
        yield url


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.sample("False")
def test_every_answer_is_in_the_document(base: str, fits: bool) -> None:
    from tests.server.documented import GenerationMode, operations, try_out, without_body

    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    found = list(operations(base))
    assert len(found) > 20
    sent = 0
    for operation in found:
        if not fits and without_body(operation):
            continue  # nothing can be wrong about it
        takes_body = not without_body(operation)
        sent += try_out(operation, mode, 2 if takes_body else 1)
    assert sent > 24


def test_the_model_itself(base: str, pocket: NativeBackend) -> None:
    """The document comes from another server: within this one's deadline it may not, on a busy machine."""
    from tests.server.documented import GenerationMode, operations, try_out, without_body

    sent = 0
    with live(Shared(pocket), ServerSettings(deadline_s=1.0)) as url:
        for operation in operations(base):
            if operation.path.startswith(PROTOCOLS) and not without_body(operation):
                sent += try_out(operation, GenerationMode.POSITIVE, 1, url)
    assert sent > 8


def undocumented() -> FastAPI:
    """An app with one route that answers what the document doesn't say."""
    app = create_app(Context(FakeService(), ServerSettings(), MediaLoader()))

    @app.get("/odd")
    async def odd() -> PlainTextResponse:
        return PlainTextResponse("teapot", 418)

    return app


def test_an_undocumented_answer_is_found() -> None:
    from schemathesis.core.failures import FailureGroup
    from schemathesis.openapi.checks import UndefinedStatusCode

    from tests.server.documented import GenerationMode, operations, try_out

    with live(FakeService(), app=undocumented()) as url:
        (operation,) = (found for found in operations(url) if found.path == "/odd")
        with pytest.raises(FailureGroup) as failure:
            try_out(operation, GenerationMode.POSITIVE, 1)
    assert any(isinstance(error, UndefinedStatusCode) for error in failure.value.exceptions)

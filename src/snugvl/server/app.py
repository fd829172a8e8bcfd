"""The app: routes and middleware, put together."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from snugvl.server import errors, openapi, system
from snugvl.server.anthropic import routes as anthropic
from snugvl.server.auth import Auth
from snugvl.server.context import Context
from snugvl.server.limits import Limits
from snugvl.server.logs import Logs
from snugvl.server.ollama import routes as ollama
from snugvl.server.openai import chat, completions, responses, tokens
from snugvl.server.page import routes as page
from snugvl.server.receiving import Receiving
from snugvl.server.vision import routes as vision
from snugvl.version import __version__


def create_app(context: Context, *, started: bool = False) -> FastAPI:
    """An ASGI app that serves `context.service`; it starts it, unless it was `started`, and closes it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not started:
            await context.service.start()
        try:
            yield
        finally:
            await context.service.close()
            await context.intake.close()

    app = FastAPI(title="snugvl", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.context = context
    errors.install(app)
    for routes in (system, tokens, chat, completions, responses, vision, ollama, anthropic, page):
        app.include_router(routes.router)
    # The last one added sees a request first.
    app.add_middleware(Receiving, settings=context.settings)
    app.add_middleware(Limits, settings=context.settings)
    app.add_middleware(Auth, settings=context.settings)
    app.add_middleware(Logs, context=context)
    described: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not described:
            described.append(openapi.document(app))
        return described[0]

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    app.add_route("/openapi.json", _Described(app).answer, include_in_schema=False)
    return app


class _Described:
    """The OpenAPI document, made once, in a thread: that takes half a second."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._making = asyncio.Lock()
        self._text: bytes | None = None

    async def answer(self, _: Request) -> Response:
        """GET /openapi.json."""
        async with self._making:
            if self._text is None:
                self._text = await asyncio.to_thread(self._rendered)
        return Response(self._text, media_type="application/json")

    def _rendered(self) -> bytes:
        return json.dumps(self._app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

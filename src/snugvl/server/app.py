"""The app: routes and middleware, put together, and the OpenAPI document of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from snugvl.server import errors, system, vision
from snugvl.server.access import Auth, RateLimits, open_to_all
from snugvl.server.anthropic import routes as anthropic
from snugvl.server.context import Context
from snugvl.server.errors import Family, family_of
from snugvl.server.logs import Logs
from snugvl.server.ollama import routes as ollama
from snugvl.server.openai import chat, completions, responses, tokens
from snugvl.server.page import routes as page
from snugvl.server.receiving import Receiving
from snugvl.version import __version__

METHODS = ("GET", "HEAD", "POST", "DELETE")
READABLE = ("snugvl-warning", "x-request-id", "request-id", "retry-after")  # headers that a foreign page sees


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
            await context.media.close()

    app = FastAPI(title="snugvl", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.context = context
    errors.install(app)
    for routes in (system, tokens, chat, completions, responses, vision, ollama, anthropic, page):
        app.include_router(routes.router)
    # The last one added sees a request first.
    app.add_middleware(_HeadAsGet)
    app.add_middleware(Receiving, settings=context.settings)
    app.add_middleware(RateLimits, settings=context.settings)
    app.add_middleware(Auth, settings=context.settings)
    app.add_middleware(Logs, context=context)
    if origins := context.settings.allow_origins:
        # The first of all: a preflight has no API key, and a page must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=METHODS, allow_headers=["*"],
            expose_headers=READABLE,
        )  # fmt: skip
    app.openapi = cache(partial(document, app))  # type: ignore[method-assign]  # FastAPI's way to extend it
    app.add_route("/openapi.json", _DocumentRoute(app).answer, include_in_schema=False)
    return app


class _HeadAsGet:
    """ASGI middleware: HEAD is answered wherever GET is. The server around it leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a HEAD request on as GET."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class _DocumentRoute:
    """The OpenAPI document, made once, in a thread: that takes half a second."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._making = asyncio.Lock()
        self._text: bytes | None = None

    async def answer(self, _: Request) -> Response:
        """GET /openapi.json."""
        async with self._making:
            if self._text is None:
                self._text = await asyncio.to_thread(self._render)
        return Response(self._text, media_type="application/json")

    def _render(self) -> bytes:
        return json.dumps(self._app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()


Responses = dict[int | str, dict[str, Any]]

MEANINGS = {
    400: "The request is wrong; the message says which field, which value and what to do.",
    401: "No API key, or a wrong one.",
    403: "A browser asked from a foreign page, or under a foreign name.",
    404: "The model is not served here.",
    405: "The path has other methods.",
    408: "The body came too slowly.",
    413: "Too many bytes, pixels or tokens; the message has the numbers and what fits.",
    431: "Too many or too long header lines.",
    429: "Too many requests; Retry-After says when to come back.",
    500: "The server failed; its log says why.",
    502: "The model's answer is not what the task asked for.",
    503: "The engine is starting, restarting or shutting down; Retry-After says when to come back.",
    504: "The deadline passed before the answer was complete.",
}
EVERYWHERE = (401, 403, 429, 431, 500)  # what the layers before the routes answer
WITH_BODY = (400, 404, 408, 413, 502, 503, 504)


class OpenAIErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """An error as OpenAI's API writes it."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """An error as Anthropic's API writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OllamaError(BaseModel):
    """An error as Ollama writes it."""

    error: str


FORMS: dict[Family, type[BaseModel]] = {
    "openai": OpenAIError,
    "anthropic": AnthropicError,
    "ollama": OllamaError,
}


def responses_of(*statuses: int, family: Family = "openai") -> Responses:
    """`responses=` of a route that answers with more errors than every route does.

    `document` adds what the layers before the routes answer, and what any request with a body may get.
    """
    return {status: {"model": FORMS[family], "description": MEANINGS[status]} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, with the errors that every route can answer."""
    values = get_openapi(
        title=app.title,
        version=app.version,
        summary="Vision-language models in the GPU memory people really have",
        routes=app.routes,
        tags=app.openapi_tags,
    )
    components = values.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in FORMS.values():
        _define(schemas, model)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in values.get("paths", {}).items():
        for operation in operations.values():
            _complete(operation, path)
    return values


def _complete(operation: dict[str, Any], path: str) -> None:
    """Add to an operation what it shares with others."""
    answers = operation["responses"]
    if "HTTPValidationError" in str(answers.get("422")):
        del answers["422"]
    takes = "requestBody" in operation or "parameters" in operation
    schema = {"$ref": f"#/components/schemas/{FORMS[family_of(path)].__name__}"}
    for status in sorted(EVERYWHERE + (WITH_BODY if takes else ())):
        answer = {"description": MEANINGS[status], "content": {"application/json": {"schema": schema}}}
        answers.setdefault(str(status), answer)
    if not open_to_all(path):
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]


def _define(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema

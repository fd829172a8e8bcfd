"""The app: routes and middleware, put together, its outermost layer, and the OpenAPI document of it.

The outermost layer (`Logs`) sees to a record for every request, one access line, and an answer whatever
happens. The line holds no prompt, image, query string or key:

    POST /v1/chat/completions 200 412.3 ms id=… key=5994471a prompt=312 generated=41 image=256 code=-
"""

import asyncio
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snugvl.errors import SnugvlError
from snugvl.server import anthropic, errors, page, system, vision
from snugvl.server.access import KEY_HEADERS, Auth, RateLimits, foreign, open_to_all
from snugvl.server.context import Context
from snugvl.server.errors import Family, code_of, error_response, family_of, status_of
from snugvl.server.metrics import RequestRecord, begin_record
from snugvl.server.ollama import routes as ollama
from snugvl.server.openai import chat, completions, responses, tokens
from snugvl.server.receiving import Receiving
from snugvl.server.streaming import SlowClient
from snugvl.version import __version__

METHODS = ("GET", "HEAD", "POST", "DELETE")
ROUTERS = (
    *(system.health_routes, system.server_routes, system.model_routes),
    *(part.router for part in (tokens, chat, completions, responses, vision, ollama, anthropic, page)),
)
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

    app = FastAPI(
        title="snugvl", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    app.state.context = context
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    # The last one added sees a request first.
    app.add_middleware(_HeadAsGet)
    app.add_middleware(Receiving, settings=context.settings)
    app.add_middleware(RateLimits, settings=context.settings)
    app.add_middleware(Auth, settings=context.settings)
    app.add_middleware(Logs, context=context)
    if origins := context.settings.allow_origins:
        # The first of all: a preflight has no API key, and a page must be able to read a refusal.
        app.add_middleware(
            _Preflights, allow_origins=origins, allow_methods=METHODS, allow_headers=["*"],
            expose_headers=READABLE,
        )  # fmt: skip
    app.openapi = cache(partial(document, app))  # type: ignore[method-assign]  # FastAPI's way to extend it
    app.add_route("/openapi.json", _DocumentRoute(app).answer, include_in_schema=False)
    return app


class _Preflights(CORSMiddleware):
    """Starlette's, with its refusals in the form of the protocol."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, pass others on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        wanted = headers.get("access-control-request-method")
        if wanted is None or "origin" not in headers or scope["method"] != "OPTIONS":
            await super().__call__(scope, receive, send)
            return
        response = self.preflight_response(headers)
        if response.status_code >= 400:
            why = foreign(headers["origin"])
            if self.is_allowed_origin(headers["origin"]):
                why = (
                    f"a page's request by {wanted[:20]!r} is not answered; use {', '.join(METHODS)}"
                    if wanted not in METHODS
                    else "a page from the internet may not reach this private address; open one from here"
                )
            response = error_response(HTTPException(response.status_code, why, self._said(response)), scope)
        await response(scope, receive, send)

    def _said(self, response: Response) -> dict[str, str]:
        """The headers of CORS in an answer."""
        kept = ("access-control-", "vary")
        return {name: value for name, value in response.headers.items() if name.startswith(kept)}


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


MEANINGS = {
    400: "The request is wrong; the message says which field, which value and what to do.",
    401: "No API key, or a wrong one.",
    403: "A browser asked from a foreign page, or under a foreign name.",
    404: "The model is not served here.",
    405: "The path has other methods.",
    408: "The head or the body came too slowly.",
    413: "Too many bytes, pixels or tokens; the message has the numbers and what fits.",
    415: "The Content-Encoding isn't read here; send plain JSON, or gzip.",
    431: "Too many or too long header lines.",
    429: "Too many requests; Retry-After says when to come back.",
    500: "The server failed; its log says why.",
    502: "The model's answer is not what the task asked for.",
    503: "The engine is starting, restarting or shutting down; Retry-After says when to come back.",
    504: "The deadline passed before the answer was complete.",
}
EVERYWHERE = (401, 403, 429, 431, 500)  # what the layers before the routes answer
WITH_BODY = (400, 404, 408, 413, 415, 502, 503, 504)


class OpenAIErrorDetail(BaseModel):
    """The error itself."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """An error as OpenAI's API writes it."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    """The error itself."""

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
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        **{name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADERS},
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
        operation["security"] = [{"bearer": []}, *({name: []} for name in KEY_HEADERS)]


CLIENT_LEFT = 499
LOGGED_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
POLLED = {
    "/health",
    "/health/live",
    "/health/ready",
    "/memory",
    "/metrics",
}  # `top`, the page: once a second and more
# What Azure's SDKs put before a path of OpenAI's; the model's name is in the body as well.
AZURE = re.compile(
    r"^/openai/v1/|^/(openai/|v1/)?deployments/.+?/(?=(chat/)?completions$|(responses|models|embeddings)$)"
)
LINGER_S = 2.0  # how long the rest of a refused body is read and dropped, so that its answer arrives

access_log = logging.getLogger("snugvl.access")
log = logging.getLogger("snugvl.server")


class Logs:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, and write down how it went."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if "//" in path or path.endswith("/"):  # of a base URL that ends with a slash, for one
            path = "/" + "/".join(filter(None, path.split("/")))
        scope["path"] = AZURE.sub("/v1/", path)
        record = RequestRecord(f"req_{uuid.uuid4().hex}")
        begin_record(scope, record)
        self._context.metrics.in_flight.inc()
        try:
            await self._run(scope, _Exchange(self._context, record, scope, receive, send))
        finally:
            self._context.metrics.in_flight.dec()
            self._note(scope, record)

    async def _run(self, scope: Scope, exchange: "_Exchange") -> None:
        record = exchange.record
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except SlowClient as error:
            record.error, record.left = error, True
        except Exception as error:
            record.error = error
            if not isinstance(error, SnugvlError) and status_of(error) >= 500:
                log.exception("%s failed", record.id)
            if record.status is None:
                await exchange.refuse(error)
        if record.left and record.status is None:
            record.status = CLIENT_LEFT

    def _note(self, scope: Scope, record: RequestRecord) -> None:
        metrics, path = self._context.metrics, _template(scope)
        method = scope["method"] if scope["method"] in LOGGED_METHODS else "other"
        metrics.requests.labels(method, path, str(record.status)).inc()
        metrics.request_seconds.labels(path).observe(record.seconds)
        code = "-"
        if record.error is not None:
            code = code_of(record.error) or "invalid_request"
            metrics.refusals.labels(str(status_of(record.error)), code).inc()
        if record.left:
            metrics.departures.inc()
        tokens = ""
        if record.usage is not None:
            used = record.usage
            tokens = (
                f" prompt={used.prompt_tokens} generated={used.completion_tokens} image={used.image_tokens}"
            )
        left = " left" if record.left else ""
        polled = path in POLLED and method == "GET" and record.error is None and record.status == 200
        access_log.log(
            logging.DEBUG if polled else logging.INFO,
            "%s %s %s %.1f ms id=%s key=%s%s code=%s%s",
            *(method, path, record.status, record.seconds * 1000, record.id, record.key, tokens, code, left),
        )


class _Exchange:
    """One request and its answer: sees whether the body came whole, adds what every answer has."""

    def __init__(
        self, context: Context, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._context = context
        self._scope = scope
        self._receive = receive
        self._send = send
        headers = Headers(scope=scope)
        self._whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self.record = record

    async def receive(self) -> Message:
        """The next piece of the request."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._whole = True
        return message

    async def send(self, message: Message) -> None:
        """Pass a piece on."""
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            family = family_of(self._scope["path"], self._scope["headers"])
            name = "request-id" if family == "anthropic" else "x-request-id"
            extra = [(name.encode(), self.record.id.encode())]
            if self.record.notes.warnings:
                extra.append((b"snugvl-warning", "; ".join(self.record.notes.warnings).encode()))
            if self._context.service.health.state == "draining":
                extra.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await self._send(message)

    async def refuse(self, error: Exception) -> None:
        """Answer with an error, and end the connection where the body was not read to its end."""
        response = error_response(error, self._scope)
        close = not self._whole
        headers = [*response.raw_headers, *([(b"connection", b"close")] if close else [])]
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        body: dict[str, Any] = {"type": "http.response.body", "body": response.body}
        if close:
            # Closing while the client still sends would reset the connection, and the answer with it.
            await self.send({**body, "more_body": True})
            await _discard(self.receive)
            body["body"] = b""
        await self.send({**body, "more_body": False})


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            more = True
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        return


def _template(scope: Scope) -> str:
    """The path as the route writes it, without what a user put in it; "other" where no route has it."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:  # refused before it reached its route, or HEAD, which another scope was made for
        routes = (route for router in ROUTERS for route in router.routes)
        path = next((route.path for route in routes if route.matches(scope)[0] != Match.NONE), None)
    return path if isinstance(path, str) else "other"

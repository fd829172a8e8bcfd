"""The outermost layer: a record for every request, one access line, and an answer whatever happens.

The line holds no prompt, image, query string or key:

    POST /v1/chat/completions 200 412.3 ms id=… key=5994471a prompt=312 generated=41 image=256 code=-
"""

import asyncio
import logging
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snugvl.errors import SnugvlError
from snugvl.server.context import Context
from snugvl.server.errors import code_of, error_response, family_of, status_of
from snugvl.server.record import RequestRecord, begin_record
from snugvl.server.streaming import SlowClient

CLIENT_LEFT = 499
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
POLLED = {
    "/health",
    "/health/live",
    "/health/ready",
    "/memory",
    "/metrics",
}  # `top`, the page: once a second and more
LINGER_S = 2.0  # how long the rest of a refused body is read and dropped, so that its answer arrives

access = logging.getLogger("snugvl.access")
log = logging.getLogger("snugvl.server")


class Logs:
    """ASGI middleware: makes the record of a request, logs its line, and answers errors."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request, and write down how it went."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(f"req_{uuid.uuid4().hex}")
        begin_record(scope, record)
        self._context.metrics.in_flight.inc()
        try:
            await self._run(scope, receive, _AnswerSender(self._context, record, scope, send))
        finally:
            self._context.metrics.in_flight.dec()
            self._note(scope, record)

    async def _run(self, scope: Scope, receive: Receive, answer: "_AnswerSender") -> None:
        record = answer.record
        try:
            await self._app(scope, receive, answer.send)
        except SlowClient as error:
            record.error, record.left = error, True
        except Exception as error:
            record.error = error
            if not isinstance(error, SnugvlError) and status_of(error) >= 500:
                log.exception("%s failed", record.id)
            if record.status is None:
                await answer.refuse(error, receive)
        if record.left and record.status is None:
            record.status = CLIENT_LEFT

    def _note(self, scope: Scope, record: RequestRecord) -> None:
        metrics, path = self._context.metrics, _template(scope)
        method = scope["method"] if scope["method"] in METHODS else "other"
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
        access.log(
            logging.DEBUG if polled else logging.INFO,
            "%s %s %s %.1f ms id=%s key=%s%s code=%s%s",
            *(method, path, record.status, record.seconds * 1000, record.id, record.key, tokens, code, left),
        )


class _AnswerSender:
    """Sends one answer: adds the headers that every answer has, and notes its status."""

    def __init__(self, context: Context, record: RequestRecord, scope: Scope, send: Send) -> None:
        self._context = context
        self._scope = scope
        self._send = send
        self.record = record

    async def send(self, message: Message) -> None:
        """Pass one message of the answer on."""
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            name = "request-id" if family_of(self._scope["path"]) == "anthropic" else "x-request-id"
            extra = [(name.encode(), self.record.id.encode())]
            if self.record.notes.warnings:
                extra.append((b"snugvl-warning", "; ".join(self.record.notes.warnings).encode()))
            if self._context.service.health.state == "draining":
                extra.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await self._send(message)

    async def refuse(self, error: Exception, receive: Receive) -> None:
        """Answer with an error, perhaps before the body was read: then the connection ends with it."""
        response = error_response(error, self._scope)
        close = self._scope["method"] not in ("GET", "HEAD")
        headers = [*response.raw_headers, *([(b"connection", b"close")] if close else [])]
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        body: dict[str, Any] = {"type": "http.response.body", "body": response.body}
        if close:
            # Closing while the client still sends would reset the connection, and the answer with it.
            await self.send({**body, "more_body": True})
            await _discard(receive)
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
    """The path's template, such as `/v1/models/{model}`, without values from the user."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"

"""Every error as an answer, in the form of the protocol that was spoken.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}      under /v1/messages, and
                wherever else a request has the header anthropic-version
    Ollama      {"error": "message"}                                              under /api/

Pydantic's errors become one sentence and the path of one field. Any error that is not a `SnugvlError` is a
bug of ours: the client sees 500 without details, the log the traceback.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import eq, is_
from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope

from snugvl.errors import (
    CODES,
    ImageError,
    ModelNotServed,
    RequestError,
    RequestTooLarge,
    SnugvlError,
    Unauthorized,
)
from snugvl.server.fields import whole
from snugvl.server.metrics import record_of

Family = Literal["openai", "anthropic", "ollama"]

STATUS_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
}
OPENAI_TYPES = {429: "rate_limit_error", 403: "permission_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def family_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Family:
    """The protocol of a request: its path says it, or a header of Anthropic's where both have the path.

    Args:
        headers: names in small letters, as ASGI has them.
    """
    if path.startswith("/api/"):
        return "ollama"
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    return "anthropic" if any(name == b"anthropic-version" for name, _ in headers) else "openai"


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HTTPException):
        return error.status_code
    return error.http_status if isinstance(error, SnugvlError) else 500


def code_of(error: Exception) -> str | None:
    """OpenAI's `code`: one word for programs; also the cause in /metrics."""
    if isinstance(error, InvalidRequest):
        return error.code
    for code, kind in CODES.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, RequestError):
        return "invalid_value"
    status = status_of(error)
    return STATUS_CODES.get(status, "internal_error" if status >= 500 else None)


def message_of(error: Exception) -> str:
    """The message of an error: what is wrong and what to do."""
    if isinstance(error, HTTPException):
        return error.detail
    if isinstance(error, SnugvlError):
        return str(error)
    return "the server failed on this request; its log says why"


def param_of(error: Exception) -> str | None:
    """The path of the field to blame, or None."""
    if isinstance(error, ModelNotServed):
        return "model"
    return error.field if isinstance(error, RequestError | ImageError) else None


def error_body(error: Exception, family: Family, request_id: str) -> dict[str, Any]:
    """The JSON of an error; also inside of streams."""
    status, message = status_of(error), message_of(error)
    if family == "anthropic" and isinstance(error, RequestTooLarge):
        message = f"prompt is too long: {message}"  # what Anthropic's clients look for
    if family == "ollama":
        return {"error": message}
    server = "server_error" if family == "openai" else "api_error"
    default = server if status >= 500 else "invalid_request_error"
    if family == "anthropic":
        kind = ANTHROPIC_TYPES.get(status, default)
        detail = {"type": kind, "message": message}
        return {"type": "error", "error": detail, "request_id": request_id}
    kind = OPENAI_TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param_of(error), "code": code_of(error)}}


def error_response(error: Exception, scope: Scope) -> JSONResponse:
    """The answer to a request that ended with `error` before its response started."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="snugvl"'
    body = error_body(error, family_of(scope["path"], scope["headers"]), record_of(scope).id)
    response = JSONResponse(body, status_of(error), headers)
    response.headers["Cache-Control"] = "no-store"
    return response


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        error = invalid_request(error)
    elif isinstance(error, HTTPException) and error.status_code in (404, 405) and error.detail in DEFAULT:
        error = HTTPException(
            error.status_code, _no_such_route(request, error), _allowing_head(error.headers)
        )
    record_of(request.scope).error = error
    return error_response(error, request.scope)


def _allowing_head(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Headers of a 405; HEAD is answered wherever GET is."""
    allowed = set((headers or {}).get("Allow", "").split(", "))
    more = {"HEAD"} if "GET" in allowed else set()
    return {**(headers or {}), "Allow": ", ".join(sorted(allowed | more))} if more else headers


DEFAULT = ("Not Found", "Method Not Allowed")
MOST_PARTS: Final = 6  # of a path that are looked at: the longest that is served has four

_STATELESS: Final = "this server keeps nothing between requests"
_SHOWN: Final = (
    "pictures go into the request itself, as data URLs, public URLs or parts of a form (attachment:NAME)"
)
_READS: Final = "the model reads text and pictures and writes text; POST /v1/chat/completions"
# Paths of the protocols' other servers, by pattern, and what there is instead of them here.
NOT_HERE: Final = (
    ("/v1/responses/compact", "shorten input yourself, and POST it to /v1/responses"),
    ("/v1/responses/.+", f"{_STATELESS}; POST /v1/responses with the earlier items again in input"),
    ("/v1/chat/completions/.+", f"{_STATELESS}; POST /v1/chat/completions has the whole answer"),
    ("/v1/conversations(/.*)?", f"{_STATELESS}; POST /v1/responses with all items in input"),
    ("/v1/(assistants|threads)(/.*)?", f"{_STATELESS}; POST /v1/responses or /v1/chat/completions"),
    ("/v1/(files|uploads|containers|vector_stores|skills)(/.*)?", f"{_STATELESS}; {_SHOWN}"),
    ("/v1/(messages/)?batches(/.*)?", "send the requests themselves, several at once"),
    ("(/v1)?/(embeddings|moderations|rerank|score|pooling|classify)", f"{_READS} answers in any JSON schema"),
    ("/v1/(images|videos)(/.*)?", f"{_READS} answers questions about pictures"),
    ("/v1/(audio|realtime|live)(/.*)?", _READS),
    ("/v1/(fine_tuning|evals)(/.*)?", "no model is trained here; `snugvl compare` rates one"),
    ("/v1/(agents|sessions|environments|vaults|memory_stores|user_profiles)(/.*)?",
     f"{_STATELESS}; POST /v1/messages, and run the tools that it calls in your program"),
    ("/v1/vision(/.*)?", "the tasks are POST /v1/vision/caption, /ask, /scene and /detect"),
    ("/v1/complete", "POST /v1/messages"),
    ("/completion", "POST /v1/completions"),
    ("/api/embed(dings)?", "a vision-language model gives no embeddings"),
    ("/api/push", "there is no registry to push to"),
    ("/api/(create|blobs/.*)", "serve a checkpoint's folder with `snugvl serve`"),
    ("/api/copy", "give a model several names with `snugvl serve --served-model-name`"),
    ("/api/delete", "delete downloaded models with `snugvl rm`"),
)  # fmt: skip


def _no_such_route(request: Request, error: HTTPException) -> str:
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{where} is not possible; use {_either([*filter('HEAD'.__ne__, allowed.split(', '))])}"
    for pattern, instead in NOT_HERE:
        if re.fullmatch(pattern, request.url.path):
            return f"there is no {where}: {instead}"
    near = next((path for path in _near(request.url.path) if _is_served(request, path)), None)
    if near is not None:
        return f"there is no {where}; use {near[:200]} (is the base URL right?)"
    return f"there is no {where}; GET /openapi.json lists what there is"


def _near(path: str) -> Iterator[str]:
    """Paths that may be meant: without their beginning, with /v1 or Ollama's /api, in small letters."""
    parts = path.lower().strip("/").split("/")[-MOST_PARTS:]
    for start in range(len(parts)):
        tail = "/".join(("", *parts[start:]))
        yield from (tail, f"/v1{tail}")
    yield "/".join(("/api", *parts))


def _is_served(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def install(app: FastAPI) -> None:
    """Answer every error of a route in the form of its protocol."""
    for kind in (SnugvlError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)


VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_type": "unsupported_value",
    "unsupported_parameter": "unsupported_parameter",
}
SHOWN = 80  # characters of a value in a message
MOST = 1000  # of what pydantic says, which may quote the request
LOOKED_AT = 50  # errors; lists stop at the first of theirs, so that there are hardly ever as many

Loc = tuple[str | int, ...]


class InvalidRequest(RequestError):
    """A request that doesn't have the form it should. `code`: OpenAI's word for how."""

    def __init__(self, message: str, *, field: str | None, code: str) -> None:
        super().__init__(message, field=field)
        self.code = code


def invalid_request(error: RequestValidationError) -> InvalidRequest:
    """The error that comes nearest to what was meant: of a union's, the one deepest in the body."""
    found = [
        ((*_path(entry, error.body), *entry.get("ctx", {}).get("unsupported", ())), entry)
        for entry in error.errors()[:LOOKED_AT]
    ]
    path, entry = max(found, key=lambda pair: len(pair[0]))
    if entry["type"] == "union_tag_not_found":
        path = (*path, _tag_name(entry["ctx"]))
    field = _path_text(path) or None
    return InvalidRequest(_message(field, entry, error.body), field=field, code=_code(entry["type"]))


def _code(kind: str) -> str:
    if kind.endswith("_type"):
        return "invalid_type"
    return VALIDATION_CODES.get(kind, "invalid_value")


def _message(param: str | None, entry: Mapping[str, Any], body: object) -> str:
    kind, value = entry["type"], entry.get("input")
    if param is None:
        if kind == "missing":
            return "the request has no body; send a JSON object"
        if isinstance(body, bytes):
            return "the body is not marked as JSON; send it with Content-Type: application/json"
        must = _must(kind, entry.get("ctx") or {})
        return f"the body must {must}" if must else f"the body is wrong: {entry['msg']}"
    if kind in ("missing", "union_tag_not_found"):
        return f"{param} is missing"
    if kind == "extra_forbidden":
        return f"{param} is not supported; leave it out"
    if kind == "union_tag_invalid":
        return _unknown_kind(param, entry["ctx"])
    if kind == "unsupported_parameter":
        return f"{param} is not supported: {entry['msg']}"
    text = str(entry["msg"]).removeprefix("Value error, ")
    small = isinstance(value, str | int | float | bool | None) and not (
        isinstance(value, str) and len(value) > SHOWN  # before a copy is made to be looked at
    )
    shown = repr(value) if small else ""
    shown = _IN_JSON.get(shown, shown) if len(shown) <= SHOWN else ""
    if must := _must(kind, entry.get("ctx") or {}):
        return f"{param} must {must}{f', not {shown}' if shown and must != EMPTY else ''}"
    text = text if len(text) <= MOST else f"{text[:MOST]}…"
    return f"{param}: {text}{f', got {shown}' if shown else ''}"


EMPTY: Final = "not be empty"
_IN_JSON: Final = {"None": "null", "True": "true", "False": "false"}
# What a value must be, by pydantic's kinds of errors; in braces what its context says.
_MUST: Final[Mapping[str, str]] = {
    "string": "be a string",
    "int": "be an integer",
    "float": "be a number",
    "bool": "be a boolean",
    "list": "be a list",
    "tuple": "be a list",
    "dict": "be an object",
    "model": "be an object",
    "mapping": "be an object",
    "finite_number": "be a finite number",
    "literal_error": "be {expected}",
    "less_than_equal": "be at most {le}",
    "less_than": "be less than {lt}",
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be more than {gt}",
    "too_short": "have at least {min_length} in it",
    "too_long": "have at most {max_length} in it",
    "string_too_short": "have at least {min_length} characters",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match {pattern}",
}


def _must(kind: str, context: Mapping[str, Any]) -> str:
    """The end of `FIELD must …`; empty where pydantic's own words are used."""
    least = context.get("min_length")
    if least == 1:
        return EMPTY
    stem = re.sub(r"_(attributes_type|type|parsing|from_float|parsing_size)$", "", kind)
    words = _MUST.get(kind) or _MUST.get(stem, "")
    return words.format_map({name: whole(value) for name, value in context.items()})


def _either(names: Sequence[str]) -> str:
    """Names as text: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _tag_name(details: Mapping[str, Any]) -> str:
    """The name of the field that tells an object's kinds apart, such as `type` or `role`."""
    name = str(details["discriminator"]).strip("'")
    return name if name.isidentifier() else "type"  # a function tells them apart


def _unknown_kind(param: str, details: Mapping[str, Any]) -> str:
    """The message about an object whose `type` (or another discriminator) is unknown."""
    named = _tag_name(details)
    tag, known = str(details["tag"])[:SHOWN], str(details["expected_tags"])
    types = [each for each in known.split(", ") if each[1:2] != "("]  # others are tags of ours
    pages = ", and of a PDF its pages as pictures" if tag in ("file", "input_file") else ""
    return f"{param}: {named} {tag!r} is not supported; use {_either(types)}{pages}"


def _path(entry: Mapping[str, Any], body: object) -> Loc:
    """The place of the error, without the parts that pydantic adds for members of a union."""
    place, *rest = entry["loc"]
    loc = tuple(rest)
    if place != "body":
        return loc
    if entry["type"] == "missing" and loc:
        return (*_best_reading(loc[:-1], body, entry.get("input")), loc[-1])
    return _best_reading(loc, body, entry.get("input"))


def _best_reading(loc: Loc, body: object, wanted: object) -> Loc:
    """The way to read `loc` that leads to the value `wanted`."""
    readings = list(_readings(loc, body))
    for same in (is_, eq):
        for path, value in readings:
            if same(value, wanted):
                return path
    # A value that a validator replaced is found nowhere: then the reading that keeps most is best.
    # One that was read under another name is not there at all: then it is the field that it was read as.
    return max((path for path, _ in readings), key=len) or loc[:1]


def _readings(loc: Loc, value: object) -> Iterator[tuple[Loc, object]]:
    """Every way to read `loc` in `value`, each part either a step down or a name of a union's member."""
    if not loc:
        yield (), value
        return
    part, rest = loc[0], loc[1:]
    if (isinstance(value, Mapping) and part in value) or (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and isinstance(part, int)
        and part < len(value)
    ):
        below = value[part]  # type: ignore[index]  # an int for a sequence, a key for a mapping
        for path, found in _readings(rest, below):
            yield (part, *path), found
    yield from _readings(rest, value)


def _path_text(path: Loc) -> str:
    """A path as text: `messages[0].content`."""
    text = ""
    for part in path:
        text += (
            f"[{part}]" if isinstance(part, int) else f".{part if len(part) <= SHOWN else part[:SHOWN] + '…'}"
        )
    return text.lstrip(".")

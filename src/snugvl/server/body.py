"""Bodies of requests, JSON and forms, checked more strictly than their parsers do.

A large body of JSON is read and checked against its schema in a thread of its own, one at a time, so that it
stops no other stream; and its values are counted before the parser makes objects of them, by the commas and
brackets outside of strings.

multipart/form-data is another way to send a JSON request, together with the files that it refers to. The
field `request` (or `payload_json`) holds the JSON; every other field is a file, which the JSON refers to by
the field's name:

    curl URL/v1/chat/completions -F cat=@cat.jpg -F 'request={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "attachment:cat"}}]}]}'
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, Headers, MutableHeaders, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from snugvl.errors import RequestError
from snugvl.inputs.looks_like import media_type
from snugvl.server.context import context_of
from snugvl.server.errors import InvalidRequest
from snugvl.server.metrics import RequestNotes, record_of

if TYPE_CHECKING:
    import numpy as np

MAX_FORM_FILES = 64  # of one request whose pictures come beside its JSON
MAX_DEPTH = 100  # of arrays and objects in each other; JSON schemas of real tools need about 20
MAX_VALUES = 300_000  # in all; a prompt of token ids that fills the longest context has 262,144


MAX_DIGITS: Final = 400  # of a whole number; the largest float has 309
LARGE_BYTES: Final = 1 << 16  # what is smaller is read where it is
_PIECE_BYTES: Final = 1 << 20  # counted at a time
_PARSED: Final = "snugvl.json"  # where the value of a body is, in the scope of its request
_LARGE: Final = "snugvl.large"  # there, whether the body is
_THREAD: Final = ThreadPoolExecutor(1, "snugvl-json")
_QUOTE, _BACKSLASH = 0x22, 0x5C
_SEPARATORS: Final = b",[{"

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route that takes the value that was parsed as the body came in, instead of parsing it again.

    FastAPI is given an object of the body's schema: it would check a large body in the event loop, and knows
    no notes.
    """

    def get_route_handler(self) -> Handler:
        """FastAPI's own handler, with a request that has the parsed value."""
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            scope, field = request.scope, self.body_field
            if scope.get(_PARSED) is not None and field is not None and not self._embed_body_fields:
                kind, notes = cast("type[BaseModel]", field.field_info.annotation), record_of(scope).notes
                check = partial(validated, kind, scope[_PARSED], notes)
                scope[_PARSED] = await _in_thread(check) if scope[_LARGE] else check()
            return await handle(_Parsed(scope, request.receive))

        return parsed


class _Parsed(Request):
    async def json(self) -> Any:
        # A body that wasn't called JSON, where a route reads it all the same.
        return self.scope[_PARSED] if _PARSED in self.scope else parse_json(await self.body())


async def read_json(data: bytes, scope: Any) -> None:
    """Parse a body for the routes of `scope`, a large one in the thread.

    Raises:
        InvalidRequest: as `parse_json`.
    """
    scope[_LARGE] = len(data) >= LARGE_BYTES
    parse = partial(parse_json, data)
    scope[_PARSED] = await _in_thread(parse) if scope[_LARGE] else parse()


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def validated(
    kind: type[ModelT], value: object, notes: RequestNotes, *, strict: bool | None = None
) -> ModelT:
    """The body as an object of a schema; `notes` gets warnings of ignored fields.

    Raises:
        RequestValidationError: it doesn't follow the schema; the place of each error begins with "body".
    """
    try:
        return kind.model_validate(value, strict=strict, context=notes)
    except ValidationError as error:
        errors = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=value) from None


def count_values(data: bytes) -> int:
    """Approximate number of values of JSON: those between commas, arrays and objects, but no keys.

    Commas within strings don't count. Takes a second for 100 MB, without Python's lock for most of it.
    """
    import numpy as np  # which nothing else in this process needs

    count, inside, escaped = 1, 0, False  # inside: whether a string is open; escaped: a backslash is
    for start in range(0, len(data), _PIECE_BYTES):
        piece = np.frombuffer(data, np.uint8, min(_PIECE_BYTES, len(data) - start), start)
        quotes, escaped = _quotes(piece, escaped)
        opened = np.cumsum(quotes, dtype=np.int32) + inside
        outside = (opened & 1) == 0
        inside = int(opened[-1]) & 1
        count += sum(int(np.count_nonzero((piece == mark) & outside)) for mark in _SEPARATORS)
        if count > MAX_VALUES:
            break
    return count


def _quotes(piece: "np.ndarray[Any, Any]", escaped: bool) -> "tuple[np.ndarray[Any, Any], bool]":
    """Quotes that nothing escapes, by byte, and whether the first byte of the next piece is escaped."""
    import numpy as np

    quotes = piece == _QUOTE
    slashes = np.flatnonzero(piece == _BACKSLASH)
    if escaped:
        quotes[0] = False
    if not len(slashes):
        return quotes, False
    begins = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)  # of runs of backslashes
    firsts = slashes[begins]
    lengths = np.diff(np.append(begins, len(slashes)))
    lengths = lengths - ((firsts == 0) & escaped)  # that backslash was escaped itself
    after = slashes[np.append(begins[1:], len(slashes)) - 1] + 1
    odd = after[lengths % 2 == 1]
    quotes[odd[odd < len(piece)]] = False
    return quotes, bool(len(odd) and odd[-1] == len(piece))


def parse_json(data: bytes) -> object:
    """The value of a body.

    Raises:
        InvalidRequest: not UTF-8, not JSON, NaN or infinity, a key twice, half a surrogate pair, nested too
            deep, or of too many values.
    """
    if len(data) > MAX_VALUES and count_values(data) > MAX_VALUES:
        raise _wrong(f"the body holds more than {MAX_VALUES:,} values")
    try:
        text = data.decode("utf-8-sig")  # some Windows programs write a byte-order mark first
    except UnicodeDecodeError as error:
        kind = media_type(data)
        if kind.startswith(("image/", "video/")):
            raise _wrong(
                f"the body is a file ({kind}), not JSON; send it to /v1/vision/caption, for one, as a form: "
                "curl -F image=@FILE, or in base64 within the JSON"
            ) from None
        raise _wrong(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _wrong(f"the body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise _too_deep() from None
    _check(value)
    return value


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # their time grows with the square of their length
        raise _wrong(f"the body holds a number of more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise _wrong(f"the body holds {name}, which is not JSON; numbers must be finite")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _wrong(f"the body holds {digits[:40]}, which is too large; numbers must be finite")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _wrong(f"the key {key[:80]!r} is in one object of the body twice", field=key)
            seen.add(key)
    return values


def _check(value: object) -> None:
    """Check depth, number and characters of everything in `value`, without recursion."""
    level: list[object] = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_characters(item)
        if not below:
            return
        count += len(below)
        if count > MAX_VALUES:
            raise _wrong(f"the body holds more than {MAX_VALUES:,} values")
        level = below
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep()


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong("a string of the body holds half a surrogate pair") from None


def _too_deep() -> InvalidRequest:
    return _wrong(f"the body is nested deeper than {MAX_DEPTH} levels")


def _wrong(message: str, *, field: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, field=field, code="invalid_json")


# What the parser has to say of a form, our answer says.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


FORM: Final = "multipart/form-data"


def is_form(request: Request) -> bool:
    """Whether the body of a request is a form that may hold files."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == FORM


@asynccontextmanager
async def form_of(request: Request, *, max_files: int, max_fields: int) -> AsyncIterator[FormData]:
    """The form in a request's body; its files are closed at the end of the block.

    Raises:
        InvalidRequest: it is malformed, has too many parts, or text that is not UTF-8.
    """
    limit = context_of(request).settings.max_body_bytes
    try:
        async with aclosing(request.stream()) as stream:
            parser = _FormParser(
                request.headers, stream, max_files=max_files, max_fields=max_fields, max_part_size=limit
            )
            form = await parser.parse()
    except (MultiPartException, FormParserError) as error:  # the second by older Starlettes, as 0.46
        why = getattr(error, "message", error)
        raise InvalidRequest(f"the form can't be read: {why}", field=None, code="invalid_form") from None
    try:
        yield form
    finally:
        await form.close()


async def bytes_of(file: UploadFile) -> bytes:
    """The content of a file of a form, of which the form keeps nothing: else it would be there twice."""
    content: bytes = await file.read()
    await file.close()
    return content


class _FormParser(MultiPartParser):
    """Starlette's, which takes what is not UTF-8 for Latin-1, and believes a form about its charset."""

    def on_headers_finished(self) -> None:
        self._charset = "utf-8"
        super().on_headers_finished()

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"{part.field_name} is not UTF-8: {error.reason} at byte {error.start}; "
                    "a picture needs a file name: -F image=@FILE with curl",
                    field=part.field_name,
                    code="invalid_form",
                ) from None
        super().on_part_end()


NAMES = ("request", "payload_json")
_KEY = "snugvl.attachments"


def multipart_document(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra=` of a route: the form that it takes beside JSON."""
    form = {
        "type": "object",
        "description": "The JSON request, and files that it refers to as attachment:NAME.",
        "properties": {"request": {"$ref": f"#/components/schemas/{model.__name__}"}},
        "additionalProperties": {"type": "string", "format": "binary"},
        "required": ["request"],
    }
    return {"requestBody": {"content": {FORM: {"schema": form}}}}


class UploadRoute(JsonRoute):
    """A route with a JSON body that takes the same JSON in a multipart upload."""

    def get_route_handler(self) -> Handler:
        """The handler of JSON requests, with uploads turned into such."""
        handle_json = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handle_json(await _unpack(request) if is_form(request) else request)

        return handle


def attachments_of(request: Request) -> Mapping[str, bytes]:
    """Files that came with a request, by name."""
    files: Mapping[str, bytes] = request.scope.get(_KEY, {})
    return files


async def _unpack(request: Request) -> Request:
    """The JSON request inside a multipart one.

    Raises:
        RequestError: no JSON, two of them, or two files of one name.
    """
    content: dict[str, bytes] = {}
    async with form_of(request, max_files=MAX_FORM_FILES, max_fields=MAX_FORM_FILES) as form:
        for name, value in form.multi_items():
            if name in content:
                raise RequestError(f"the form has two parts named {name!r}; names must differ", field=name)
            content[name] = await bytes_of(value) if isinstance(value, UploadFile) else value.encode()
    given = [name for name in NAMES if name in content]
    if len(given) != 1:
        raise RequestError(
            f"the form has {len(given) or 'no'} JSON parts; send the request once, in a part named 'request'",
            field="request",
        )
    body = content.pop(given[0])
    unpacked = _json_request(request, body[:1], content)
    await read_json(body, unpacked.scope)  # as `receiving.py` does with other requests
    return unpacked


def _json_request(request: Request, body: bytes, files: Mapping[str, bytes]) -> Request:
    headers = MutableHeaders(raw=list(Headers(scope=request.scope).raw))
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(body))
    scope = {**request.scope, "headers": headers.raw, _KEY: files}
    return Request(scope, _replay(body, request.receive))


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receives `body` once, then whatever the connection has to say."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message

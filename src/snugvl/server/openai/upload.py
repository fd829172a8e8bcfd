"""multipart/form-data is another way to send a JSON request, together with the files that it refers to.

The field `request` (or
`payload_json`) holds the JSON; every other field is a file, which the JSON refers to by the field's name:

    curl URL/v1/chat/completions -F cat=@cat.jpg -F 'request={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "attachment:cat"}}]}]}'
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from snugvl.errors import RequestError
from snugvl.server.body import MAX_FORM_FILES, Handler, JsonRoute, bytes_of, form_of, read_json

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
    return {"requestBody": {"content": {"multipart/form-data": {"schema": form}}}}


class UploadRoute(JsonRoute):
    """A route with a JSON body that takes the same JSON in a multipart upload."""

    def get_route_handler(self) -> Handler:
        """The handler of JSON requests, with uploads turned into such."""
        handle_json = super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            return await handle_json(await _unpack(request) if kind == "multipart/form-data" else request)

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

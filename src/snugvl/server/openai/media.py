"""Pictures and videos of one request: URLs, or files that were uploaded with it ("attachment:NAME").

multipart/form-data is another way to send a JSON request together with its files. The field `request` (or
`payload_json`) holds the JSON; every other field is a file, which the JSON refers to by the field's name:

    curl URL/v1/chat/completions -F cat=@cat.jpg -F 'request={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "attachment:cat"}}]}]}'
"""

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from snugvl.core.messages import Picture, Video
from snugvl.errors import RequestError
from snugvl.server.body import MAX_FORM_FILES, Handler, JsonRoute, bytes_of, form_of, read_json
from snugvl.server.fields import WHOLE
from snugvl.server.intake.intake import Intake

Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1, le=2**53), WHOLE]
PREFIX = "attachment:"


class MediaSource:
    """Fetches what a request refers to. `attachments`: files of a multipart upload by name."""

    def __init__(
        self, intake: Intake, attachments: Mapping[str, bytes], max_pixels: int | None = None
    ) -> None:
        """`max_pixels`: limit of every picture of the request, below the checkpoint's own."""
        self._intake = intake
        self.check_all = intake.check_all
        self._max_pixels = max_pixels
        self._attachments = attachments
        self._used: set[str] = set()

    async def picture(
        self, url: str, detail: Detail | None, field: str, max_pixels: int | None = None
    ) -> Picture:
        """The picture behind a URL; `field` names the URL in errors. `max_pixels`: limit of this one
        alone."""
        wanted = "high" if detail == "original" else detail
        if url.startswith(PREFIX):
            found = await self._intake.picture_bytes(self._file(url, field), detail=wanted, field=field)
        else:
            found = await self._intake.picture(url, detail=wanted, field=field)
        given = (found.max_pixels, self._max_pixels, max_pixels)
        return replace(found, max_pixels=min((limit for limit in given if limit is not None), default=None))

    async def video(self, url: str | list[str], fps: float | None, field: str) -> Video:
        """The video behind a URL, or made of the frames behind several."""
        if isinstance(url, str) and url.startswith(PREFIX):
            return await self._intake.video_bytes(self._file(url, field), fps=fps, field=field)
        if isinstance(url, str):
            return await self._intake.video(url, fps=fps, field=field)
        frames = [self._as_data_url(frame, f"{field}[{index}]") for index, frame in enumerate(url)]
        return await self._intake.video(frames, fps=fps, field=field)

    def check_all_used(self) -> None:
        """Refuse files that were uploaded but that nothing refers to.

        Raises:
            RequestError: names one of them.
        """
        for name in self._attachments:
            if name not in self._used:
                raise RequestError(
                    f"the file {name!r} was uploaded, but nothing refers to it as {PREFIX + name!r}",
                    field=name,
                )

    def _as_data_url(self, url: str, field: str) -> str:
        """The URL itself, or a data URL of the attachment that it names."""
        if not url.startswith(PREFIX):
            return url
        return "data:application/octet-stream;base64," + base64.b64encode(self._file(url, field)).decode()

    def _file(self, url: str, field: str) -> bytes:
        name = url.removeprefix(PREFIX)
        if name not in self._attachments:
            known = ", ".join(map(repr, self._attachments)) or "none; send multipart/form-data"
            raise RequestError(f"there is no attachment {name!r} (uploaded: {known})", field=field)
        self._used.add(name)
        return self._attachments[name]


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

"""The two ways to send a picture to a task: its URL in a JSON body, or the file itself in a form.

curl -d '{"image": "https://…"}' -H 'Content-Type: application/json' …
curl -F image=@cat.jpg -F question='What colour is the cat?' …
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from snugvl.backends.protocol import Picture
from snugvl.errors import RequestError
from snugvl.server.context import Context
from snugvl.server.forms import form_of
from snugvl.server.together import together
from snugvl.server.vision.schemas import MAX_IMAGES, MAX_OBJECTS, TaskOptions

MAX_FIELDS = 256
FORM = "multipart/form-data"
LISTS = ("objects",)  # form fields that may be given several times, or with commas

OptionsT = TypeVar("OptionsT", bound=TaskOptions)


@dataclass(frozen=True, slots=True)
class Source:
    """A picture that is still to be fetched or decoded: a URL, or a file's bytes."""

    value: str | bytes
    field: str
    name: str = "image"


@dataclass(frozen=True, slots=True)
class Received(Generic[OptionsT]):
    """A task's request, whichever way it came."""

    options: OptionsT
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Bodies(Generic[OptionsT]):
    """The JSON body of a task (`request`) and the fields of its form (`options`)."""

    request: type[OptionsT]
    options: type[OptionsT]

    async def read(self, http: Request) -> Received[OptionsT]:
        """The request in the body of `http`.

        Raises:
            RequestError, RequestValidationError: it is neither of the two, or a field of it is wrong.
        """
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() == FORM:
            return await self._read_form(http)
        return self._read_json(await http.json())

    def openapi(self) -> dict[str, Any]:
        """The `requestBody` of the OpenAPI document."""
        files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
        form = self.options.model_json_schema()
        form["properties"] = {**form["properties"], "image": files}
        form["required"] = [*form.get("required", []), "image"]
        content = {"application/json": {"schema": self.request.model_json_schema()}, FORM: {"schema": form}}
        return {"requestBody": {"required": True, "content": content}}

    def _read_json(self, body: object) -> Received[OptionsT]:
        options = _validated(self.request, body, strict=True)
        urls = options.model_dump(include={"image", "images"})
        one, several = urls.get("image"), urls.get("images", [])
        if one is not None and several:
            raise RequestError("send image or images, not both", field="images")
        if one is not None:
            return Received(options, (Source(one, "image"),))
        if not several:
            raise RequestError("image is missing", field="image")
        return Received(options, tuple(Source(url, f"images[{index}]") for index, url in enumerate(several)))

    async def _read_form(self, http: Request) -> Received[OptionsT]:
        async with form_of(http, max_files=MAX_IMAGES, max_fields=MAX_FIELDS) as form:
            sources = [source async for source in _sources(form)]
            options = _validated(self.options, _fields(form), strict=False)
        if not sources:
            raise RequestError("image is missing: send it as a file, -F image=@FILE with curl", field="image")
        return Received(options, tuple(sources))


async def pictures(context: Context, sources: tuple[Source, ...]) -> list[Picture]:
    """The pictures behind `sources`, fetched and decoded side by side.

    Raises:
        RequestError, ImageError: one of them can't be had.
    """
    return await together(_picture(context, source) for source in sources)


async def picture(context: Context, sources: tuple[Source, ...]) -> Picture:
    """The picture of a task that looks at one.

    Raises:
        RequestError: there are several.
    """
    if len(sources) > 1:
        raise RequestError(
            f"this task looks at one image, not {len(sources)}; /v1/vision/ask takes several", field="image"
        )
    return await _picture(context, sources[0])


async def _picture(context: Context, source: Source) -> Picture:
    if isinstance(source.value, bytes):
        return await context.intake.picture_bytes(source.value, field=source.field)
    return await context.intake.picture(source.value, field=source.field)


async def _sources(form: FormData) -> AsyncIterator[Source]:
    """The pictures of a form: files, or text fields with URLs."""
    entries = form.getlist("image")
    for index, entry in enumerate(entries):
        field = "image" if len(entries) == 1 else f"image[{index}]"
        if isinstance(entry, UploadFile):
            yield Source(await entry.read(), field, entry.filename or "image")
        else:
            yield Source(entry, field)


def _fields(form: FormData) -> dict[str, object]:
    """Everything else in a form."""
    fields: dict[str, object] = {}
    for name, value in form.multi_items():
        if name == "image":
            continue
        if isinstance(value, UploadFile):
            raise RequestError(f"{name} is a file; only image takes files", field=name)
        if name in LISTS:
            if value.count(",") >= MAX_OBJECTS:
                raise RequestError(
                    f"{name} has {value.count(',') + 1:,} names; at most {MAX_OBJECTS} are taken", field=name
                )
            names = fields.setdefault(name, [])
            assert isinstance(names, list)
            names += [part.strip() for part in value.split(",")]
        elif name in fields:
            raise RequestError(f"the form has {name} twice", field=name)
        else:
            fields[name] = value
    return fields


def _validated(kind: type[OptionsT], body: object, *, strict: bool) -> OptionsT:
    try:
        return kind.model_validate(body, strict=strict)
    except ValidationError as error:
        errors = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=body) from None

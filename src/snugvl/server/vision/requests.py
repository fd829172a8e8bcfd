"""What the four tasks take and give over HTTP.

Each task has a class of options, which forms carry as fields beside their files, and a request, which adds
the picture's URL for a JSON body:

    curl -d '{"image": "https://…"}' -H 'Content-Type: application/json' …
    curl -F image=@cat.jpg -F question='What colour is the cat?' …
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from snugvl.core.messages import Capabilities, Picture, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.server.body import bytes_of, form_of
from snugvl.server.context import Context, context_of
from snugvl.server.fields import WHOLE, Strict
from snugvl.server.together import together
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Answer, Caption, Detections, Scene

MAX_IMAGES = 64
MAX_OBJECTS = 200
PICTURE = "data URL or public http(s) URL of a picture"
PICTURE_OR_VIDEO = f"{PICTURE}, or of a video where the model takes videos"
VIDEO = "whether an animation is shown as a video, all of it; without, its first frame is"
STREAM = 'whether to answer with events: {"delta": "…"} for each piece of text, then {"result": {…}}'


class TaskOptions(Strict):
    """What every task takes."""

    model: str | None = Field(default=None, description="a name this server serves; its first one without")
    max_pixels: Annotated[int, Field(ge=1, le=2**53), WHOLE] | None = Field(
        default=None,
        description="the picture is scaled down to this many before it is seen",
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        default=None, description="longest answer, in tokens; the task's own limit without"
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy: the same answer every time")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(
        default=None, description="same seed, same answer"
    )

    def sampling(self) -> SamplingParams:
        """How to choose tokens."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


class CaptionOptions(TaskOptions):
    """How to describe a picture."""

    detail: Detail = Field(default="short", description="one sentence, or a paragraph")
    video: bool = Field(default=False, description=VIDEO)
    stream: bool = Field(default=False, description=STREAM)


class CaptionRequest(CaptionOptions):
    """A picture to describe."""

    image: str = Field(description=PICTURE_OR_VIDEO)


class AskOptions(TaskOptions):
    """What to ask about pictures."""

    question: str = Field(min_length=1)
    video: bool = Field(default=False, description=VIDEO)
    stream: bool = Field(default=False, description=STREAM)


class AskRequest(AskOptions):
    """A question about one picture (`image`), or about several together (`images`)."""

    image: str | None = Field(default=None, description=PICTURE_OR_VIDEO)
    images: list[str] = Field(
        default_factory=list, max_length=MAX_IMAGES, description="several, in the order they are shown"
    )


class SceneOptions(TaskOptions):
    """How to analyse a picture."""

    video: bool = Field(default=False, description=VIDEO)


class SceneRequest(SceneOptions):
    """A picture to analyse."""

    image: str = Field(description=PICTURE_OR_VIDEO)


class DetectOptions(TaskOptions):
    """What to find in a picture."""

    objects: list[str] = Field(
        default_factory=list, max_length=MAX_OBJECTS, description="names of what to find; everything without"
    )
    format: Literal["json", "coco", "png"] = Field(
        default="json", description='"coco": a COCO data set; "png": the picture with the boxes drawn on it'
    )


class DetectRequest(DetectOptions):
    """A picture to find things in."""

    image: str = Field(description=PICTURE)


class CaptionResponse(Caption):
    """A description of a picture."""

    model: str


class AnswerResponse(Answer):
    """An answer about pictures."""

    model: str


class SceneResponse(Scene):
    """What is in a picture and how it hangs together."""

    model: str


class DetectionsResponse(Detections):
    """What was found where, in pixels of the picture as it was sent, upright."""

    model: str


MAX_FIELDS = 256
FORM = "multipart/form-data"
LISTS = ("objects",)  # form fields that may be given several times, or with commas

OptionsT = TypeVar("OptionsT", bound=TaskOptions)


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture that is still to be fetched or decoded: a URL, or a file's bytes."""

    value: str | bytes
    field: str
    name: str = "image"


@dataclass(frozen=True, slots=True)
class Received(Generic[OptionsT]):
    """A task's request, whichever way it came."""

    context: Context
    options: OptionsT
    sources: tuple[PictureSource, ...]

    @property
    def model(self) -> str:
        """The name to answer with; raises `ModelNotServed` where it isn't served."""
        return self.context.check_model(self.options.model)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the loaded model; raises `EngineUnavailable` where it isn't ready."""
        return self.context.capabilities

    async def several(self) -> list[Picture | Video]:
        """The pictures and videos, fetched and decoded side by side.

        Raises:
            RequestError, ImageError: one of them can't be had.
        """
        return await together(self._decode(source) for source in self.sources)

    async def one(self) -> Picture | Video:
        """The picture or video of a task that looks at one.

        Raises:
            RequestError, ImageError: there are several, or it can't be had.
        """
        return await self._decode(self._only())

    async def picture(self) -> Picture:
        """The picture of a task that looks at one, and at no video.

        Raises:
            RequestError, ImageError: there are several, or it can't be had.
        """
        source, intake = self._only(), self.context.intake
        if isinstance(source.value, bytes):
            return await intake.picture_bytes(source.value, field=source.field)
        return await intake.picture(source.value, field=source.field)

    async def _decode(self, source: PictureSource) -> Picture | Video:
        return await self.context.intake.picture_or_video(
            source.value,
            videos=self.capabilities.video,
            field=source.field,
            frames=getattr(self.options, "video", False),
        )

    def _only(self) -> PictureSource:
        if len(self.sources) > 1:
            raise RequestError(
                f"this task looks at one image, not {len(self.sources)}; /v1/vision/ask takes several",
                field="image",
            )
        return self.sources[0]


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
            options, sources = await self._read_form(http)
        else:
            options, sources = self._read_json(await http.json())
        return Received(context_of(http), options, tuple(sources))

    def openapi(self) -> dict[str, Any]:
        """The `requestBody` of the OpenAPI document."""
        files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
        form = self.options.model_json_schema()
        form["properties"] = {**form["properties"], "image": files}
        form["required"] = [*form.get("required", []), "image"]
        content = {"application/json": {"schema": self.request.model_json_schema()}, FORM: {"schema": form}}
        return {"requestBody": {"required": True, "content": content}}

    def _read_json(self, body: object) -> tuple[OptionsT, list[PictureSource]]:
        options = _validate(self.request, body, strict=True)
        urls = options.model_dump(include={"image", "images"})
        one, several = urls.get("image"), urls.get("images", [])
        if one is not None and several:
            raise RequestError("send image or images, not both", field="images")
        if one is not None:
            return options, [PictureSource(one, "image")]
        if not several:
            raise RequestError("image is missing", field="image")
        return options, [PictureSource(url, f"images[{index}]") for index, url in enumerate(several)]

    async def _read_form(self, http: Request) -> tuple[OptionsT, list[PictureSource]]:
        async with form_of(http, max_files=MAX_IMAGES, max_fields=MAX_FIELDS) as form:
            sources = [source async for source in _sources(form)]
            options = _validate(self.options, _fields(form), strict=False)
        if not sources:
            raise RequestError("image is missing: send it as a file, -F image=@FILE with curl", field="image")
        return options, sources


async def _sources(form: FormData) -> AsyncIterator[PictureSource]:
    """The pictures of a form: files, or text fields with URLs."""
    entries = form.getlist("image")
    for index, entry in enumerate(entries):
        field = "image" if len(entries) == 1 else f"image[{index}]"
        if isinstance(entry, UploadFile):
            yield PictureSource(await bytes_of(entry), field, entry.filename or "image")
        else:
            yield PictureSource(entry, field)


def _fields(form: FormData) -> dict[str, object]:
    """Everything else in a form."""
    fields: dict[str, object] = {}
    for name, value in form.multi_items():
        if name == "image":
            continue
        if isinstance(value, UploadFile):
            raise RequestError(
                f"{name} is a file; the field of the picture is called image: -F image=@FILE", field=name
            )
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


def _validate(kind: type[OptionsT], body: object, *, strict: bool) -> OptionsT:
    try:
        return kind.model_validate(body, strict=strict)
    except ValidationError as error:
        errors = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=body) from None

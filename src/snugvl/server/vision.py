"""POST /v1/vision/caption, ask, scene, detect: a picture in, a typed result out, complete or as events.

Each task has a class of options, which forms carry as fields beside their files, and a request, which adds
the picture's URL for a JSON body:

    curl -d '{"image": "https://…"}' -H 'Content-Type: application/json' …
    curl -F image=@cat.jpg -F question='What colour is the cat?' …
"""

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter
from PIL.Image import Image
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Capabilities, Picture, Request, Usage, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import OutputError, RequestError
from snugvl.inputs.tools.parser import TextPiece
from snugvl.server.body import FORM, JsonRoute, bytes_of, form_of, is_form, validated
from snugvl.server.context import Context, context_of
from snugvl.server.fields import WHOLE, Strict
from snugvl.server.generation import GeneratedAnswer, read_answer
from snugvl.server.media.loading import Kind, MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes, RequestRecord, record_of
from snugvl.server.streaming import Event, compact, event_stream, events_document
from snugvl.tasks import ask, detect, export, results, scene
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Caption, Detections, Reply, Scene

MAX_IMAGES = 64
MAX_OBJECTS = 200
PICTURE = "data URL or public http(s) URL of a picture"
PICTURE_OR_VIDEO = f"{PICTURE}, or of a video where the model takes videos"
VIDEO = "whether an animation is shown as a video, all of it; without, its first frame is"
STREAM = 'whether to answer with events: {"delta": "…"} for each piece of text, then {"result": {…}}'


class TaskOptions(Strict):
    """Options that every task takes."""

    model: str | None = Field(default=None, description="a name this server serves; its first one without")
    max_pixels: Annotated[int, Field(ge=1, le=2**53), WHOLE] | None = Field(
        default=None, description="the picture is scaled down to this many before it is seen"
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        default=None, description="longest answer, in tokens; the task's own limit without"
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy: the same answer every time")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(
        default=None, description="same seed, same answer"
    )

    def sampling(self) -> SamplingParams:
        """The sampling parameters of these options."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


class CaptionOptions(TaskOptions):
    """Options of describing a picture."""

    detail: Detail = Field(default="short", description="one sentence, or a paragraph")
    video: bool = Field(default=False, description=VIDEO)
    stream: bool = Field(default=False, description=STREAM)


class CaptionRequest(CaptionOptions):
    """A picture to describe."""

    image: str = Field(description=PICTURE_OR_VIDEO)


class AskOptions(TaskOptions):
    """Options of a question about pictures."""

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
    """Options of analysing a picture."""

    video: bool = Field(default=False, description=VIDEO)


class SceneRequest(SceneOptions):
    """A picture to analyse."""

    image: str = Field(description=PICTURE_OR_VIDEO)


class DetectOptions(TaskOptions):
    """Options of finding objects in a picture."""

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


class AnswerResponse(results.Answer):
    """An answer about pictures."""

    model: str


class SceneResponse(Scene):
    """An analysis of a picture: its objects and their relations."""

    model: str


class DetectionsResponse(Detections):
    """Objects found, with boxes in pixels of the picture as it was sent, upright."""

    model: str


MAX_FIELDS = 256
LISTS = ("objects",)  # form fields that may be given several times, or with commas

OptionsT = TypeVar("OptionsT", bound=TaskOptions)
ResultT = TypeVar("ResultT", bound=BaseModel)


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
    record: RequestRecord
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

    @property
    def given(self) -> dict[str, Any]:
        """Arguments with which the request of every task is made."""
        options = self.options
        return {
            "capabilities": self.capabilities,
            "sampling": options.sampling(),
            "max_pixels": options.max_pixels,
        }

    def finish(
        self, kind: Callable[..., ResultT], read: Callable[[Reply], BaseModel]
    ) -> Callable[[Reply], ResultT]:
        """The function that makes a reply's response: the result that `read` finds, with the model's name."""
        name = self.model
        return lambda reply: kind(model=name, **dict(read(reply)))

    async def several(self) -> list[Picture | Video]:
        """The pictures and videos, loaded together.

        Raises:
            RequestError, ImageError: one of them can't be loaded.
        """
        frames = getattr(self.options, "video", False)
        return await self._load(
            self.sources, "animation" if frames else "either" if self.capabilities.video else "picture"
        )

    async def one(self) -> Picture | Video:
        """The picture or video of a task that looks at one.

        Raises:
            RequestError, ImageError: there are several, or it can't be loaded.
        """
        self._only()
        return (await self.several())[0]

    async def picture(self) -> Picture:
        """The picture of a task that looks at one, and at no video.

        Raises:
            RequestError, ImageError: there are several, or it can't be loaded.
        """
        found = (await self._load([self._only()], "picture"))[0]
        assert isinstance(found, Picture)
        return found

    async def _load(self, sources: Sequence[PictureSource], kind: Kind) -> list[Picture | Video]:
        media = RequestMedia(self.context.media, self.record)
        refs = {source.field: MediaRef(source.value, source.field, kind) for source in sources}
        return list((await media.load(refs)).values())

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

    async def read(self, http: HttpRequest) -> Received[OptionsT]:
        """The request in the body of `http`.

        Raises:
            RequestError, RequestValidationError: it is neither of the two, or a field of it is wrong.
        """
        record = record_of(http.scope)
        if is_form(http):
            options, sources = await self._read_form(http, record.notes)
        else:
            options, sources = self._read_json(await http.json(), record.notes)
        return Received(context_of(http), record, options, tuple(sources))

    def openapi(self) -> dict[str, Any]:
        """The `requestBody` of the OpenAPI document."""
        files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
        form = self.options.model_json_schema()
        form["properties"] = {**form["properties"], "image": files}
        form["required"] = [*form.get("required", []), "image"]
        content = {"application/json": {"schema": self.request.model_json_schema()}, FORM: {"schema": form}}
        return {"requestBody": {"required": True, "content": content}}

    def _read_json(self, body: object, notes: RequestNotes) -> tuple[OptionsT, list[PictureSource]]:
        options = validated(self.request, body, notes, strict=True)
        urls = options.model_dump(include={"image", "images"})
        one, several = urls.get("image"), urls.get("images", [])
        if one is not None and several:
            raise RequestError("send image or images, not both", field="images")
        if one is not None:
            return options, [PictureSource(one, "image")]
        if not several:
            raise RequestError("image is missing", field="image")
        return options, [PictureSource(url, f"images[{index}]") for index, url in enumerate(several)]

    async def _read_form(
        self, http: HttpRequest, notes: RequestNotes
    ) -> tuple[OptionsT, list[PictureSource]]:
        async with form_of(http, max_files=MAX_IMAGES, max_fields=MAX_FIELDS) as form:
            sources = [source async for source in _sources(form)]
            options = validated(self.options, _fields(form), notes, strict=False)
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
    """All fields of a form beside its pictures."""
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


SHOWN: Final = 2000  # characters of the model's text in an error

router = APIRouter(prefix="/v1/vision", tags=["vision"], route_class=JsonRoute)

CAPTION: Final = Bodies(CaptionRequest, CaptionOptions)
ASK: Final = Bodies(AskRequest, AskOptions)
SCENE: Final = Bodies(SceneRequest, SceneOptions)
DETECT: Final = Bodies(DetectRequest, DetectOptions)

EVENTS: Final = events_document('{"delta": "…"} for each piece, then {"result": {…}}')
PNG: Final[dict[str, Any]] = {"image/png": {"schema": {"type": "string", "format": "binary"}}}


@router.post(
    "/caption",
    response_model=CaptionResponse,
    responses={200: {"content": EVENTS}},
    openapi_extra=CAPTION.openapi(),
)
async def post_caption(http: HttpRequest) -> Any:
    """Describe a picture, in one sentence or in detail."""
    task = await CAPTION.read(http)
    finish = task.finish(CaptionResponse, ask.caption_result)
    detail, given = task.options.detail, task.given
    return await _answer(task, ask.caption_request(await task.one(), detail=detail, **given), finish)


@router.post(
    "/ask", response_model=AnswerResponse, responses={200: {"content": EVENTS}}, openapi_extra=ASK.openapi()
)
async def post_ask(http: HttpRequest) -> Any:
    """Answer a question about one picture, or about several together."""
    task = await ASK.read(http)
    finish = task.finish(AnswerResponse, ask.result)
    question, given = task.options.question, task.given
    return await _answer(task, ask.request(await task.several(), question, **given), finish)


@router.post("/scene", response_model=SceneResponse, openapi_extra=SCENE.openapi())
async def post_scene(http: HttpRequest) -> Any:
    """Analyse a picture: summary, setting, objects with counts and positions, written text, relations."""
    task = await SCENE.read(http)
    finish, given = task.finish(SceneResponse, scene.result), task.given
    scene.check(task.capabilities)
    return await _answer(task, scene.request(await task.one(), **given), finish)


@router.post(
    "/detect",
    response_model=DetectionsResponse,
    responses={200: {"content": PNG}},
    openapi_extra=DETECT.openapi(),
)
async def post_detect(http: HttpRequest) -> Any:
    """Find objects: boxes in pixels of the picture that was sent, a COCO data set, or a drawn picture."""
    task = await DETECT.read(http)
    names = detect.check_names(task.options.objects)
    options, name, given = task.options, task.model, task.given
    detect.check(names, task.capabilities)
    picture = await task.picture()
    size, drawn = picture.image.size, picture.image if options.format == "png" else None
    request = detect.request(picture, names, **given)

    def finish(reply: Reply) -> Detections:
        return detect.result(reply, size, names, task.capabilities, max_pixels=options.max_pixels)

    answer = _answer(task, request, finish)
    del picture, request
    found = await answer
    if drawn is not None:
        return Response(await asyncio.to_thread(_png, drawn, found), media_type="image/png")
    if options.format == "coco":
        data_set = await asyncio.to_thread(export.coco, [(_file_name(task.sources[0]), found)], names)
        return Response(data_set, media_type="application/json")
    return DetectionsResponse(model=name, **vars(found))


async def _answer(task: Received[Any], request: Request, finish: Callable[[Reply], BaseModel]) -> Any:
    """The response to a task: complete, or as events where its options ask for them.

    Raises:
        OutputError: the model's answer isn't what the task asked for; the message shows it.
        RequestError: it isn't because `max_tokens` cut it.
    """
    reading = read_answer(task.context, task.record, request)
    del request  # with the picture in it
    answer = await reading
    if getattr(task.options, "stream", False):
        return event_stream(task.context, _events(answer, task.options, finish))
    await answer.complete()
    return _result(answer, task.options, finish)


async def _events(
    answer: GeneratedAnswer, options: TaskOptions, finish: Callable[[Reply], BaseModel]
) -> AsyncGenerator[Event]:
    """The pieces of a task's answer as they come, then its result."""
    async with answer.generation:
        async for step in answer:
            for _, event in step.events:
                if isinstance(event, TextPiece):
                    yield Event(compact({"delta": event.text}))
    response = _result(answer, options, finish)
    yield Event(compact({"result": response.model_dump(mode="json")}))


def _result(answer: GeneratedAnswer, options: TaskOptions, finish: Callable[[Reply], ResultT]) -> ResultT:
    choice, used = answer.choices[0], answer.generation.usage
    usage = Usage(used.prompt_tokens, used.completion_tokens, used.image_tokens)
    reply = Reply(text=choice.text, finish_reason=choice.finish_reason or "", usage=usage)
    try:
        return finish(reply)
    except OutputError as error:
        if reply.truncated and options.max_tokens is not None:
            raise RequestError(
                f"max_tokens {options.max_tokens} cut the answer before there was a result in it; "
                "allow more, or leave it out",
                field="max_tokens",
            ) from None
        said = reply.text if len(reply.text) <= SHOWN else f"{reply.text[:SHOWN]}…"
        raise OutputError(f"{error}; the model said: {said!r}", text=reply.text) from None


def _png(image: Image, detections: Detections) -> bytes:
    """A PNG of `image` with boxes and labels on it."""
    file = io.BytesIO()
    export.annotate(image, detections).save(file, "PNG")
    return file.getvalue()


def _file_name(source: PictureSource) -> str:
    """The picture's name in a COCO data set: the uploaded file's, or the last part of its URL."""
    if isinstance(source.value, str) and source.value.startswith(("http://", "https://")):
        return PurePosixPath(urlsplit(source.value).path).name or source.name
    return source.name

"""POST /v1/vision/caption, ask, scene, detect: a picture in, a typed result out, complete or as events."""

import asyncio
import io
from collections.abc import AsyncGenerator, Callable
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter
from PIL.Image import Image
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Request, Usage
from snugvl.errors import OutputError, RequestError
from snugvl.inputs.tools.parser import TextPiece
from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.generation import Answer, read_answer
from snugvl.server.streaming import Event, compact, event_stream, events_document
from snugvl.server.vision.requests import (
    AnswerResponse,
    AskOptions,
    AskRequest,
    Bodies,
    CaptionOptions,
    CaptionRequest,
    CaptionResponse,
    DetectionsResponse,
    DetectOptions,
    DetectRequest,
    PictureSource,
    Received,
    SceneOptions,
    SceneRequest,
    SceneResponse,
    TaskOptions,
)
from snugvl.tasks import ask, caption, detect, draw, export, scene
from snugvl.tasks.results import Detections, Reply

SHOWN: Final = 2000  # characters of the model's text in an error

ResultT = TypeVar("ResultT", bound=BaseModel)


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
    options, name, capabilities = task.options, task.model, task.capabilities
    request = caption.request(
        await task.one(),
        capabilities,
        detail=options.detail,
        sampling=options.sampling(),
        max_pixels=options.max_pixels,
    )

    def finish(reply: Reply) -> CaptionResponse:
        return CaptionResponse(model=name, **dict(caption.result(reply)))

    answer = _stream(http, request, options, finish) if options.stream else _answer(task, request, finish)
    del request
    return await answer


@router.post(
    "/ask", response_model=AnswerResponse, responses={200: {"content": EVENTS}}, openapi_extra=ASK.openapi()
)
async def post_ask(http: HttpRequest) -> Any:
    """Answer a question about one picture, or about several together."""
    task = await ASK.read(http)
    options, name, capabilities = task.options, task.model, task.capabilities
    request = ask.request(
        await task.several(),
        options.question,
        capabilities,
        sampling=options.sampling(),
        max_pixels=options.max_pixels,
    )

    def finish(reply: Reply) -> AnswerResponse:
        return AnswerResponse(model=name, **dict(ask.result(reply)))

    answer = _stream(http, request, options, finish) if options.stream else _answer(task, request, finish)
    del request
    return await answer


@router.post("/scene", response_model=SceneResponse, openapi_extra=SCENE.openapi())
async def post_scene(http: HttpRequest) -> Any:
    """Analyse a picture: summary, setting, objects with counts and positions, written text, relations."""
    task = await SCENE.read(http)
    options, name, capabilities = task.options, task.model, task.capabilities
    scene.check(capabilities)
    answer = _answer(
        task,
        scene.request(
            await task.one(), capabilities, sampling=options.sampling(), max_pixels=options.max_pixels
        ),
        lambda reply: SceneResponse(model=name, **dict(scene.result(reply))),
    )
    return await answer


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
    options, name, capabilities = task.options, task.model, task.capabilities
    detect.check(names, capabilities)
    picture = await task.picture()
    size, drawn = picture.image.size, picture.image if options.format == "png" else None
    request = detect.request(
        picture, names, capabilities, sampling=options.sampling(), max_pixels=options.max_pixels
    )

    def finish(reply: Reply) -> Detections:
        return detect.result(reply, size, names, capabilities, max_pixels=options.max_pixels)

    answer = _answer(task, request, finish)
    del picture, request
    found = await answer
    if drawn is not None:
        return Response(await asyncio.to_thread(_png, drawn, found), media_type="image/png")
    if options.format == "coco":
        data_set = await asyncio.to_thread(export.coco, [(_file_name(task.sources[0]), found)], names)
        return Response(data_set, media_type="application/json")
    return DetectionsResponse(model=name, **vars(found))


async def _answer(task: Received[Any], request: Request, finish: Callable[[Reply], ResultT]) -> ResultT:
    """The response to a task, complete.

    Raises:
        OutputError: the model's answer isn't what the task asked for; the message shows it.
        RequestError: it isn't because `max_tokens` cut it.
    """
    reading = read_answer(task.context, request)
    del request
    answer = await reading
    await answer.complete()
    return _result(answer, task.options, finish)


async def _stream(
    http: HttpRequest, request: Request, options: TaskOptions, finish: Callable[[Reply], BaseModel]
) -> Response:
    """The response to a task as events."""
    context = context_of(http)
    return event_stream(http, context, _events(await read_answer(context, request), options, finish))


async def _events(
    answer: Answer, options: TaskOptions, finish: Callable[[Reply], BaseModel]
) -> AsyncGenerator[Event]:
    """The pieces of a task's answer as they come, then its result."""
    async with answer.generation:
        async for step in answer:
            for _, event in step.events:
                if isinstance(event, TextPiece):
                    yield Event(compact({"delta": event.text}))
    response = _result(answer, options, finish)
    yield Event(compact({"result": response.model_dump(mode="json")}))


def _result(answer: Answer, options: TaskOptions, finish: Callable[[Reply], ResultT]) -> ResultT:
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
    draw.annotate(image, detections).save(file, "PNG")
    return file.getvalue()


def _file_name(source: PictureSource) -> str:
    """What a COCO data set calls the picture: the uploaded file's name, or the last part of its URL."""
    if isinstance(source.value, str) and source.value.startswith(("http://", "https://")):
        return PurePosixPath(urlsplit(source.value).path).name or source.name
    return source.name

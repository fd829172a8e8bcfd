"""POST /v1/vision/caption, ask, scene, detect: a picture in, a typed result out."""

import asyncio
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.generation import generate
from snugvl.server.streaming import event_stream, events_document
from snugvl.server.vision.answers import answer, drawn, events
from snugvl.server.vision.received import Bodies, Source, picture, pictures
from snugvl.server.vision.schemas import (
    AnswerResponse,
    AskOptions,
    AskRequest,
    CaptionOptions,
    CaptionRequest,
    CaptionResponse,
    DetectionsResponse,
    DetectOptions,
    DetectRequest,
    SceneOptions,
    SceneRequest,
    SceneResponse,
)
from snugvl.tasks import ask, caption, detect, export, scene
from snugvl.tasks.results import Detections, Reply

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
async def post_caption(http: Request) -> Any:
    """Describe a picture, in one sentence or in detail."""
    context = context_of(http)
    received = await CAPTION.read(http)
    options = received.options
    name, capabilities = context.check_model(options.model), context.capabilities
    shown = await picture(context, received.sources)
    request = caption.request(
        shown,
        capabilities,
        detail=options.detail,
        sampling=options.sampling(),
        max_pixels=options.max_pixels,
    )

    def finish(reply: Reply) -> CaptionResponse:
        return CaptionResponse(model=name, **dict(caption.result(reply)))

    if options.stream:
        return event_stream(http, context, events(await generate(context, request), options, finish))
    return await answer(context, request, options, finish)


@router.post(
    "/ask", response_model=AnswerResponse, responses={200: {"content": EVENTS}}, openapi_extra=ASK.openapi()
)
async def post_ask(http: Request) -> Any:
    """Answer a question about one picture, or about several together."""
    context = context_of(http)
    received = await ASK.read(http)
    options = received.options
    name, capabilities = context.check_model(options.model), context.capabilities
    request = ask.request(
        await pictures(context, received.sources),
        options.question,
        capabilities,
        sampling=options.sampling(),
        max_pixels=options.max_pixels,
    )

    def finish(reply: Reply) -> AnswerResponse:
        return AnswerResponse(model=name, **dict(ask.result(reply)))

    if options.stream:
        return event_stream(http, context, events(await generate(context, request), options, finish))
    return await answer(context, request, options, finish)


@router.post("/scene", response_model=SceneResponse, openapi_extra=SCENE.openapi())
async def post_scene(http: Request) -> Any:
    """Analyse a picture: summary, setting, objects with counts and positions, written text, relations."""
    context = context_of(http)
    received = await SCENE.read(http)
    options = received.options
    name, capabilities = context.check_model(options.model), context.capabilities
    scene.check(capabilities)
    shown = await picture(context, received.sources)
    request = scene.request(shown, capabilities, sampling=options.sampling(), max_pixels=options.max_pixels)
    return await answer(
        context, request, options, lambda reply: SceneResponse(model=name, **dict(scene.result(reply)))
    )


@router.post(
    "/detect",
    response_model=DetectionsResponse,
    responses={200: {"content": PNG}},
    openapi_extra=DETECT.openapi(),
)
async def post_detect(http: Request) -> Any:
    """Find objects: boxes in pixels of the picture that was sent, a COCO data set, or a drawn picture."""
    context = context_of(http)
    received = await DETECT.read(http)
    options = received.options
    names = detect.check_names(options.objects)
    name, capabilities = context.check_model(options.model), context.capabilities
    detect.check(names, capabilities)
    shown = await picture(context, received.sources)
    request = detect.request(
        shown, names, capabilities, sampling=options.sampling(), max_pixels=options.max_pixels
    )

    def finish(reply: Reply) -> Detections:
        return detect.result(reply, shown.image.size, names, capabilities, max_pixels=options.max_pixels)

    found = await answer(context, request, options, finish)
    if options.format == "png":
        return Response(await drawn(shown.image, found), media_type="image/png")
    if options.format == "coco":
        data_set = await asyncio.to_thread(export.coco, [(_file_name(received.sources[0]), found)], names)
        return Response(data_set, media_type="application/json")
    return DetectionsResponse(model=name, **dict(found))


def _file_name(source: Source) -> str:
    """What a COCO data set calls the picture: the uploaded file's name, or the last part of its URL."""
    if isinstance(source.value, str) and source.value.startswith(("http://", "https://")):
        return PurePosixPath(urlsplit(source.value).path).name or source.name
    return source.name

"""Ollama's routes. Lines of JSON stream by default, as there."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from snugvl.errors import RequestError
from snugvl.server.body import JsonRoute
from snugvl.server.ceiling import generate_within
from snugvl.server.context import context_of
from snugvl.server.ollama import models
from snugvl.server.ollama.answers import (
    Answer,
    ChatLine,
    GenerateLine,
    Line,
    Piece,
    Shape,
    chat_line,
    generate_line,
    now,
)
from snugvl.server.ollama.conversation import chat_request, generate_request
from snugvl.server.ollama.schemas import ChatRequest, GenerateRequest, Generating, ShowRequest
from snugvl.server.reader import Reader
from snugvl.server.streaming import line_stream, lines_document
from snugvl.version import __version__

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=JsonRoute)

ELSEWHERE: Final = (  # method, path, what to do instead
    ("POST", "pull", "download models with `snugvl pull`"),
    ("POST", "push", "there is no registry to push to"),
    ("POST", "create", "serve a checkpoint's folder with `snugvl serve`"),
    ("POST", "copy", "give a model several names with `snugvl serve --served-model-name`"),
    ("DELETE", "delete", "delete downloaded models from the Hugging Face cache"),
    ("POST", "embed", "a vision-language model gives no embeddings"),
    ("POST", "embeddings", "a vision-language model gives no embeddings"),
    ("HEAD", "blobs/{digest}", "serve a checkpoint's folder with `snugvl serve`"),
    ("POST", "blobs/{digest}", "serve a checkpoint's folder with `snugvl serve`"),
)


@router.post(
    "/chat",
    response_model=ChatLine,
    response_model_exclude_none=True,
    responses={200: {"content": lines_document("ChatLine")}},
)
async def post_chat(http: Request, chat: ChatRequest) -> Any:
    """Continue a conversation, with pictures and tools."""
    context, started_ns = context_of(http), time.perf_counter_ns()
    name, capabilities = models.served_name(context, chat.model), context.capabilities
    if not chat.messages:
        return _loaded(chat, name, chat_line)
    request = await chat_request(context, capabilities, chat)
    reader = Reader(await generate_within(context, request), context.call_parser(request.tools))
    answer = Answer(name, reader, chat_line, started_ns)
    return await answer.whole() if chat.stream is False else line_stream(http, context, answer.lines())


@router.post(
    "/generate",
    response_model=GenerateLine,
    response_model_exclude_none=True,
    responses={200: {"content": lines_document("GenerateLine")}},
)
async def post_generate(http: Request, asked: GenerateRequest) -> Any:
    """Answer a prompt, with pictures."""
    context, started_ns = context_of(http), time.perf_counter_ns()
    name, capabilities = models.served_name(context, asked.model), context.capabilities
    if not asked.prompt and not asked.images:
        return _loaded(asked, name, generate_line)
    request = await generate_request(context, capabilities, asked)
    reader = Reader(await generate_within(context, request), None)
    answer = Answer(name, reader, generate_line, started_ns)
    return await answer.whole() if asked.stream is False else line_stream(http, context, answer.lines())


@router.get("/tags", response_model=models.Tags)
async def get_tags(http: Request) -> Any:
    """The names that are served."""
    return models.tags(context_of(http))


@router.get("/ps", response_model=models.Running)
async def get_ps(http: Request) -> Any:
    """The model that is loaded, and what it holds."""
    return models.running(context_of(http))


@router.post("/show", response_model=models.Shown)
async def post_show(http: Request, asked: ShowRequest) -> Any:
    """What is known about a model."""
    context, name = context_of(http), asked.model or asked.name
    if name is None:
        raise RequestError("model is missing", field="model")
    models.served_name(context, name)
    return models.shown(context)


@router.get("/version", response_model=models.Version)
async def get_version() -> Any:
    """This server's version."""
    return models.Version(version=__version__)


def _refusal(path: str, instead: str) -> Callable[[], Awaitable[None]]:
    """A route that says what to do instead."""

    async def refuse() -> None:
        raise RequestError(f"/api/{path} is not supported by snugvl: {instead}")

    return refuse


for _method, _path, _instead in ELSEWHERE:
    router.add_api_route(f"/{_path}", _refusal(_path, _instead), methods=[_method], include_in_schema=False)


def _loaded(asked: Generating, name: str, shape: Shape) -> Line:
    """The answer to a request that only wants the model loaded, which it is.

    Raises:
        RequestError: it wants it unloaded.
    """
    if asked.keep_alive in (0, "0", "0s", "0m"):
        raise RequestError(
            "keep_alive 0 without a prompt unloads the model, but this one stays as long as the server runs; "
            "stop the server instead",
            field="keep_alive",
        )
    return shape(Piece(), model=name, created_at=now(), done=True, done_reason="load")

"""Routes about the server itself: health, metrics, memory, models."""

import math
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from snugvl.server.context import Context, context_of
from snugvl.server.reports import (
    HealthReport,
    MemoryReport,
    ModelCard,
    ModelList,
    VersionReport,
)
from snugvl.tasks.conventions import tasks_of
from snugvl.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTED = int(time.time())
NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthReport, "description": "Not ready; Retry-After says when to ask again."}
}

router = APIRouter()
health_routes = APIRouter(tags=["health"])
server_routes = APIRouter(tags=["server"])
model_routes = APIRouter(tags=["models"])


@health_routes.get("/health", response_model=HealthReport, responses=NOT_READY)
@health_routes.get("/health/ready", response_model=HealthReport, responses=NOT_READY)
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken: 200, or 503 with the reason and when to ask again."""
    health = context_of(request).service.health
    headers = {"Cache-Control": "no-store"}
    if not health.ready:
        headers["Retry-After"] = str(max(1, math.ceil(health.retry_after_s or 1)))
    return JSONResponse(HealthReport.of(health).model_dump(), 200 if health.ready else 503, headers)


@health_routes.get("/health/live")
async def live(request: Request, response: Response) -> HealthReport:
    """Whether the server is there at all, whatever its engine does."""
    response.headers["Cache-Control"] = "no-store"
    return HealthReport.of(context_of(request).service.health)


@server_routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {METRICS_TYPE: {}}, "description": "Text."}},
)
async def metrics(request: Request) -> Response:
    """Counters, times, KV cache and memory, for Prometheus."""
    return Response(context_of(request).metrics.text(), media_type=METRICS_TYPE)


@server_routes.get("/memory")
async def memory(request: Request, response: Response) -> MemoryReport:
    """The memory ledger, planned beside measured, and the load."""
    response.headers["Cache-Control"] = "no-store"
    service = context_of(request).service
    return MemoryReport.of(service.snapshot, service.health)


@server_routes.get("/version")
async def version() -> VersionReport:
    """The version of snugvl."""
    return VersionReport(version=__version__)


@model_routes.get("/v1/models")
async def models(request: Request) -> ModelList:
    """Every name under which the model is served."""
    context = context_of(request)
    return ModelList(data=tuple(_card(context, name) for name in context.settings.names))


@model_routes.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> ModelCard:
    """One of them."""
    context = context_of(request)
    return _card(context, context.check_model(model))


def _card(context: Context, name: str) -> ModelCard:
    capabilities = context.service.capabilities
    if capabilities is None:
        return ModelCard(id=name, created=STARTED)
    return ModelCard(
        id=name,
        created=STARTED,
        root=capabilities.model,
        max_model_len=capabilities.context_tokens,
        max_pixels=capabilities.max_pixels,
        images=capabilities.images,
        video=capabilities.video,
        tasks=tasks_of(capabilities),
        tools=capabilities.tools,
        architecture=capabilities.architecture or None,
        parameters=capabilities.parameters or None,
    )


for routes in (health_routes, server_routes, model_routes):
    router.include_router(routes)

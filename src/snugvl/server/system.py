"""Routes about the server itself: health, metrics, memory, models."""

import math
from datetime import UTC, datetime
from typing import Any, Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from snugvl.core.ledger import LedgerRow, RunningPlan
from snugvl.core.service import EngineService, Health, Load, Snapshot, State
from snugvl.core.training import Training
from snugvl.server.context import Context, context_of
from snugvl.tasks.conventions import Grounding, grounding_of, tasks_of
from snugvl.version import __version__


class HealthReport(BaseModel):
    """The engine's health. `ready`: whether requests are taken now."""

    model_config = ConfigDict(from_attributes=True)

    ready: bool
    state: State
    detail: str
    progress: float | None = Field(description="Of loading, from 0 to 1.")
    restarts: int
    retry_after_s: float | None
    replaced: tuple[str, ...] = Field(
        (), description="Kernels that aren't used on this GPU, as a check found them wrong: a sentence each."
    )

    @classmethod
    def of(cls, service: EngineService) -> "HealthReport":
        """The report of a service's health now."""
        found = service.capabilities
        report = cls.model_validate(service.health)
        return report if found is None else report.model_copy(update={"replaced": found.replaced})


class LedgerReport(BaseModel):
    """The memory that the engine holds on its device, and the device's own, in bytes."""

    model_config = ConfigDict(from_attributes=True)

    device: str
    rows: tuple[LedgerRow, ...]
    total_bytes: int
    free_bytes: int
    process_bytes: int
    others_bytes: int = Field(description="Held by other processes.")
    cap_bytes: int | None


class StartStep(BaseModel):
    """A step of starting the engine, and when it was reached."""

    step: str
    at: float = Field(description="Seconds since 1970.")


class PlanReport(BaseModel):
    """The plan that the engine runs, as `snugvl plan --json` has it; sizes are bytes."""

    settings: dict[str, Any] = Field(description="Every choice that changes a byte.")
    components: tuple[dict[str, Any], ...] = Field(description="Name, bytes, phase and reason of each.")
    total_bytes: int
    usable_bytes: int = Field(description="What the plan counted on.")
    changed: str = Field(description="How it differs from what was printed, and why; empty where it doesn't.")
    speed: str = Field("", description="The likely speed of one request with its range, for people.")

    @classmethod
    def of(cls, plan: RunningPlan) -> "PlanReport":
        """The report of a plan."""
        parts = (
            {"name": part.name, "bytes": part.nbytes, "phase": part.phase, "why": part.why}
            for part in plan.parts
        )
        return cls(
            settings=dict(plan.settings),
            components=tuple(parts),
            total_bytes=plan.total_bytes,
            usable_bytes=plan.usable_bytes,
            changed=plan.changed,
            speed=plan.speed,
        )


class MemoryReport(BaseModel):
    """The ledger and the load at one moment, and the health now. Without an engine only the health.

    `start`: what our own engine reached on its last way to being ready, in order.
    """

    at: float | None = Field(description="Seconds since 1970.")
    ledger: LedgerReport | None
    load: Load | None
    health: HealthReport
    start: tuple[StartStep, ...] = Field((), description="Of our own engine.")
    plan: PlanReport | None = Field(None, description="What the engine runs, where it was planned.")

    @classmethod
    def of(cls, snapshot: Snapshot | None, health: Health, plan: RunningPlan | None = None) -> "MemoryReport":
        """The report of the last snapshot known."""
        return cls(
            at=snapshot.at if snapshot else None,
            ledger=LedgerReport.model_validate(snapshot.ledger) if snapshot else None,
            load=snapshot.load if snapshot else None,
            health=HealthReport.model_validate(health),
            start=tuple(StartStep(step=step, at=at) for step, at in health.timeline),
            plan=PlanReport.of(plan) if plan is not None else None,
        )


class VersionReport(BaseModel):
    """Version of the server."""

    version: str


STARTED: Final = datetime.now(UTC).replace(microsecond=0)


class ModelCard(BaseModel):
    """A name of the model and what the model can do, in OpenAI's and Anthropic's form at once."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int = int(STARTED.timestamp())
    created_at: str = Field(
        default=STARTED.isoformat().replace("+00:00", "Z"), description="The same moment, for Anthropic's."
    )
    owned_by: Literal["snugvl"] = "snugvl"
    root: str | None = Field(default=None, description="The checkpoint that is loaded; null until it is.")
    max_model_len: int | None = Field(
        default=None, description="Tokens of prompt, images and answer together."
    )
    max_input_tokens: int | None = Field(default=None, description="Anthropic's name of max_model_len.")
    max_pixels: int | None = Field(default=None, description="Larger images are scaled down to this.")
    images: bool | None = None
    video: bool | None = None
    tasks: tuple[str, ...] | None = Field(
        default=None, description="Which of /v1/vision/ it can do; none for a model of text alone."
    )
    tools: bool | None = Field(default=None, description="Whether the model is shown tools.")
    architecture: str | None = None
    grounding: Grounding | None = Field(
        default=None, description="How to read boxes in its answers; null for a model that gives none."
    )
    parameters: int | None = Field(default=None, description="Number of weights.")
    training: Training | None = Field(
        default=None,
        description="Limits of what the checkpoint was trained on: drawings alone, videos or none, pictures.",
    )


class ModelList(BaseModel):
    """Every name of the model, in OpenAI's and Anthropic's form: one page."""

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthReport, "description": "Not ready; Retry-After says when to ask again."}
}

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
    return JSONResponse(
        HealthReport.of(context_of(request).service).model_dump(), 200 if health.ready else 503, headers
    )


@health_routes.get("/health/live")
async def live(request: Request, response: Response) -> HealthReport:
    """Whether the server is there at all, whatever its engine does."""
    response.headers["Cache-Control"] = "no-store"
    return HealthReport.of(context_of(request).service)


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
    found = service.capabilities
    report = MemoryReport.of(service.snapshot, service.health, found.plan if found is not None else None)
    report.health = HealthReport.of(service)
    return report


@server_routes.get("/version")
async def version() -> VersionReport:
    """The version of snugvl."""
    return VersionReport(version=__version__)


@model_routes.get("/v1/models")
async def models(request: Request) -> ModelList:
    """Every name under which the model is served."""
    context = context_of(request)
    names = context.settings.names
    return ModelList(data=tuple(_card(context, name) for name in names), first_id=names[0], last_id=names[-1])


@model_routes.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> ModelCard:
    """Card of one model."""
    context = context_of(request)
    return _card(context, context.check_model(model))


def _card(context: Context, name: str) -> ModelCard:
    capabilities = context.service.capabilities
    if capabilities is None:
        return ModelCard(id=name, display_name=name)
    return ModelCard(
        id=name,
        display_name=name,
        root=capabilities.model,
        max_model_len=capabilities.context_tokens,
        max_input_tokens=capabilities.context_tokens,
        max_pixels=capabilities.max_pixels,
        images=capabilities.images,
        video=capabilities.video,
        tasks=tasks_of(capabilities),
        tools=capabilities.tools,
        architecture=capabilities.architecture or None,
        grounding=grounding_of(capabilities),
        parameters=capabilities.parameters or None,
        training=capabilities.training,
    )

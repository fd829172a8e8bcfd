"""What is served, as Ollama tells it: tags, show, ps, version."""

import hashlib
from datetime import UTC, datetime
from typing import Any

import psutil
from pydantic import BaseModel

from snugvl.core.ledger import Ledger
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities
from snugvl.errors import ModelNotServed
from snugvl.server.context import Context

LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as Ollama calls them
# What the model is shown, in the order and the form of Ollama's templates: some clients look for tools in it.
TEMPLATE, TOOLS, PROMPT = "{{ .System }}", "{{ if .Tools }}{{ .Tools }}{{ end }}", "{{ .Prompt }}"
UNKNOWN = "snugvl"  # the family of a model whose engine doesn't tell


class Details(BaseModel):
    """Details of the model; empty where unknown."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    """A model in /api/tags. `size`: bytes of its weights."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(BaseModel):
    """The names that are served."""

    models: list[ListedModel]


class RunningModel(BaseModel):
    """A model in /api/ps. `size`: bytes its process holds; `size_vram`: those on a GPU."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: Details
    expires_at: str
    context_length: int


class Running(BaseModel):
    """The loaded model."""

    models: list[RunningModel]


class Shown(BaseModel):
    """A model in /api/show."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(BaseModel):
    """Version of Ollama's protocol, in digits and dots: some clients ask for one that is new enough."""

    version: str


def served_name(context: Context, name: str) -> str:
    """The name to answer with: the one that was asked for.

    Raises:
        ModelNotServed: neither it nor, without ":latest", the rest of it is served.
    """
    try:
        context.check_model(name)
    except ModelNotServed:
        if not name.endswith(LATEST):
            raise
        context.check_model(name.removesuffix(LATEST))
    return name


def tags(context: Context) -> Tags:
    """Every name that is served. One model may have several."""
    capabilities, size = context.capabilities, _weight_bytes(context)
    return Tags(
        models=[
            ListedModel(
                name=name,
                model=name,
                modified_at=_since(),
                size=size,
                digest=_digest(capabilities),
                details=_details(capabilities),
            )
            for name in map(_with_tag, context.settings.names)
        ]
    )


def running_models(context: Context) -> Running:
    """The model that is loaded; none while the engine starts."""
    capabilities, snapshot = context.service.capabilities, context.service.snapshot
    if capabilities is None or not context.service.health.ready:
        return Running(models=[])
    held = snapshot.ledger.process_bytes if snapshot else 0
    name = _with_tag(context.settings.names[0])
    model = RunningModel(
        name=name,
        model=name,
        size=held,
        size_vram=held if snapshot and _on_gpu(snapshot.ledger) else 0,
        digest=_digest(capabilities),
        details=_details(capabilities),
        expires_at=NEVER,
        context_length=capabilities.context_tokens,
    )
    return Running(models=[model])


def describe(context: Context) -> Shown:
    """The engine's details of its model."""
    capabilities = context.capabilities
    family = _family(capabilities)
    pixels = {f"{family}.vision.max_pixels": capabilities.max_pixels} if capabilities.images else {}
    can = {"completion": True, "tools": capabilities.tools, "vision": capabilities.images}
    return Shown(
        template=TEMPLATE + (TOOLS if capabilities.tools else "") + PROMPT,
        parameters=f"num_ctx {capabilities.context_tokens}",
        details=_details(capabilities),
        model_info={
            "general.architecture": family,
            "general.basename": capabilities.model,
            "general.parameter_count": capabilities.parameters,
            f"{family}.context_length": capabilities.context_tokens,
            **pixels,
        },
        capabilities=[name for name, able in can.items() if able],
        modified_at=_since(),
    )


def _with_tag(name: str) -> str:
    """With ":latest", where a name has no tag: Ollama's clients expect one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _details(capabilities: Capabilities) -> Details:
    family = _family(capabilities)
    return Details(
        family=family,
        families=[family],
        parameter_size=_in_short(capabilities.parameters),
        quantization_level=TYPES.get(capabilities.dtype, capabilities.dtype.upper()),
    )


def _family(capabilities: Capabilities) -> str:
    """As Ollama names architectures: Qwen3VLForConditionalGeneration is qwen3vl there."""
    return capabilities.architecture.partition("For")[0].lower() or UNKNOWN


def _in_short(parameters: int) -> str:
    """2.1B, 6.5M; nothing where the number is not known."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return ""


def _digest(capabilities: Capabilities) -> str:
    """Digest of a model: clients tell models apart by it, and show its first twelve digits."""
    return hashlib.sha256(f"{capabilities.model} {capabilities.dtype}".encode()).hexdigest()


def _since() -> str:
    """When this server's process began: before that it had no model."""
    began = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    return began.isoformat().replace("+00:00", "Z")


def _weight_bytes(context: Context) -> int:
    snapshot = context.service.snapshot
    rows = snapshot.ledger.rows if snapshot else ()
    return sum(row.measured_bytes or row.planned_bytes or 0 for row in rows if row.kind.group is Kind.WEIGHTS)


def _on_gpu(ledger: Ledger) -> bool:
    return ledger.device not in ("host memory", "CPU")

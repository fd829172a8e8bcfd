"""Wishes: the user's constraints on the solver."""

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from snugvl.core.formats import FEW_BITS, QUALITY, Floor, Precision
from snugvl.core.options import (
    ROWS,
    EmbeddingName,
    ExpertsName,
    LoadOptions,
    PurposeName,
    SpeculationName,
    TowerName,
)
from snugvl.errors import RequestError
from snugvl.planner.engines import refuse_lacking
from snugvl.planner.settings import Engine, KVFormat

PlanTask = Literal["caption", "ask", "scene", "detect"]

GROUNDING_TOKENS: Final = 1024  # fewer image tokens per picture hurt boxes (anchors: llama.cpp #16842)
LEAST_TOKENS: Final = 256
ROOM_TOKENS: Final = 1024  # of a context for the question, the answer and the template
LEAST_ROOM_TOKENS: Final = 256
OPTION: Final = {"memory_bytes": "memory"}  # of wishes that have another name than their option
ANY_TOKENS: Final = 1  # as `min_image_tokens`: pictures may even be too large for the context


@dataclass(frozen=True, slots=True)
class Wishes:
    """Constraints. None leaves a choice to the solver.

    Attributes:
        context: tokens of one sequence, at least.
        images: images of one request; 0 for text alone.
        min_image_tokens: tokens that a large image must keep; 1,024 by default for boxes, else 256.
        max_pixels: exact pixel budget of an image.
        quality: coarsest acceptable precision of the weights.
        weights: exact precision of the weights.
        memory_bytes: most that may be taken of one device, the CUDA context included.
        language_only: whether a model that sees is wanted without its vision tower; `images` is 0 then.
        tower: where the vision tower's weights are to be; auto streams them where nothing else fits as well.
        kv_cache: the format of keys and values.
        embedding: where the embedding is to be; auto has it in host memory where that makes room.
        experts: where a mixture's experts are to be; auto has them on the GPU.
        purpose: the purpose that the plan serves, see `goals`.
        float32: whether activations and unquantised weights are float32; None: on a CPU with plenty of room.
        step_graphs: CUDA graphs of prompts where plenty of GPU memory is left.
        prefix_cache: prompts start from what earlier ones left, which takes memory with recurrent states.
        speculation: "mtp": with the checkpoint's multi-token predictor; "auto": with it, if it has one, where
            it takes nothing but a part of the cache. Other kinds take no memory.
        also: options of `snugvl plan` that change no byte, by name and value: engines that can't do them are
            passed over, and the plan's command has them.
    """

    context: int | None = None
    images: int = 1
    min_image_tokens: int | None = None
    max_pixels: int | None = None
    quality: Floor = "any"
    backend: Engine | Literal["auto"] = "auto"
    concurrency: int = 1
    task: PlanTask = "caption"
    weights: Precision | None = None
    memory_bytes: int | None = None
    language_only: bool = False
    tower: TowerName = "auto"
    kv_cache: KVFormat | None = None
    embedding: EmbeddingName = "auto"
    experts: ExpertsName = "auto"
    purpose: PurposeName = "chat"
    float32: bool | None = None
    step_graphs: bool = True
    prefix_cache: bool = True
    speculation: SpeculationName = "auto"
    also: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("context", 1),
            ("min_image_tokens", 1),
            ("max_pixels", 1),
            ("images", 0),
            ("concurrency", 1),
            ("memory_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} must be at least {least}, not {value:,}", field=name)
        if self.language_only and self.images:
            raise RequestError(
                f"without its vision tower (language only) a model takes no images; you asked "
                f"for {self.images} a request",
                field="language_only",
            )
        if self.language_only and self.tower == "streamed":
            raise RequestError(
                "without its vision tower (language only) a model has none to stream; leave one out",
                field="tower",
            )
        self._check_engine()
        if self.images == 0 and self.good_for == "detect":
            raise RequestError("boxes need an image; images is 0", field="images")
        room = LEAST_ROOM_TOKENS if self.context is None else min(LEAST_ROOM_TOKENS, self.context // 2)
        if self.context is not None and self.images * self.least_image_tokens + room > self.context:
            raise RequestError(
                f"a context of {self.context:,} tokens can't hold {self.images} image(s) of "
                f"{self.least_image_tokens:,} tokens and {LEAST_ROOM_TOKENS} of text; at least "
                f"{self.images * self.least_image_tokens + LEAST_ROOM_TOKENS:,} are needed",
                field="context",
            )

    def _check_engine(self) -> None:
        """Refuse two options of which one excludes the other, whatever the model and the machine."""
        if self.weights is not None and QUALITY[self.weights] < self.floor:
            raise RequestError(
                f"--quality {self.quality} refuses --weights {self.weights}; leave one of them out",
                field="weights",
            )
        if self.backend != "auto":
            refuse_lacking(self.backend, self.said(), why=f"--backend {self.backend}")

    def said(self) -> dict[str, Any]:
        """Wishes that differ from the defaults, and the options beside them, by name."""
        values = ((each, getattr(self, each.name)) for each in fields(self) if each.name != "also")
        return {each.name: value for each, value in values if value != each.default} | dict(self.also)

    def apart(self) -> "Wishes":
        """The wishes for a mixture on our own engine, its experts in host memory, in about a GGUF's bits."""
        return replace(self, backend="native", experts="cpu", weights=FEW_BITS[-1])

    def without(self, name: str) -> "Wishes":
        """All wishes but one, which is left to the solver."""
        if name in dict(self.also):
            return replace(self, also=tuple(each for each in self.also if each[0] != name))
        default = next(each.default for each in fields(self) if each.name == name)
        left_out: dict[str, Any] = {name: default}
        return replace(self, **left_out)

    @property
    def good_for(self) -> PurposeName:
        """The purpose; "detect" where that task was named."""
        return "detect" if self.task == "detect" else self.purpose

    @property
    def least_image_tokens(self) -> int:
        """Tokens that a large image keeps at least."""
        if self.min_image_tokens is not None:
            return self.min_image_tokens
        return GROUNDING_TOKENS if self.good_for == "detect" else LEAST_TOKENS

    @property
    def floor(self) -> int:
        """Lowest acceptable value of `QUALITY`."""
        return QUALITY[self.quality]


def wishes_of(
    options: LoadOptions, *, sees: bool, backend: Engine | Literal["auto"] | None = None, **more: Any
) -> Wishes:
    """The wishes that options of loading express.

    Args:
        sees: whether the model takes images; it is then planned for one a request, unless `options` say more.
        backend: the engine, where the caller has decided.
        more: wishes that `LoadOptions` doesn't have, and values that override its own.
    """
    images = 0 if options.language_only or not sees else 1 if options.images is None else options.images
    # Who loads a model with so small a context means it, whatever pictures need.
    small = (options.context or 1 << 62) < images * LEAST_TOKENS + LEAST_ROOM_TOKENS
    names = {each.name for each in fields(Wishes)}
    wished = {name: getattr(options, name) for name in names if hasattr(options, name)}
    # An option that wasn't given may be "auto" or None, which is a wish of its own.
    wished |= {
        "images": images,
        "min_image_tokens": ANY_TOKENS if small else None,
        "backend": backend or options.backend,
        "concurrency": options.concurrency or 1,
        "weights": None if options.weights == "auto" else options.weights,
        "kv_cache": None if options.kv_cache == "auto" else options.kv_cache,
        "float32": None if options.dtype == "auto" else options.dtype == "float32",
        "step_graphs": options.step_graphs is not False,
    }
    known = {OPTION.get(name, name) for name in wished}
    beside = {name: value for name, value in options.said().items() if name not in known}
    also = tuple((name, value) for name, value in beside.items() if "plan" in ROWS[name].commands)
    return Wishes(**{**wished, "also": also, **more})

"""The variants of a comparison, every combination of the named formats, image sizes and models, and the
question about each picture: one of the tasks, with its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal, get_args

from PIL.Image import Image

from snugvl.backends.native.allocation import allocate
from snugvl.backends.place import TargetDevice
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.formats import WeightsName
from snugvl.core.messages import Capabilities, Request
from snugvl.core.options import KVCacheName, LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.core.sizes import format_size
from snugvl.errors import DoesNotFit, RequestError
from snugvl.planner.footprint.total import footprint
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Allocation
from snugvl.planner.settings import Settings, VisionFormat
from snugvl.tasks import ask, detect, scene

TaskName = Literal["caption", "ask", "detect", "scene"]
# Tokens of an answer by default: each is computed by every variant and by the reference.
MAX_TOKENS: Final[dict[TaskName, int]] = {"caption": 128, "ask": 256, "detect": 1024, "scene": 768}


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a picture.

    Attributes:
        text: the question of `ask`.
        objects: names of objects of `detect`; empty: every object.
        max_tokens: tokens of the answer, at most; None: the task's default.
    """

    task: TaskName
    text: str = ""
    objects: tuple[str, ...] = ()
    max_tokens: int = 0

    @property
    def limit(self) -> int:
        """Number of tokens of the answer, at most."""
        return self.max_tokens or MAX_TOKENS[self.task]

    @property
    def params(self) -> dict[str, Any]:
        """The question's parameters, in records."""
        said: dict[str, Any] = {"question": self.text} if self.task == "ask" else {}
        return said | ({"objects": list(self.objects)} if self.task == "detect" else {})

    def request(self, image: Image, model: Capabilities, max_pixels: int | None) -> Request:
        """The request that asks the question about `image`.

        Raises:
            RequestError: the model can't do such a task.
        """
        common: dict[str, Any] = {"sampling": SamplingParams(max_tokens=self.limit), "max_pixels": max_pixels}
        match self.task:
            case "ask":
                return ask.request([image], self.text, model, **common)
            case "detect":
                return detect.request(image, self.objects, model, **common)
            case "scene":
                scene.check(model)
                return scene.request(image, model, **common)
            case "caption":
                return ask.caption_request(image, model, **common)


MOST: Final = 16  # variants of one comparison: each answers every question


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model. `load`: options of loading, model and image size included; `tower_weights`:
    format of the vision tower's matrices; None leaves it to the plan."""

    load: LoadOptions
    tower_weights: VisionFormat | None = None


def variants_of(
    base: LoadOptions,
    *,
    weights: Sequence[str] = (),
    kv_cache: Sequence[str] = (),
    tower_weights: Sequence[str] = (),
    max_pixels: Sequence[int] = (),
    models: Sequence[str] = (),
) -> list[Variant]:
    """Every combination of the values; where none is named, the value of `base`.

    Raises:
        RequestError: an unknown value, or too many combinations.
    """
    _check("weights", weights, get_args(WeightsName))
    _check("kv_cache", kv_cache, get_args(KVCacheName))
    _check("tower_weights", tower_weights, get_args(VisionFormat))
    if bad := [pixels for pixels in max_pixels if pixels < 1]:
        raise RequestError(f"max_pixels must be at least 1, not {bad[0]}", field="max_pixels")
    axes: tuple[Sequence[object], ...] = (
        models or (base.model,),
        weights or (base.weights,),
        kv_cache or (base.kv_cache,),
        tower_weights or (None,),
        max_pixels or (base.max_pixels,),
    )
    made = [
        Variant(replace(base, model=model, weights=form, kv_cache=kv, max_pixels=pixels), tower)  # type: ignore[arg-type]
        for model, form, kv, tower, pixels in product(*map(dict.fromkeys, axes))
    ]
    if len(made) > MOST:
        raise RequestError(f"these are {len(made)} combinations; at most {MOST} are compared at once")
    return made


def _check(field: str, values: Sequence[str], known: Sequence[str]) -> None:
    if wrong := [value for value in values if value not in known]:
        raise RequestError(f"{field} {wrong[0]!r} is unknown; use {', '.join(known)}", field=field)


def name_of(variant: Variant, settings: Settings, reference: str, *, sized: bool) -> str:
    """The name of a variant in results: "int4 (vision tower in int8), fp8 KV cache, 1,000,000 pixels".

    Args:
        settings: the settings of its plan.
        reference: the reference's model.
        sized: whether variants differ in their image size.
    """
    parts = [settings.weights_name]
    if variant.load.model != reference:
        parts.insert(0, variant.load.model)
    if settings.kv == "fp8":
        parts.append("fp8 KV cache")
    if sized and variant.load.max_pixels is not None:
        parts.append(f"{variant.load.max_pixels:,} pixels")
    return ", ".join(parts)


def allocation_of(variant: Variant, place: TargetDevice, formats: Settings | None = None) -> Allocation:
    """The allocation of a variant's engine at `place`. `formats`: formats of an earlier run, which are kept
    even if fewer conversations fit at once.

    Raises:
        DoesNotFit: with the numbers.
        RequestError: no plan can meet what was asked.
    """
    facts = replace(facts_of(str(locate(variant.load.model)), offline=True), name=variant.load.model)
    found = allocate(facts, variant.load, place)
    kept = formats or found.settings
    tower = variant.tower_weights or kept.vision_weights
    settings = found.settings._replace(head=kept.head, vision_weights=tower)
    if settings == found.settings:
        return found
    least = settings._replace(
        pool_tokens=0, concurrency=1, step_graphs=False, draft_graphs=False, encoder_cache_bytes=0
    )
    for each in (settings, least):
        needed = footprint(inventory(facts), each, found.device)
        if needed.total_bytes <= found.usable_bytes:
            return replace(found, settings=each, footprint=needed)
    raise DoesNotFit(
        f"{variant.load.model} in {least.weights_name} needs {format_size(needed.total_bytes)}; "
        f"{format_size(found.usable_bytes)} is available"
    )

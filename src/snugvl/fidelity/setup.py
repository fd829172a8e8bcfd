"""From what somebody wants compared to a comparison that is planned and can run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from snugvl.backends.place import TargetDevice, device_of, place_on
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.checkpoint.safetensors import weight_files
from snugvl.core.options import LoadOptions
from snugvl.errors import InputError, RequestError
from snugvl.fidelity.comparison import Comparison
from snugvl.fidelity.participant import Participant, check_tokens, published
from snugvl.fidelity.progress import Tell
from snugvl.fidelity.stages import Item, Rival
from snugvl.fidelity.variants import Variant, allocation_of, name_of
from snugvl.fidelity.work import Work, folder_of
from snugvl.planner.plan import Allocation


def comparison_of(
    base: LoadOptions,
    variants: Sequence[Variant],
    items: Sequence[Item],
    *,
    passes: int,
    tell: Tell,
    pictures: Mapping[str, Any],
    reference_pixels: int | None = None,
    output: Path | None = None,
    resume: bool = False,
) -> tuple[Comparison, Work]:
    """Plan it. Pictures are as large for all as the smallest plan has them, where nobody says.

    Args:
        base: names the reference's model, and says which device and how much memory.
        passes: times that the reference is read, at most.
        pictures: by name, what tells one from another of the same name later.
        reference_pixels: what the reference's pictures are scaled down to; None: as the largest variant's.
        output: beside it the work is kept; None: in memory.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about a checkpoint.
        DoesNotFit: a variant has no room, with the numbers.
        RequestError: a wish that can't be met.
        InputError: there is an unfinished comparison already, or another one.
    """
    _refuse_gguf(base.model, *(variant.load.model for variant in variants))
    device = device_of(base.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # makes the context, so that all plans are of what is left beside it
    place = place_on(device, base.memory_bytes)
    what = {
        "model": base.model,
        "files": [[path.name, path.stat().st_size] for path in weight_files(locate(base.model))],
        "variants": [
            variant.load.said() | {"model": variant.load.model, "tower": variant.tower_weights}
            for variant in variants
        ],
        "pictures": dict(pictures),
        "questions": [
            [item.name, item.question.task, item.question.params, item.question.limit] for item in items
        ],
        "reference_pixels": reference_pixels,
    }
    settings = published(base, facts_of(str(locate(base.model)), offline=True), place)
    work = Work(None if output is None else folder_of(output), what, resume=resume)
    plans = [allocation_of(variant, place) for variant in variants]
    formats = [plan.settings.weights_name for plan in plans]
    limits = _limits(work, variants, plans, formats)
    largest = None if None in limits else max(limit for limit in limits if limit is not None)
    reference = Participant(base, settings, place, reference_pixels or largest)
    rivals = _rivals(reference, variants, plans, limits, place)
    made = Comparison(reference, rivals, items, base, passes=passes, work=work, tell=tell)
    return made, work


def _refuse_gguf(*models: str) -> None:
    """Layer by layer only safetensors files are read (`models/layered.py`)."""
    for model in models:
        if gguf_files(model) is not None:
            raise RequestError(
                f"{model} is a GGUF; compare reads safetensors alone, such as those it was made of",
                field="model",
            )


def _limits(
    work: Work, variants: Sequence[Variant], plans: Sequence[Allocation], formats: list[str]
) -> list[int | None]:
    """Pixels of each variant's pictures: as somebody said, else the fewest that any plan has."""
    before = work.records("limits")
    if before:
        if before[0]["formats"] != formats:
            raise InputError(
                f"the comparison began with {'; '.join(before[0]['formats'])}, and memory is for "
                f"{'; '.join(formats)} now; name the formats, or free memory"
            )
        kept: list[int | None] = before[0]["pixels"]
        return kept
    planned = [plan.settings.max_pixels for plan in plans]
    known = [pixels for pixels in planned if pixels is not None]
    common = min(known) if known else None
    limits = [variant.load.max_pixels or common for variant in variants]
    work.add("limits", {"pixels": limits, "formats": formats})
    return limits


def _rivals(
    reference: Participant,
    variants: Sequence[Variant],
    plans: Sequence[Allocation],
    limits: Sequence[int | None],
    place: TargetDevice,
) -> list[Rival]:
    """The variants with their names, each different.

    Raises:
        RequestError: two of them are the same, or one has other tokens than the reference.
    """
    sized = len(set(limits)) > 1
    found: dict[str, Rival] = {}
    for variant, plan, limit in zip(variants, plans, limits, strict=True):
        name = name_of(variant, plan.settings, reference.capabilities.model, sized=sized)
        if name in found:
            raise RequestError(f"two of the variants are the same here: {name}; leave one out")
        side = Participant(variant.load, plan.settings, place, limit)
        check_tokens(reference, side)
        found[name] = Rival(variant, side, name, plan.footprint.total_bytes)
    return list(found.values())

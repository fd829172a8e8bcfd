"""Reasons: why a wish excludes an option, why something does not fit (in bytes, with the component to blame
and a remedy), and why this engine was chosen and not the others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from snugvl.checkpoint.catalogue import find
from snugvl.core.formats import QUALITY
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import exact_size, format_size, megapixels
from snugvl.planner.budget import changed, free_for, programs_bytes
from snugvl.planner.capabilities import Option
from snugvl.planner.costs import no_fp8_cache
from snugvl.planner.engines import for_others, rules_of
from snugvl.planner.fit import Fitted, Fitter, highest
from snugvl.planner.footprint.total import Footprint, Reason
from snugvl.planner.footprint.vision import largest_image, pixels_for, scales
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.settings import ENGINES, PREFERRED, Engine, Settings
from snugvl.planner.wishes import LEAST_ROOM_TOKENS, Wishes


def why_not_more(fitter: Fitter, choice: Choice) -> list[Reason]:
    """Why not the model's largest images, and why not twice the context."""
    rejections = []
    base = choice.settings._replace(state_snapshots=0)  # they give way
    if base.images and scales(fitter.option.model) and fitter.wishes.max_pixels is None:
        most = largest_image(fitter.option.model, None).tokens
        context = max(
            base.context, min(most * base.images + LEAST_ROOM_TOKENS, fitter.wishes.context or 1 << 62)
        )
        tried = base._replace(context=context, max_pixels=pixels_for(fitter.option.model, most))
        if most > choice.tokens and fitter.fastest(tried) is None:
            leanest = _leanest(fitter, tried)
            fits = megapixels(choice.settings.max_pixels or 0)
            longer = f" in a context of {context:,}" if context > base.context else ""
            rejections.append(
                _rejection(
                    f"{most:,}-token images ({megapixels(leanest.settings.max_pixels or 0)}){longer}",
                    leanest,
                    f"at {fits} ({choice.tokens:,} tokens) it fits",
                    choice.footprint,
                )
            )
    wider = []
    if base.kv != "bf16" and fitter.wishes.kv_cache is None:
        wider.append(("the KV cache", base._replace(kv="bf16"), f"in {base.kv_name} it fits"))
    if base.vision_weights != "bf16":
        wider.append(("the vision tower", base._replace(vision_weights="bf16"), "in int8 it fits"))
    elif base.head != "bf16":
        both = base.embedding == "gpu"
        part, fits = ("embedding and lm_head", "they fit") if both else ("lm_head", "it fits")
        wider.append((part, base._replace(head="bf16"), f"in int8 {fits}"))
    for part, tried, fits in wider:
        if fitter.fastest(tried) is None:
            kind = tried.kv_name if tried.kv != base.kv else "bf16"
            what = f"{part} in {kind}, with the same {'images and ' if base.images else ''}context"
            rejections.append(_rejection(what, _leanest(fitter, tried), fits))
    limit = fitter.option.context_limit
    if fitter.wishes.context is None and base.context < limit:
        doubled = base._replace(context=min(limit, 2 * base.context))
        if fitter.fastest(doubled) is None:
            leanest = _leanest(fitter, doubled)
            what = f"a context of {doubled.context:,} tokens"
            rejections.append(_rejection(what, leanest, f"{base.context:,} tokens fit", choice.footprint))
    return rejections


def excluded(option: Option, wishes: Wishes) -> list[str | None]:
    """Which wishes exclude an option, each as a clause or None, in the order in which they are checked."""
    # A wish for bf16 on a CPU means weights that aren't quantised.
    narrowed = "bf16" if option.weights == "fp32" else option.weights
    facts, others = option.model.facts, for_others(option.engine, wishes.said())
    coarser = QUALITY[option.stored_quality] < wishes.floor
    blind = facts.vision is None and (wishes.images > 1 or wishes.good_for == "detect")
    unlike = wishes.weights not in (None, option.weights, narrowed)
    stored_as = rules_of(option.engine).stored_as(option)
    if facts.gguf is not None:
        stored_as = f"the file is {facts.gguf.file_type}; pull another quantisation"
    checks = {
        f"{wishes.weights} weights can't be made of it: {stored_as}": unlike,
        f"its weights are {option.stored_quality}, coarser than --quality {wishes.quality}": coarser,
        others: others is not None,
        "the checkpoint has no multi-token predictor for --speculation mtp; use ngram": wishes.speculation
        == "mtp"
        and not facts.predicts,
        "the model reads no images": blind,
        "its vendor doesn't say that it finds boxes": wishes.good_for == "detect"
        and not grounds(option.model),
    }
    return [why if so else None for why, so in checks.items()]


def no_cache(fitter: Fitter) -> str | None:
    """Why a wished format of the KV cache excludes an option, as a clause; None where it doesn't."""
    if fitter.kv_formats:
        return None
    return (
        no_fp8_cache(fitter.option) or f"its {fitter.wishes.kv_cache} KV cache needs compute capability 8.9"
    )


def no_goal(fitter: Fitter) -> str:
    limit, wishes = fitter.option.context_limit, fitter.wishes
    if wishes.context is not None and wishes.context > limit:
        most = fitter.option.model.facts.text.max_position_embeddings
        here = " here" if limit < most else ""
        longer = f"; transformers goes up to {most:,}" if here and wishes.context <= most else ""
        return f"its context ends at {limit:,} tokens{here}, {wishes.context:,} are asked for{longer}"
    if (most := largest_image(fitter.option.model, None).tokens) < wishes.least_image_tokens:
        return f"its largest image has {most:,} tokens, {wishes.least_image_tokens:,} are asked for"
    return f"{wishes.images} image(s) of at least {wishes.least_image_tokens:,} tokens leave no room for text"


def grounds(model: Inventory) -> bool:
    """Whether a model finds boxes, as its vendor says; a model outside of the catalogue is taken to."""
    known = find(model.name)
    return known is None or known[0].grounds


def _leanest(fitter: Fitter, base: Settings) -> Fitted:
    tokens = largest_image(fitter.option.model, base.max_pixels).tokens
    tried = [fitter.fitted(settings, tokens) for settings in fitter.variants(base)]
    return min(tried, key=lambda fitted: fitted.footprint.total_bytes)


def why_not_fitting(fitter: Fitter) -> Reason:
    """Why an option does not fit at all, and what would."""
    least = fitter.least
    images = f", {least.tokens:,}-token images" if least.tokens else ""
    what = f"{fitter.option.title}, {least.settings.context:,} tokens of context{images}"
    return replace(_rejection(what, least, _remedy(fitter, least)), model=fitter.option.model.name)


def _remedy(fitter: Fitter, least: Fitted) -> str | None:
    """A tried change that makes it fit, as a clause: options, or memory of other programs; or None."""
    lent, limit = programs_bytes(least.budget), fitter.wishes.memory_bytes
    for text, wishes in _changes(fitter, least):
        if _fits(fitter, wishes):
            return f"it fits with {text}"
    given = -(-(free_for(least.budget, least.footprint.total_bytes) - least.budget.free_bytes) >> 20) << 20
    freed = [changed(budget, budget.free_bytes + given, limit) for budget in fitter.budgets]
    if 0 < given <= lent and Fitter(fitter.option, fitter.wishes, freed, fitter.host).any:
        where = " on each GPU" if least.settings.gpus > 1 else ""
        back = f"{given >> 20:,} MiB back{where}, of {format_size(lent)} that they hold; a tenth stays free"
        return f"it fits when other programs give {back}"
    return None


def _fits(fitter: Fitter, wishes: Wishes) -> bool:
    """Whether the option fits with other wishes than the fitter's."""
    found = fitter.budgets
    if wishes.memory_bytes != fitter.wishes.memory_bytes:
        found = [changed(budget, budget.free_bytes, wishes.memory_bytes) for budget in found]
    return Fitter(fitter.option, wishes, found, fitter.host).any


def _changes(fitter: Fitter, least: Fitted) -> Iterator[tuple[str, Wishes]]:
    """(options, wishes with them) of each change that might make it fit."""
    wishes = fitter.wishes
    if wishes.max_pixels is not None and least.settings.images:
        pixels = pixels_for(fitter.option.model, wishes.least_image_tokens)
        yield f"--max-pixels {pixels}", replace(wishes, max_pixels=pixels)
    if wishes.context is not None and (context := fitter.longest_context_at(least.settings)) is not None:
        yield f"--context {context}", replace(wishes, context=context)
    if wishes.concurrency > 1:
        most = min(wishes.concurrency - 1, MOST_AT_ONCE)
        count = highest(1, most, 1, lambda n: _fits(fitter, replace(wishes, concurrency=n)))
        yield f"--concurrency {count}", replace(wishes, concurrency=count)
    if wishes.memory_bytes is not None:
        needed = -(-(wishes.memory_bytes + least.missing_bytes) >> 20) << 20
        yield f"--memory {exact_size(needed)}", replace(wishes, memory_bytes=needed)


def _rejection(what: str, fitted: Fitted, remedy: str | None, instead_of: Footprint | None = None) -> Reason:
    """Why `what` doesn't fit; the component that grew most from `instead_of`, which fits, is to blame."""
    name, nbytes = blame(fitted.footprint, instead_of)
    short = max(fitted.missing_bytes, 1)
    return Reason(fitted.settings.engine, what, "", short, name, nbytes, remedy)


def blame(footprint: Footprint, instead_of: Footprint | None = None) -> tuple[str, int]:
    """(name, bytes) of the total's largest component, or of the one that grew most from another footprint."""
    sums, before = _sums(footprint), _sums(instead_of) if instead_of else {}
    name = max(sums, key=lambda key: sums[key] - before.get(key, 0))
    return name, sums[name]


def _sums(footprint: Footprint) -> dict[str, int]:
    """Bytes of the counted components by name, all weights under one."""
    sums: dict[str, int] = {}
    for component in footprint.counted:
        name = Kind.WEIGHTS.value if component.kind.group is Kind.WEIGHTS else component.name
        sums[name] = sums.get(name, 0) + component.nbytes
    return sums


def refusal_line(plan: Plan) -> str:
    """One line for `DoesNotFit`: what is missing and the way out."""
    closest, budget = plan.closest, plan.budget
    if closest is None:
        return f"nothing can run what was asked for: {_refused(plan) or 'no model allows these wishes'}"
    name, nbytes = blame(closest.footprint)
    takes = f"{format_size(closest.footprint.total_bytes)} ({name} {format_size(nbytes)})"
    short = closest.footprint.total_bytes - budget.usable_bytes
    line = (
        f"{closest.option.model.name} does not fit {budget.name}: the smallest way, {closest.option.weights} "
        f"with {rules_of(closest.option.engine).title}, takes {takes}, "
        f"{format_size(short)} more than the {format_size(budget.usable_bytes)} that may be used"
    )
    return f"{line}; {way_out(plan)}"


def by_reason(refusals: Iterable[Reason]) -> list[tuple[str, tuple[str, ...], list[Engine]]]:
    """Refusals by reason: (reason, models, the engines that refuse all of these models for it)."""
    models: dict[tuple[Engine, str], list[str]] = {}
    for refusal in refusals:
        models.setdefault((refusal.engine, refusal.text), []).append(refusal.model)
    engines: dict[tuple[str, tuple[str, ...]], list[Engine]] = {}
    for (engine, reason), names in models.items():
        engines.setdefault((reason, tuple(names)), []).append(engine)
    return [(reason, names, found) for (reason, names), found in engines.items()]


def _refused(plan: Plan) -> str:
    """Why no engine runs a model, a clause for each reason; the reason of most engines comes first."""
    ranked = sorted(by_reason(plan.refusals), key=lambda each: -len(each[2]))
    clauses = (f"{', '.join(names)} with {' and '.join(found)}: {reason}" for reason, names, found in ranked)
    return "; ".join(clauses)


MOST_AT_ONCE: Final = 1 << 20  # requests; their states alone fill any GPU
LARGEST_BYTES: Final = 192 << 30  # of the GPUs of the table


def way_out(plan: Plan) -> str:
    """The clause that says what to do where nothing fits."""
    remedies = [each.remedy for each in (*plan.rejections, *plan.refusals) if each.remedy]
    if plan.instead is not None:
        other = plan.instead
        on = f" on {other.settings.gpus} GPUs" if other.settings.gpus > 1 else ""
        how = f"in {other.settings.weights_name}, with {rules_of(other.option.engine).title}{on}"
        fits = f"{other.option.model.name} fits, {how}"
        return f"{remedies[0]}; {fits}" if remedies and plan.wishes.concurrency > 1 else fits
    if remedies:
        return remedies[0]
    fewer = (
        "a file with fewer bits a weight, " if plan.closest and plan.closest.option.model.facts.gguf else ""
    )
    if plan.closest and plan.closest.footprint.total_bytes > LARGEST_BYTES:
        return f"use {fewer}a smaller model, or a shorter context: no GPU has so much memory"
    more = "machine" if plan.budget.device.unified or plan.budget.gpu is None else "GPU"
    limit = ", and no --memory" if plan.wishes.memory_bytes is not None else ""
    return f"use {fewer}a smaller model, or a {more} with more memory{limit}"


def verdicts(
    best: Choice, choices: Sequence[Choice], failed: Iterable[Fitter], refusals: Iterable[Reason]
) -> tuple[Reason, ...]:
    """Why each other engine does not run the chosen model, or runs it less well."""
    name = best.option.model.name
    refused = {refusal.engine: refusal.text for refusal in refusals if refusal.model == name}
    failures = [fitter for fitter in failed if fitter.option.model.name == name]
    found = []
    for engine in ENGINES:
        if engine == best.option.engine:
            continue
        rival = next(
            (each for each in choices if (each.option.model.name, each.option.engine) == (name, engine)), None
        )
        short = [fitter.least for fitter in failures if fitter.option.engine == engine]
        if rival is not None:
            found.append(Reason(engine, _behind(best, rival)))
        elif engine in refused:
            found.append(Reason(engine, refused[engine]))
        elif short:
            least = min(short, key=lambda each: each.missing_bytes)
            total, missing = format_size(least.footprint.total_bytes), format_size(least.missing_bytes)
            found.append(Reason(engine, f"it needs at least {total}, {missing} more than may be used"))
    return tuple(found)


def _behind(best: Choice, rival: Choice) -> str:
    """The clause that says what a rival that fits has less of."""
    if QUALITY[rival.option.stored_quality] < QUALITY[best.option.stored_quality]:
        return f"it fits in {rival.settings.weights_name} only"
    if best.settings.images and rival.tokens < best.tokens:
        return f"it fits with smaller images, {rival.tokens:,} tokens each"
    if rival.settings.context < best.settings.context:
        return f"it fits with a shorter context, {rival.settings.context:,} tokens"
    if rival.settings.gpus > best.settings.gpus:
        return f"it fits on {rival.settings.gpus} GPUs"
    return "it fits as well; the chosen one is preferred"


def why_engine(plan: Plan) -> str:
    """The chosen engine and the reason, in one line."""
    choice = plan.choice
    assert choice is not None, "nothing was chosen"
    engine, settings = choice.option.engine, choice.settings
    if choice.option.offload:
        beside = "experts" if settings.host_experts and not settings.offloaded else "layers"
        reason = f"nothing here holds the model whole, and it can keep {beside} in host memory"
    elif plan.wishes.backend == engine:
        reason = "as asked for"
    elif trait := rules_of(engine).why(choice):
        reason = trait
    elif settings.data_parallel > 1:
        reason = f"{settings.data_parallel} GPUs with a copy each for {settings.concurrency} requests at once"
    elif settings.gpus > 1:
        reason = f"{settings.gpus} GPUs share what one can't hold"
    else:
        better = next((verdict for verdict in plan.verdicts if verdict.engine == PREFERRED), None)
        reason = better.text if better else "it is the best that fits"
    return f"{engine}: {reason}"

"""Why this engine and not the others, in clauses with numbers."""

from collections.abc import Iterable, Sequence

from snugvl.core.formats import QUALITY
from snugvl.core.sizes import format_size
from snugvl.planner.capabilities import Refusal
from snugvl.planner.engines import rules_of
from snugvl.planner.fit import Fitter
from snugvl.planner.plan import Choice, Plan, Verdict
from snugvl.planner.settings import ENGINES, PREFERRED


def verdicts(
    best: Choice, choices: Sequence[Choice], failed: Iterable[Fitter], refusals: Iterable[tuple[str, Refusal]]
) -> tuple[Verdict, ...]:
    """Why each other engine does not run the chosen model, or runs it less well."""
    name = best.option.model.name
    refused = {refusal.engine: refusal.reason for model, refusal in refusals if model == name}
    failures = [fitter for fitter in failed if fitter.option.model.name == name]
    found = []
    for engine in ENGINES:
        if engine == best.option.engine:
            continue
        rival = next(
            (each for each in choices if (each.option.model.name, each.option.engine) == (name, engine)), None
        )
        short = [_shortage(fitter) for fitter in failures if fitter.option.engine == engine]
        if rival is not None:
            found.append(Verdict(engine, _behind(best, rival)))
        elif engine in refused:
            found.append(Verdict(engine, refused[engine]))
        elif short:
            found.append(Verdict(engine, min(short)[1]))
    return tuple(found)


def _shortage(fitter: Fitter) -> tuple[int, str]:
    least = fitter.least
    total = least.footprint.total_bytes
    missing = least.missing_bytes
    return missing, f"it needs at least {format_size(total)}, {format_size(missing)} more than may be used"


def _behind(best: Choice, rival: Choice) -> str:
    """What a rival that fits has less of."""
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
        reason = "nothing here holds the model whole, and it can keep layers in main memory"
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
        reason = better.reason if better else "it is the best that fits"
    return f"{engine}: {reason}"


def why_not_engines(plan: Plan) -> list[str]:
    """One line for each engine that wasn't chosen."""
    return [f"not {verdict.engine}: {verdict.reason}" for verdict in plan.verdicts]

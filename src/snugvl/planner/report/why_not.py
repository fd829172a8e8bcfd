"""Why not more, or why not at all: one line for each reason, of all models that it holds for."""

from collections.abc import Iterator, Sequence
from typing import Final

from snugvl.core.sizes import format_size
from snugvl.planner.plan import Plan
from snugvl.planner.settings import ENGINE_NAMES, Engine
from snugvl.planner.speed import speed_text

NAMED: Final = 3  # of many models that are refused alike


def why_not(plan: Plan) -> list[str]:
    """The lines, those that a person can act on first."""
    return [*_slower(plan), *_rejected(plan), *_refused(plan)]


def _slower(plan: Plan) -> Iterator[str]:
    """Better models, which people would miss: they fit."""
    for choice in plan.slower:
        name = choice.option.model.name
        yield (
            f"{name} in {choice.settings.weights_name} fits, too, and is better by its published scores, but "
            f"slower: {speed_text(choice.speed)}; snugvl plan {name} says more"
        )


def _rejected(plan: Plan) -> Iterator[str]:
    found: dict[str, list[str]] = {}  # models of one shape are refused alike
    for rejection in plan.rejections:
        why = f"{rejection.blame} alone would take {format_size(rejection.blame_bytes)}"
        line = f"{rejection.what}: {format_size(rejection.short_bytes)} too much ({why})"
        line = f"{line}; {rejection.remedy}" if rejection.remedy else line
        found.setdefault(line.removeprefix(rejection.model), []).append(rejection.model)
    for line, models in found.items():
        yield f"{', '.join(filter(None, models))}{line}"


def _refused(plan: Plan) -> Iterator[str]:
    """Engines that can't be had; of the chosen model `Report.engines` says it, and that llama.cpp wants a
    GGUF is said where nothing runs."""
    chosen = plan.choice
    reasons: dict[tuple[str, tuple[str, ...]], list[Engine]] = {}
    by_engine: dict[tuple[Engine, str], list[str]] = {}
    for name, refusal in plan.refusals:
        left_out = chosen is not None and (name == chosen.option.model.name or refusal.engine == "llamacpp")
        if not left_out and not (chosen is not None and chosen.option.engine == "llamacpp"):
            by_engine.setdefault((refusal.engine, refusal.reason), []).append(name)
    for (engine, reason), names in by_engine.items():
        reasons.setdefault((reason, tuple(names)), []).append(engine)
    for (reason, those), engines in sorted(reasons.items(), key=lambda each: "GGUF" in each[0][0]):
        yield f"{_listed(those)} with {' or '.join(ENGINE_NAMES[each] for each in engines)}: {reason}"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} more models"

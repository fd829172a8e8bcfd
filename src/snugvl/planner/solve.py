"""From models, a machine and wishes to a plan.

Every option (model × format × engine) is brought to its best (`fit.py`), then one order decides:

    model quality > weight format (FP8 as good as bf16) > KV format > images and context up to comfort
    > bf16 before FP8 > bf16 head before int8 head > engine (native first) > images > context > fewer GPUs
    > CUDA graphs > chunk > sequences at once

As the order is fixed and what fits in less memory fits in more, a plan never gets worse with more memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.errors import DoesNotFit
from snugvl.hardware.machine import Machine
from snugvl.planner.budget import Budget, budgets
from snugvl.planner.capabilities import Option, Refusal, options
from snugvl.planner.fit import Fitted, Fitter
from snugvl.planner.footprint.images import scales
from snugvl.planner.goals import comfort
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice, Pending, Plan, Rejection
from snugvl.planner.settings import Engine, WeightFormat
from snugvl.planner.shortfall import refusal_line, why_not_fitting, why_not_more
from snugvl.planner.speed import roofline
from snugvl.planner.wishes import FORMAT_QUALITY, FORMAT_TIER, Wishes

ENGINE_ORDER: Final[dict[Engine, int]] = {"native": 2, "vllm": 1, "transformers": 0}
RUNNERS_UP: Final = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to choose from. `quality`: higher is better; equal for the formats of one model."""

    facts: ModelFacts
    quality: int = 0


def solve(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> Plan:
    """The best plan; one without a choice where nothing fits (`require` raises then).

    Raises:
        RequestError: the wishes exclude every model, with the reason.
    """
    found = budgets(machine, wishes.memory_bytes)
    fitters: list[tuple[Fitter, int]] = []
    refusals: list[tuple[str, Refusal]] = []
    for candidate in candidates:
        model = inventory(candidate.facts)
        possible, refused = options(model, found[0].device, machine.os, wishes.weights)
        refusals += [
            (model.name, refusal) for refusal in refused if wishes.backend in ("auto", refusal.engine)
        ]
        for option in possible:
            if not _allowed(option, wishes):
                continue
            fitter = Fitter(option, wishes, found)
            if fitter.goals:
                fitters.append((fitter, candidate.quality))
            else:
                refusals.append((model.name, Refusal(option.engine, _no_goal(fitter))))
    return _decide(fitters, refusals, wishes, found)


def require(plan: Plan) -> Choice:
    """The choice of a plan.

    Raises:
        DoesNotFit: nothing fits; the message has the numbers and the way out.
    """
    if plan.choice is not None:
        return plan.choice
    raise DoesNotFit(refusal_line(plan))


def _allowed(option: Option, wishes: Wishes) -> bool:
    engine = wishes.backend in ("auto", option.engine)
    return (
        engine
        and wishes.weights in (None, option.weights, _narrowed(option.weights))
        and FORMAT_QUALITY[option.stored_quality] >= wishes.floor
        and bool(not wishes.images or option.model.facts.vision or wishes.images == 1)
    )


def _narrowed(weights: WeightFormat) -> WeightFormat:
    """Who wishes bf16 on a CPU wishes weights that aren't quantised."""
    return "bf16" if weights == "fp32" else weights


def _no_goal(fitter: Fitter) -> str:
    model, wishes = fitter.option.model, fitter.wishes
    limit = model.facts.text.max_position_embeddings
    if wishes.context is not None and wishes.context > limit:
        return f"its context ends at {limit:,} tokens, {wishes.context:,} are wished"
    return f"{wishes.images} image(s) of at least {wishes.least_image_tokens:,} tokens leave no room for text"


def _decide(
    fitters: list[tuple[Fitter, int]],
    refusals: list[tuple[str, Refusal]],
    wishes: Wishes,
    found: list[Budget],
) -> Plan:
    choices: list[Choice] = []
    failed: list[tuple[Fitter, int]] = []
    soon: list[tuple[Fitter, Fitted, int]] = []
    for fitter, quality in fitters:
        fitted = fitter.best()
        if fitted is None:
            failed.append((fitter, quality))
        elif fitter.option.pending:
            soon.append((fitter, fitted, quality))
        else:
            choices.append(_choice(fitter, fitted, quality))
    choices.sort(key=lambda choice: choice.score, reverse=True)
    best = choices[0] if choices else None
    rejections = _rejections(best, fitters, failed)
    nearest = min(
        (fitter for fitter, _ in failed if not fitter.option.pending),
        key=lambda fitter: _missing(fitter.least()),
        default=None,
    )
    closest = _choice(nearest, nearest.least(), 0) if nearest and best is None else None
    return Plan(
        wishes,
        best.budget if best else (closest.budget if closest else found[0]),
        best,
        _runners_up(choices),
        rejections,
        _pending(soon, best),
        tuple(refusals),
        closest,
    )


def _missing(fitted: Fitted) -> int:
    return fitted.footprint.total_bytes - fitted.budget.usable_bytes


def _choice(fitter: Fitter, fitted: Fitted, quality: int) -> Choice:
    option, settings = fitter.option, fitted.settings
    gpus = tuple(budget.gpu for budget in fitter.budgets[: settings.gpus] if budget.gpu is not None)
    fixed = not scales(option.model)
    goal = [
        goal for goal in fitter.goals if goal.tokens <= fitted.tokens and goal.context <= settings.context
    ]
    step = goal[-1] if goal else fitter.goals[0]
    score = (
        quality,
        FORMAT_TIER[option.stored_quality],
        0 if settings.kv == "fp8" else 1,
        *comfort(step.tokens, step.context, fixed),
        FORMAT_QUALITY[option.stored_quality],
        1 if option.head == "bf16" else 0,
        ENGINE_ORDER[option.engine],
        step.tokens,
        step.context,
        -settings.gpus,
        fitted.tokens,
        settings.context,
        0 if settings.eager else 1,
        settings.chunk,
        settings.sequences,
    )
    speed = roofline(option.model, settings, fitted.budget.gpu)
    return Choice(option, settings, fitted.tokens, fitted.footprint, fitted.budget, speed, score, gpus)


def _runners_up(choices: list[Choice]) -> tuple[Choice, ...]:
    """The next best, one per model and engine."""
    seen = {(choices[0].option.model.name, choices[0].option.engine)} if choices else set()
    kept = []
    for choice in choices[1:]:
        key = (choice.option.model.name, choice.option.engine)
        if key not in seen:
            seen.add(key)
            kept.append(choice)
    return tuple(kept[:RUNNERS_UP])


def _rejections(
    best: Choice | None,
    fitters: list[tuple[Fitter, int]],
    failed: list[tuple[Fitter, int]],
) -> tuple[Rejection, ...]:
    rejections: list[Rejection] = []
    if best is not None:
        fitter = next(fitter for fitter, _ in fitters if fitter.option is best.option)
        rejections += why_not_more(fitter, best)
    nearest: dict[str, tuple[int, Fitter]] = {}
    several = len({fitter.option.model.name for fitter, _ in fitters}) > 1
    for fitter, quality in failed:
        if best is not None and (fitter.option.pending or quality < best.score[0]):
            continue
        # Of several models, each is refused once, where it comes nearest.
        option = fitter.option
        key = option.model.name if several else f"{option.model.name} {option.weights} {option.engine}"
        missing = _missing(fitter.least())
        if key not in nearest or missing < nearest[key][0]:
            nearest[key] = (missing, fitter)
    ordered = sorted(nearest.values(), key=lambda entry: entry[0])
    return tuple(rejections + [why_not_fitting(fitter) for _, fitter in ordered])


def _pending(soon: list[tuple[Fitter, Fitted, int]], best: Choice | None) -> tuple[Pending, ...]:
    """Formats that are on their way and would be better: another model, or a leaner or longer run."""
    kept: list[Pending] = []
    soon = sorted(soon, key=lambda entry: (-entry[2], -FORMAT_QUALITY[entry[0].option.stored_quality]))
    for fitter, fitted, quality in soon:
        option = fitter.option
        if best is not None and quality < best.score[0]:
            continue
        if best is not None and best.option.engine == "native" and quality == best.score[0]:
            continue
        if any(entry.option.model.name == option.model.name for entry in kept):
            continue
        total = fitted.footprint.total_bytes
        kept.append(Pending(option, fitted.tokens, fitted.settings.context, total))
    return tuple(kept[:RUNNERS_UP])

"""The solver: from candidate models, a machine and wishes to a plan.

Every option (model × format × engine) is brought to its best (`fit.py`), then one order decides: that of the
fields of `Score` (`plan.py`). So a format is never made finer at the price of comfort, and a noticeably
coarser one comes only for comfort. A tower streams where nothing else fits; with more memory it comes back as
soon as images and context are no smaller than they were without it (`_placed`). Where a named model fits
nowhere, transformers may keep layers in host memory: up to comfort, as few layers as
possible. A plan without a model never does: it recommends what runs well.

As the order is fixed and what fits in less memory fits in more, a plan never gets worse with more memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.config import SpeculationName
from snugvl.core.formats import QUALITY
from snugvl.core.options import TowerName
from snugvl.errors import DoesNotFit
from snugvl.hardware.machine import Machine
from snugvl.planner.budget import Budget, budgets, host_budget
from snugvl.planner.capabilities import Option, options
from snugvl.planner.costs import cost
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.native.hybrid import SNAPSHOTS
from snugvl.planner.fit import Fitted, Fitter
from snugvl.planner.footprint.total import Reason
from snugvl.planner.footprint.vision import largest_image, pixels_for, scales
from snugvl.planner.goals import COMFORT, HOST_TOKENS
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice, Plan, Score, SpeedTier
from snugvl.planner.settings import Engine, Settings
from snugvl.planner.shortfall import (
    excluded,
    no_cache,
    no_goal,
    refusal_line,
    verdicts,
    why_not_fitting,
    why_not_more,
)
from snugvl.planner.speed import Speed, roofline
from snugvl.planner.wishes import LEAST_ROOM_TOKENS, Wishes

RUNNERS_UP: Final = 3
MOST_SLOWER: Final = 2
# A model that can't be quicker than this, even in theory, is never recommended.
LEAST_RATE: Final = 5.0  # tokens a second
MOST_WAITING_S: Final = 45.0  # for the first token


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to choose from.

    Attributes:
        source: its facts, or a function that reads them when they are needed, as few of many candidates are.
        quality: its rank, higher is better; equal for the formats of one model.
    """

    source: ModelFacts | Callable[[], ModelFacts]
    quality: int = 0

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""
        return self.source if isinstance(self.source, ModelFacts) else self.source()


def solve(
    candidates: Sequence[Candidate],
    machine: Machine,
    wishes: Wishes,
    missing: Mapping[str, str] | None = None,
    found: Sequence[Budget] | None = None,
    *,
    reasons: bool = True,
) -> Plan:
    """The best plan; one without a choice where nothing fits (`require` raises then).

    Args:
        missing: engines (and "bitsandbytes") that are not installed where it will run, each with the remedy.
        found: a budget for each device, where the caller knows them better than `machine` tells.
        reasons: whether the plan says why others weren't chosen, with what would change that, and what the
            tower's other place would give. A caller that reads the choice alone saves half of the time.

    Raises:
        RequestError: the wishes exclude every model, with the reason.
    """
    if wishes.speculation == "auto":
        off = replace(wishes, speculation="off")
        plain = solve(candidates, machine, off, missing, found, reasons=reasons)
        return replace(_guessing(plain, machine, found), wishes=wishes)
    unused = machine.others and not machine.gpus and not found
    if unused and all(candidate.facts.gguf is not None for candidate in candidates):
        machine = replace(machine, gpus=machine.others)  # llama.cpp's alone
    found = list(found or budgets(machine, wishes.memory_bytes))
    led = len({candidate.quality for candidate in candidates}) > 1
    fitters: list[Fitter] = []
    refusals: list[Reason] = []
    choices: list[Choice] = []
    slow: list[Choice] = []
    passed_over: list[Fitter] = []
    for candidate in sorted(candidates, key=lambda each: -each.quality):
        if led and _enough(choices, candidate.quality):
            break
        possible, refused = _possible(candidate, machine, wishes, found, missing or {})
        # Slower, measured on one kind of GPU: for models that are named, never recommended.
        tried = [fitter for fitter in possible if not led or _leads(fitter)]
        fitters += tried
        passed_over += [fitter for fitter in possible if led and not _leads(fitter)]
        if not led or not tried:  # of one that is too large, its size is what keeps it from running
            refusals += refused
        made = _placed(tried, _choices(tried, led=led))
        # By what would run of it: who then names the model gets the same plan.
        best = max(made, key=lambda choice: choice.score, default=None)
        if led and best is not None and not _bearable(best, wishes):
            slow.append(best)
        else:
            choices += made
    if not choices:  # rather than nothing: too slow to be recommended, but it fits
        choices, slow = slow, []
    plan = _decide(fitters, choices, refusals, wishes, found, reasons=reasons)
    plan = replace(plan, slower=_slower(slow, plan.choice))
    if reasons and wishes.tower == "auto" and (place := _other_place(choices)) is not None:
        chosen = [each for each in candidates if each.facts.name == choices[0].option.model.name]
        other = solve(chosen, machine, replace(wishes, tower=place), missing, found, reasons=False)
        plan = replace(plan, other_tower=other.choice)
    if plan.choice is not None and passed_over:
        pinned = _named_otherwise(plan.choice, [*fitters, *passed_over])
        plan = replace(plan, choice=replace(plan.choice, pinned=pinned))
    if plan.choice is None and len(candidates) == 1 and machine.gpus:
        return _offloaded(plan, fitters, host_budget(machine))
    return plan


def choice_for(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> Choice | None:
    """The choice of the best plan, without why the others weren't chosen; None where nothing fits.

    Raises:
        RequestError: the wishes exclude every model, with the reason.
    """
    return solve(candidates, machine, wishes, reasons=False).choice


def _guessing(plan: Plan, machine: Machine, found: Sequence[Budget] | None) -> Plan:
    """The plan with the chosen model's predictor, where the model has one and it takes nothing but a part of
    the cache that all requests share.

    On a CPU a step's time grows with its rows, and drafts win nothing.
    """
    choice = plan.choice
    if choice is None or choice.budget.device.cpu or choice.option.model.facts.predictor is None:
        return plan
    if "speculation" not in rules_of(choice.option.engine).honours:
        return plan
    wishes = replace(plan.wishes, backend=choice.option.engine, speculation="mtp")
    candidate = Candidate(choice.option.model.facts, choice.quality)
    budgets_ = list(found or budgets(machine, wishes.memory_bytes))
    for fitter in _possible(candidate, machine, wishes, budgets_, {})[0]:
        settings = fitter.guessing(choice.settings)
        if settings is not None:
            guessing = _choice(fitter, fitter.fitted(settings, choice.tokens))
            kept = replace(guessing, score=choice.score, pinned=choice.pinned)
            return replace(plan, choice=kept)
    return plan


def _leads(fitter: Fitter) -> bool:
    """Whether an option may be recommended: no tower that streams unasked, no weights by bitsandbytes."""
    option = fitter.option
    return option.parts.vision in ("gpu", fitter.wishes.tower) and not option.by_bits


def _named_otherwise(choice: Choice, fitters: Sequence[Fitter]) -> frozenset[str]:
    """The wishes that a recommended model's command must name, as its name alone gives another plan.

    Args:
        fitters: all of the model's, also those that aren't recommended.
    """
    named = [fitter for fitter in fitters if fitter.option.model.name == choice.option.model.name]
    rivals = _placed(named, _choices(named))
    mine = max(rival.score for rival in rivals if rival.settings == choice.settings)
    better = [rival.option for rival in rivals if rival.score > mine]
    wishes = {"weights": any(each.by_bits for each in better), "tower": any(each.streams for each in better)}
    return frozenset(name for name, needed in wishes.items() if needed)


def _choices(fitters: Sequence[Fitter], *, led: bool = False) -> list[Choice]:
    """The best of each option of a model, but of those that `_outdone` rules out: to find the best takes most
    of a plan's time."""
    found: list[Choice] = []
    for fitter in fitters:
        outdone = any(_outdone(fitter, choice, led=led) for choice in found)
        if not outdone and (fitted := fitter.best) is not None:
            found.append(_choice(fitter, fitted, led=led))
    return found


def _outdone(fitter: Fitter, choice: Choice, *, led: bool) -> bool:
    """Whether all that an option can reach is worse than a choice of the same engine with the tower in the
    same place: that one has comfort, in finer formats. `_placed` asks for sight as well, but not where the
    plan chooses the model."""
    mine, other, score = fitter.option, choice.option, choice.score
    alike = mine.engine == other.engine and mine.streams == other.streams
    comfortable = score.comfort == COMFORT[fitter.wishes.good_for] and score.led == led
    sees = led or score.sight >= fitter.goals[-1].step[:2]
    return alike and comfortable and sees and score.format > -fitter.finest


def _placed(fitters: Sequence[Fitter], choices: list[Choice]) -> list[Choice]:
    """One model's choices, with their scores' `tower` set: whether the vision tower is where it should be.

    It streams where nothing else fits. What streaming gives is never lost with more memory: the tower comes
    back to the GPU where images and context are no smaller.
    """
    able = [fitter for fitter in fitters if "tower" in fitter.rules.honours]
    resident = [choice for choice in choices if not choice.option.streams]
    least = [fitter.least.footprint.total_bytes for fitter in able if not fitter.option.streams]
    if len(resident) in (0, len(choices)) or not least:
        return choices
    reached = max(choice.score.sight for choice in resident)
    if max(choice.score.sight for choice in choices) <= reached:
        return choices
    bounded = [fitter.reaching(min(least) - 1) for fitter in able if fitter.option.streams]
    streamed = _choices([fitter for fitter in bounded if fitter.goals])
    if max((choice.score.sight for choice in streamed), default=reached) <= reached:
        return choices
    every = (*resident, *streamed)
    return [replace(each, score=each.score._replace(tower=each.option.streams)) for each in every]


def _possible(
    candidate: Candidate, machine: Machine, wishes: Wishes, found: list[Budget], missing: Mapping[str, str]
) -> tuple[list[Fitter], list[Reason]]:
    """Fitters of what may be tried with one model, and why engines among those asked for can't run it."""
    facts = candidate.facts
    model = inventory(facts.with_predictor() if wishes.speculation == "mtp" else facts)
    possible, refused = options(model, found[0].device, machine.os, wishes)
    refusals = {refusal.engine: refusal for refusal in refused}
    passed: dict[
        Engine, int
    ] = {}  # checks, by the option of an engine that passes most: its refusal is the true one
    fitters: list[Fitter] = []
    for option in possible:
        fitter = Fitter(option, wishes, found, quality=candidate.quality)
        if option.by_bits and "bitsandbytes" in missing and wishes.weights is None:
            continue
        checks = [missing.get(option.engine), *excluded(option, wishes), no_cache(fitter)]
        place = next((number for number, why in enumerate(checks) if why), len(checks))
        why = no_goal(fitter) if place == len(checks) and not fitter.goals else [*checks, None][place]
        if why and place >= passed.get(option.engine, 0):
            passed[option.engine], refusals[option.engine] = place, Reason(option.engine, why)
        elif not why and wishes.backend in ("auto", option.engine):
            fitters.append(fitter)
    if wishes.backend == "auto":
        fitters = _of_one(fitters)
    tried = {fitter.option.engine for fitter in fitters}
    asked = (each for each in refusals.values() if wishes.backend in ("auto", each.engine))
    return fitters, [replace(each, model=facts.name) for each in asked if each.engine not in tried]


def _of_one(fitters: list[Fitter]) -> list[Fitter]:
    """Fitters for a GGUF: of the engine that reads nothing else, where it is there; else ours, on a GPU."""
    theirs = [each for each in fitters if rules_of(each.option.engine).reads_only_gguf]
    gguf = any(each.option.model.facts.gguf is not None and each.cpu for each in fitters)
    return theirs if theirs or gguf else fitters


def _offloaded(plan: Plan, fitters: list[Fitter], host: Budget) -> Plan:
    """A plan with layers in host memory, or the plan with the reason why that doesn't fit either."""
    for fitter in fitters:
        rules = rules_of(fitter.option.engine)
        if not rules.offloads:
            continue
        option = rules.offloading(fitter.option, fitter.budgets[0].device)
        if isinstance(option, Reason):
            return replace(plan, refusals=(*plan.refusals, replace(option, model=fitter.option.model.name)))
        wider = Fitter(option, fitter.wishes, fitter.budgets, host, fitter.quality)
        fitted = wider.best
        if fitted is None:
            short, remedy = wider.why_not_offloaded(), wider.host_remedy()
            refusal = Reason(option.engine, short, option.model.name, remedy=remedy)
            return replace(plan, refusals=(*plan.refusals, refusal))
        choice = _choice(wider, fitted)
        why = verdicts(choice, (), fitters, plan.refusals)
        return replace(plan, choice=choice, budget=fitted.budget, closest=None, verdicts=why)
    return plan


def held_to(plan: Plan, candidate: Candidate, machine: Machine, settings: Settings) -> Plan:
    """The plan with saved settings instead of the solver's where they fit here; else the solver's, which says
    why."""
    found = budgets(machine, plan.wishes.memory_bytes)
    settings = settings.with_host_memory(page_locked=found[0].page_locks)  # as here, not where it was saved
    if plan.choice is not None and plan.choice.settings == settings:
        return plan
    guesses: SpeculationName = "mtp" if settings.predictor else "off"
    wishes = replace(plan.wishes, backend=settings.engine, speculation=guesses)
    possible, _ = _possible(candidate, machine, wishes, found, {})
    for fitter in possible:
        if settings.gpus <= len(fitter.budgets) and fitter.option.gives(settings):
            tokens = largest_image(fitter.option.model, settings.max_pixels).tokens if settings.images else 0
            fitted = fitter.fitted(settings, tokens)
            if fitted.missing_bytes <= 0:
                choice = _choice(fitter, fitted)
                return replace(plan, choice=choice, budget=fitted.budget, closest=None, rejections=())
    return replace(plan, changed="the saved plan doesn't fit what is free now; this one does")


def require(plan: Plan) -> Choice:
    """The choice of a plan.

    Raises:
        DoesNotFit: nothing fits; the message has the numbers and the way out.
    """
    if plan.choice is not None:
        return plan.choice
    raise DoesNotFit(refusal_line(plan))


def _decide(
    fitters: list[Fitter],
    choices: list[Choice],
    refusals: list[Reason],
    wishes: Wishes,
    found: list[Budget],
    *,
    reasons: bool,
) -> Plan:
    failed = [fitter for fitter in fitters if not fitter.any]
    choices.sort(key=lambda choice: choice.score, reverse=True)
    best = choices[0] if choices else None
    rejections = _rejections(best, fitters, failed) if reasons else ()
    nearest = min(failed, key=lambda fitter: fitter.least.missing_bytes, default=None)
    closest = _choice(nearest, nearest.least) if nearest and best is None else None
    return Plan(
        wishes,
        best.budget if best else (closest.budget if closest else found[0]),
        best,
        _runners_up(choices),
        rejections,
        tuple(refusals),
        closest,
        verdicts(best, choices, failed, refusals) if best and reasons else (),
    )


def _enough(choices: list[Choice], quality: int) -> bool:
    """Whether models of this quality need not be tried: enough better ones fit, one of them in comfort."""
    better = {choice.option.model.name for choice in choices if choice.quality > quality}
    return len(better) > RUNNERS_UP and any(choice.score.led for choice in choices)


def _bearable(choice: Choice, wishes: Wishes) -> bool:
    """Whether it is quick enough to be recommended, judged at comfort's pictures and context: the larger ones
    of more memory are no reason to give a model up."""
    model, settings = choice.option.model, choice.settings
    tokens, context, *_ = COMFORT[wishes.good_for]
    if choice.budget.device.cpu:
        tokens = min(tokens, HOST_TOKENS)
    if settings.images and scales(model) and wishes.max_pixels is None:
        pixels = pixels_for(model, max(tokens, wishes.least_image_tokens))
        settings = settings._replace(max_pixels=pixels)
    needed = settings.images * largest_image(model, settings.max_pixels).tokens + LEAST_ROOM_TOKENS
    settings = settings._replace(context=max(wishes.context or context, needed))
    speed = roofline(model, settings, choice.budget)
    rate, first_s = speed.most, speed.first_token_s
    return (rate is None or rate >= LEAST_RATE) and (first_s is None or first_s <= MOST_WAITING_S)


def _slower(slow: list[Choice], best: Choice | None) -> tuple[Choice, ...]:
    """The quickest choices among better models that are too slow, one a model."""
    better = [each for each in slow if best is not None and each.quality > best.quality]
    better.sort(key=lambda each: -(each.speed.decode_tokens_per_s or 0))
    found = {each.quality: each for each in reversed(better)}
    return tuple(each for each in better if found[each.quality] is each)[:MOST_SLOWER]


def _other_place(choices: list[Choice]) -> TowerName | None:
    """The other place for the best choice's vision tower, or None: where the engine has both, and "streamed"
    only where that gains anything."""
    best = choices[0] if choices else None
    if best is None or "tower" not in rules_of(best.option.engine).honours:
        return None
    alike = (each for each in choices if each.option.engine == best.option.engine)
    others = [each.score.gains for each in alike if each.option.streams != best.option.streams]
    if best.option.streams:
        return "resident" if others else None
    return "streamed" if others and max(others) > best.score.gains else None


def _choice(fitter: Fitter, fitted: Fitted, *, led: bool = False) -> Choice:
    option, settings = fitter.option, fitted.settings
    gpus = tuple(budget.gpu for budget in fitter.budgets[: settings.gpus] if budget.gpu is not None)
    speed = roofline(option.model, settings, fitted.budget)
    score = _score(fitter, fitted, speed, led=led)
    return Choice(option, settings, fitted.tokens, fitted.footprint, fitted.budget, speed, score, gpus)


def _score(fitter: Fitter, fitted: Fitted, speed: Speed, *, led: bool) -> Score:
    option, settings, goal = fitter.option, fitted.settings, fitter.goal(fitted)
    several = len(fitter.budgets) > 1
    return Score(
        whole=not option.offload,
        led=led and fitter.comfort(fitted, led=True) >= COMFORT[fitter.wishes.good_for],
        quality=fitter.quality,
        tower=option.parts.vision == "gpu",
        comfort=fitter.comfort(fitted),
        format=-fitter.tier(fitted),
        stored=not (option.made and several),
        spread=(goal.tokens, goal.context) if several else (),
        engine=rules_of(option.engine).rank,
        reach=goal.step,
        resident=option.parts.vision == "gpu",
        experts=settings.expert_slots or 0,
        download=-option.model.facts.download_bytes,
        cost=-cost(option, settings),
        float32=option.float32,
        embedding=option.parts.embedding == "gpu",
        gpus=-settings.gpus,
        offloaded=-settings.offloaded,
        pace=SpeedTier(
            graphs=not settings.eager,
            kept_states=min(settings.state_snapshots, SNAPSHOTS),
            chunk=settings.chunk * settings.data_parallel,
            sequences=settings.sequences * settings.data_parallel,
            states=settings.state_snapshots,
            pool=settings.kv_tokens,
            rate=int((speed.decode_tokens_per_s or 0) * settings.data_parallel),
        ),
    )


def _runners_up(choices: list[Choice]) -> tuple[Choice, ...]:
    """The next best choices, one per model and engine."""
    seen = {(choices[0].option.model.name, choices[0].option.engine)} if choices else set()
    kept = []
    for choice in choices[1:]:
        key = (choice.option.model.name, choice.option.engine)
        if key not in seen:
            seen.add(key)
            kept.append(choice)
    return tuple(kept[:RUNNERS_UP])


def _no_better(option: Option, best: Option) -> bool:
    """Whether an option is the model that was chosen, in weights that are no finer."""
    quality = QUALITY[option.stored_quality], QUALITY[best.stored_quality]
    return option.model.name == best.model.name and quality[0] <= quality[1]


def _rejections(best: Choice | None, fitters: list[Fitter], failed: list[Fitter]) -> tuple[Reason, ...]:
    rejections: list[Reason] = []
    if best is not None:
        fitter = next(fitter for fitter in fitters if fitter.option is best.option)
        rejections += why_not_more(fitter, best)
    nearest: dict[str, Fitter] = {}
    several = len({fitter.option.model.name for fitter in fitters}) > 1
    for fitter in failed:
        option = fitter.option
        if best is not None and (fitter.quality < best.quality or _no_better(option, best.option)):
            continue
        # Of several models, each is refused once, where it comes nearest.
        key = option.model.name if several else f"{option.model.name} {option.weights} {option.engine}"
        if key not in nearest or fitter.least.missing_bytes < nearest[key].least.missing_bytes:
            nearest[key] = fitter
    ordered = sorted(nearest.values(), key=lambda each: each.least.missing_bytes)
    return (*rejections, *map(why_not_fitting, ordered))

"""The candidates of a plan without a model name: the models of the catalogue that have a rank."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from snugvl.checkpoint.catalogue import (
    FILE_TYPE,
    Entry,
    catalogue_facts,
    entries,
    find,
    four_bits,
    published_as,
    q4_k_m,
)
from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.options import TowerName, typed
from snugvl.core.sizes import exact_size, format_size
from snugvl.hardware.machine import Machine
from snugvl.planner.budget import budgets, host_budget, wsl_most_bytes
from snugvl.planner.commands import beside_gpu_bytes, load_options
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import Reason
from snugvl.planner.goals import COMFORT
from snugvl.planner.plan import Choice, Cure, Plan
from snugvl.planner.settings import ENGINES
from snugvl.planner.solve import LEAST_RATE, MOST_WAITING_S, Candidate, choice_for, solve
from snugvl.planner.wishes import OPTION, Wishes, wishes_of

KEPT: Final = ("images", "task", "language_only", "float32", "step_graphs", "prefix_cache")  # what it is for
QUICK: Final = 20.0  # tokens/s, more than people read: not worth the installation of another engine
LEAST_BESIDE: Final = 15.0  # tokens/s of a mixture with experts in host memory that anybody is led to
ADEQUATE: Final = ("Q4_K_M", "Q3_K_M")  # editions of a mixture to lead to; the second where room is short
WAIT_BESIDE_S: Final = 10.0  # for the first token, with experts that cross for every step of a prompt
ANSWER_TOKENS: Final = 256  # of an answer, whose time decides where all waits are long
MUCH: Final = 1.5  # times as fast, for a model in fewer bits and an engine to install


def catalogue_candidates(*, sees: bool = True) -> list[Candidate]:
    """Every published form of every ranked model. The catalogue's rank 1 is the best."""
    candidates: list[Candidate] = []
    for entry in entries():
        if entry.quality_rank is None or (sees and not entry.sees):
            continue
        led = (form for form in entry.forms if form.led)
        candidates += [Candidate(partial(_facts, form.repo), -entry.quality_rank) for form in led]
    return candidates


def _facts(repo: str) -> ModelFacts:
    facts = catalogue_facts(repo)
    assert facts is not None, f"{repo} is of the catalogue"
    return facts


def planned(
    candidates: Sequence[Candidate], machine: Machine, wishes: Wishes, held: Sequence[Candidate] = ()
) -> Plan:
    """The plan that `snugvl plan` prints: the solver's, with alternatives.

    A model that is on the machine already (`held`) is chosen where it is no worse than what else would be.
    """
    plan = _planned(candidates, machine, wishes)
    if plan.choice is None and plan.roomier is None:
        plan = replace(plan, roomier=_with_more(candidates, machine, wishes))
    if plan.choice is not None and plan.choice.settings.host_experts:
        plan = replace(plan, ours=_ours(plan.choice, machine, wishes))
    ways = [(way.choice, way) for each in held if (way := _of_held(each, machine, wishes)) and way.choice]
    if not ways:
        return plan
    best, way = max(ways, key=lambda each: (each[0].score.comfort[:2], each[0].quality, each[0].score))
    mine = plan.choice
    reached = mine.score.comfort[:2] if mine is not None else ()
    if mine is not None and (best.quality < mine.quality or best.score.comfort[:2] < reached):
        return replace(plan, held=best)
    whole = plan.beside if plan.beside is not None and mine and mine.option.offload else mine
    return replace(way, held=best, beside=whole)


def _ours(choice: Choice, machine: Machine, wishes: Wishes) -> Choice | None:
    """The mixture of a GGUF whose experts llama.cpp has in host memory, on our own engine with its experts
    there, too; None where that is not an option, where it wouldn't answer as soon, or can't be known.

    Under WSL2 they aren't page-locked, which makes it slow.
    """
    entry = published_as(choice.option.model.name)
    asked = wishes.backend != "auto" or wishes.experts != "auto" or wishes.weights is not None
    if entry is None or asked or machine.os != "linux" or not machine.gpus:
        return None
    forms = [_facts(form.repo) for form in entry.forms if form.led]
    known = [each for each in forms if each.download_bytes <= machine.disk_free_bytes]
    if not known:
        return None
    smallest = Candidate(min(known, key=lambda each: each.download_bytes), -(entry.quality_rank or 0))
    found = choice_for([smallest], machine, wishes.apart())
    rates = [each.speed.decode_tokens_per_s if each else None for each in (found, choice)]
    return found if rates[0] and rates[1] and rates[0] >= rates[1] else None


def _widened(machine: Machine) -> Machine | None:
    """The machine with as much of the PC's memory as WSL2 could be given; None where there is no more."""
    more = (wsl_most_bytes(machine) or 0) - machine.ram_total_bytes
    if more <= 0:
        return None
    total, free = machine.ram_total_bytes + more, machine.ram_free_bytes + more
    return replace(machine, ram_total_bytes=total, ram_free_bytes=free)


def _with_more(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> Choice | None:
    """The choice where nothing runs, had WSL2 more of the PC's memory; None without one."""
    wider = _widened(machine)
    choice = None if wider is None else choice_for(candidates, wider, wishes)
    return choice if choice and (choice.budget.gpu is None or beside_gpu_bytes(choice)) else None


def _of_held(candidate: Candidate, machine: Machine, wishes: Wishes) -> Plan | None:
    """The plan of a model that is here, if it sees and answers quickly enough; else None."""
    if wishes.images and candidate.facts.vision is None:
        return None
    plan = _as_served(solve([candidate], machine, wishes), [candidate], machine)
    choice = plan.choice
    if choice is None or choice.settings.offloaded or choice.settings.vision == "cpu":
        return None
    rate, wait = choice.speed.decode_tokens_per_s, choice.speed.first_token_s or 0.0
    least = LEAST_BESIDE if choice.settings.host_experts else LEAST_RATE
    return plan if (rate is None or rate >= least) and wait <= MOST_WAITING_S else None


def _planned(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> Plan:
    """The plan of models that are still to be downloaded.

    On a GPU that llama.cpp alone uses it is the plan of a GGUF, where one fits: of the model that was named,
    or the best of those that are known. A mixture of experts may have them in host memory.
    """
    plan = with_instead(_as_served(solve(candidates, machine, wishes), candidates, machine), machine)
    named = candidates[0].facts if len(candidates) == 1 else None
    if plan.choice is None and plan.closest is None:
        plan = replace(plan, cure=_cure(candidates, machine, wishes))
    others = wishes.backend != "auto" and not rules_of(wishes.backend).reads_only_gguf
    if named and named.gguf:
        return plan
    if others:
        return _without_backend(plan, named, machine, wishes)
    whole = _of_ggufs(plan, named, machine, wishes)
    found = _beyond(whole, named, machine, wishes)
    return replace(found, roomier=_roomier(found, whole, named, machine, wishes))


def _roomier(
    plan: Plan, whole: Plan, named: ModelFacts | None, machine: Machine, wishes: Wishes
) -> Choice | None:
    """The mixture that a plan would be of, had WSL2 more of the PC's memory; None without a gain.

    Args:
        whole: the plan without experts in host memory.
    """
    if (wider := _widened(machine)) is None:
        return None
    choice = _beyond(whole, named, wider, wishes).choice
    mine = plan.choice.option.model.name if plan.choice else ""
    return None if choice is None or choice.option.model.name == mine else choice


def _without_backend(plan: Plan, named: ModelFacts | None, machine: Machine, wishes: Wishes) -> Plan:
    """The plan; where a named mixture doesn't fit on the engine that was wished for, with llama.cpp's as the
    way out."""
    if named is None or plan.choice is not None or plan.closest is None or plan.instead is not None:
        return plan
    fewer = wishes.without("backend")
    choice = _beyond(plan, named, machine, fewer).choice
    if choice is None:
        return plan
    return replace(plan, cure=Cure(" ".join(typed("backend", wishes.backend)), choice, fewer))


def _of_ggufs(plan: Plan, named: ModelFacts | None, machine: Machine, wishes: Wishes) -> Plan:
    """The plan, or that of a published GGUF where llama.cpp alone uses the GPU."""
    if not _ggufs_alone(machine):
        return replace(plan, quicker=_quicker(plan, machine))
    editions = _editions(named)
    other = _as_served(solve(editions, machine, wishes), editions, machine)
    choice = other.choice
    if choice is None or (plan.choice is not None and (choice.option.offload or choice.budget.gpu is None)):
        return plan
    if choice.settings.host_experts:
        return plan  # `_beyond` weighs all editions
    if published_as(choice.option.model.name) is None:
        return replace(plan, instead=choice)
    return replace(other, beside=plan.choice, named=named.name if named else "")


def _beyond(plan: Plan, named: ModelFacts | None, machine: Machine, wishes: Wishes) -> Plan:
    """The plan, or that of a mixture with experts in host memory, if that is of higher rank and quick enough.

    Of a named model its GGUF, where it doesn't run whole, or runs much slower on a processor. Of each mixture
    the first adequate edition whose download and host memory there is room for. Where the size of host memory
    is unknown, none is recommended; beside a GPU a quarter of what may be used of it stays with other
    programs, which under WSL2 have the PC's other memory. Of a named model any that runs at all comes first.
    """
    mine = plan.choice
    many = wishes.concurrency > 1 or wishes.good_for == "batch"  # each of whose tokens reads other experts
    unasked = named is None and (many or machine.ram_assumed)
    # A named model that runs whole, or of which llama.cpp's plan is already that of its file.
    gpu = bool(machine.gpus or machine.others)
    leaves = mine and mine.budget.gpu is None and (gpu or plan.quicker)  # a GPU, or llama.cpp's speed
    done = named and mine and not leaves and (not mine.option.offload or mine.option.model.facts.gguf)
    if done and mine and mine.option.model.mixed and not mine.option.model.facts.gguf:
        return replace(plan, verdicts=_with_gguf(plan, named, machine, wishes))
    if unasked or done:
        return plan
    room = host_budget(machine).usable_bytes
    room = room if machine.os == "wsl2" else room * 3 // 4
    short: list[Reason] = []
    slow: list[tuple[bool, tuple[int, ...], Plan]] = []  # whether quick, how comfortable
    for candidate in _mixtures(named, machine):
        if named is None and mine is not None and candidate.quality <= mine.quality - bool(plan.quicker):
            break  # best first; the model itself only where its GGUF is the quicker one
        other = _as_served(solve([candidate], machine, wishes), [candidate], machine)
        short += [each for each in other.refusals if each.remedy]
        if other.choice is None or (gpu and other.choice.budget.gpu is None):
            continue
        replaced = ("", mine.option.model.name if mine else "")
        others = tuple(
            each
            for each in plan.rejections
            if each.model not in replaced and not _no_better(each.model, candidate.quality)
        )
        called = named.name if named else ""
        slower = tuple(each for each in plan.slower if each.quality > candidate.quality)
        found = replace(other, beside=mine, named=called, rejections=others, slower=slower)
        quick = _quick_enough(other.choice, mine, wishes)
        if quick and beside_gpu_bytes(other.choice) <= room:
            return found
        slow.append((quick, other.choice.score.comfort[:2], found))
    if named is None or mine is not None:
        return plan
    if slow:
        return max(slow, key=lambda each: each[:2])[2]  # the first of equals
    smallest = (replace(each, remedy=f"as {each.model} {each.remedy}") for each in short[-1:])
    return replace(plan, refusals=(*plan.refusals, *smallest))


def _with_gguf(plan: Plan, named: ModelFacts | None, machine: Machine, wishes: Wishes) -> tuple[Reason, ...]:
    """The verdicts on other engines, with what a named mixture's GGUF gives here where one runs."""
    found = (choice_for([each], machine, wishes) for each in _mixtures(named, machine))
    choice = next(filter(None, found), None)
    if choice is None or not (rate := choice.speed.decode_tokens_per_s):
        return plan.verdicts
    facts = choice.option.model.facts
    said = f"{facts.name} gives about {rate:,.0f} tokens/s from {format_size(facts.download_bytes)} of files"
    return tuple(
        replace(each, text=f"it reads GGUF files, of which {said}")
        if rules_of(each.engine).reads_only_gguf
        else each
        for each in plan.verdicts
    )


def _no_better(gguf: str, quality: int) -> bool:
    """Whether a published GGUF is of no higher rank, so that its absence needs no reason."""
    entry = published_as(gguf)
    return entry is not None and -(entry.quality_rank or 0) <= quality


def _mixtures(named: ModelFacts | None, machine: Machine) -> Iterator[Candidate]:
    """Editions of mixtures to lead to, or of a named one, that the disk has room for, best first."""
    known = _entry(named.name) if named else None
    led = (entry for entry in entries() if entry.gguf)
    for entry in [known] if known else [] if named else led:
        for edition in (each for kind in ADEQUATE for each in entry.editions if each.endswith(f":{kind}")):
            facts = _facts(edition)
            if facts.text.experts_used and facts.download_bytes <= machine.disk_free_bytes:
                yield Candidate(facts, -(entry.quality_rank or 0))


def _quick_enough(choice: Choice, other: Choice | None, wishes: Wishes) -> bool:
    """Whether a mixture reaches comfort, or as much as another choice, and answers soon enough: without a GPU
    an answer takes not much longer than the other choice's, which waits long for pictures as well."""
    rate, wait = choice.speed.decode_tokens_per_s, choice.speed.first_token_s
    if choice.settings.offloaded or choice.settings.vision == "cpu" or rate is None:
        return False
    reached, most = choice.score.comfort[:2], COMFORT[wishes.good_for][:2]
    if reached < most and (other is None or reached < other.score.comfort[:2]):
        return False
    if choice.budget.gpu is None and other is not None:
        # At best: its speed is known of two cores alone, and the mixture is a large download.
        best = other.speed.most
        return rate >= min(best or 0.0, LEAST_BESIDE) and _answer_s(choice, rate) <= MUCH * _answer_s(
            other, best
        )
    return rate >= LEAST_BESIDE and (wait or 0.0) <= WAIT_BESIDE_S


def _answer_s(choice: Choice, rate: float | None) -> float:
    """Seconds to a whole answer at a rate, at least; without end where it isn't known."""
    return (choice.speed.first_token_s or 0.0) + ANSWER_TOKENS / rate if rate else math.inf


def _editions(named: ModelFacts | None) -> list[Candidate]:
    """Published GGUFs: all known ones, or those of a named model; else one as it would be made of it."""
    mine = _entry(named.name) if named is not None else None
    known = [each for each in entries() if (each.gguf if named is None else each == mine and each.editions)]
    if known or named is None:
        return [Candidate(partial(_facts, each.editions[0]), -(each.quality_rank or 0)) for each in known]
    if named.quantization is not None:
        return []
    return [Candidate(q4_k_m(named, f"a GGUF of {named.name} in {FILE_TYPE}"))]


def _quicker(plan: Plan, machine: Machine) -> Choice | None:
    """The chosen model's GGUF on llama.cpp, where it is much faster on a processor than a slow plan; else
    None."""
    choice = plan.choice
    if choice is None or choice.budget.gpu is not None or rules_of(choice.option.engine).reads_only_gguf:
        return None
    other, speed = choice_for(_editions(choice.option.model.facts), machine, plan.wishes), choice.speed
    soon, late = other and other.speed.decode_tokens_per_s, speed.decode_tokens_per_s
    return other if soon and late and late < QUICK and soon >= MUCH * late else None


def _as_served(plan: Plan, candidates: Sequence[Candidate], machine: Machine) -> Plan:
    """The plan that the printed command will make.

    A floor of image tokens is an option of `plan` alone: the command has pixels and a context instead, from
    which the rest follows.
    """
    choice = plan.choice
    if choice is None or plan.wishes.min_image_tokens is None:
        return plan
    chosen = [each for each in candidates if each.facts.name == choice.option.model.name]
    served = _served(choice, plan.wishes, chosen, machine)
    rival = plan.other_tower
    place: TowerName = "streamed" if rival and rival.option.streams else "resident"
    rival = rival and _served(rival, replace(plan.wishes, tower=place), chosen, machine)
    return plan if served is None else replace(plan, choice=served, budget=served.budget, other_tower=rival)


def _served(
    choice: Choice, wishes: Wishes, candidates: Sequence[Candidate], machine: Machine
) -> Choice | None:
    """The choice that the printed command of `choice` makes on this machine; None where nothing fits."""
    sees = choice.option.model.facts.vision is not None
    return choice_for(candidates, machine, wishes_of(load_options(choice, wishes), sees=sees))


def _cure(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> Cure | None:
    """The first wish without which something runs."""
    for name, value in wishes.said().items():
        if name in KEPT:
            continue
        fewer = wishes.without(name)
        choice = choice_for(candidates, machine, fewer)
        if choice is not None and not choice.option.offload:
            said = exact_size(value) if name == "memory_bytes" else value
            return Cure(" ".join(typed(OPTION.get(name, name), said)), choice, fewer)
    return None


def _entry(name: str) -> Entry | None:
    found = find(name)
    return found[0] if found else None


def _ggufs_alone(machine: Machine) -> bool:
    """Whether only engines for GGUF files can use this machine's GPUs, or run here at all."""
    there = replace(machine, gpus=machine.gpus or machine.others)
    device = budgets(there)[0].device
    every = (rules_of(engine) for engine in ENGINES)
    return all(rules.reads_only_gguf or rules.not_here(device, machine.os) for rules in every)


def with_instead(plan: Plan, machine: Machine) -> Plan:
    """The plan with an alternative: where layers stay in host memory, the best of the catalogue that fits
    whole; where a named model doesn't fit at all, another edition of it that does, or for several requests at
    once the best of the catalogue that holds as many."""
    if plan.choice is not None and plan.choice.option.offload:
        every = catalogue_candidates(sees=plan.wishes.images > 0)
        return replace(
            plan, instead=_as_served(solve(every, machine, plan.others, reasons=False), every, machine).choice
        )
    if plan.choice is not None or plan.closest is None:
        return plan
    facts = plan.closest.option.model.facts
    known = find(facts.name)
    others = [form.repo for form in known[0].forms if form != known[1]] if known else []
    if (published := published_as(facts.name)) is not None:  # in fewer bits
        others = [each for each in published.editions if _facts(each).download_bytes < facts.download_bytes]
    if published is not None:  # finer ones first; each alone may leave experts in host memory
        others.sort(key=lambda each: -_facts(each).download_bytes)
        tried = (choice_for([Candidate(_facts(each))], machine, plan.wishes) for each in others)
        return replace(plan, instead=next(filter(None, tried), None))
    editions = [Candidate(form) for repo in others if (form := catalogue_facts(repo)) is not None]
    other = choice_for(editions, machine, plan.wishes) if editions else None
    other = None if other is not None and other.option.offload else other
    if other is None and facts.quantization is None and facts.gguf is None and machine.gpus:
        edition = replace(four_bits(facts), name=f"a pre-quantized 4-bit edition of {facts.name} (AWQ, GPTQ)")
        other = choice_for([Candidate(edition)], machine, plan.wishes)
    if other is None and plan.wishes.concurrency > 1:
        other = choice_for(catalogue_candidates(sees=plan.wishes.images > 0), machine, plan.wishes)
    return replace(plan, instead=other)

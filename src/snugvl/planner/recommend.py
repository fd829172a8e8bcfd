"""Which models a plan without a model chooses from: those of the catalogue that have a place in its order."""

from dataclasses import replace
from functools import lru_cache, partial

from snugvl.checkpoint.catalogue import catalogue_facts, entries, find
from snugvl.checkpoint.facts import ModelFacts
from snugvl.hardware.machine import Machine
from snugvl.planner.plan import Plan
from snugvl.planner.solve import Candidate, solve


def catalogue_candidates(*, sees: bool = True) -> list[Candidate]:
    """Every published form of every ranked model. The catalogue's rank 1 is the best."""
    candidates: list[Candidate] = []
    for entry in entries():
        if entry.quality_rank is None or (sees and not entry.sees):
            continue
        candidates += [Candidate(partial(_facts, form.repo), -entry.quality_rank) for form in entry.forms]
    return candidates


@lru_cache(maxsize=64)
def _facts(repo: str) -> ModelFacts:
    facts = catalogue_facts(repo)
    assert facts is not None, f"{repo} is of the catalogue"
    return facts


def with_instead(plan: Plan, machine: Machine) -> Plan:
    """The plan with what else would do: where layers stay in main memory, the best of the catalogue that fits
    whole; where a named model doesn't fit at all, another edition of it that does."""
    wishes = replace(plan.wishes, backend="auto", quality="any", weights=None)
    if plan.choice is not None and plan.choice.option.offload:
        found = solve(catalogue_candidates(sees=wishes.images > 0), machine, wishes)
        return replace(plan, instead=found.choice)
    if plan.choice is not None or plan.closest is None:
        return plan
    known = find(plan.closest.option.model.name)
    others = [form.repo for form in known[0].forms if form != known[1]] if known else []
    editions = [Candidate(facts) for repo in others if (facts := catalogue_facts(repo)) is not None]
    return replace(plan, instead=solve(editions, machine, plan.wishes).choice) if editions else plan

"""Which models a plan without a model chooses from: those of the catalogue that have a place in its order."""

from dataclasses import replace

from snugvl.checkpoint.catalogue import catalogue_facts, entries
from snugvl.hardware.machine import Machine
from snugvl.planner.plan import Plan
from snugvl.planner.solve import Candidate, solve


def catalogue_candidates(*, sees: bool = True) -> list[Candidate]:
    """Every published form of every ranked model. The catalogue's rank 1 is the best."""
    candidates = []
    for entry in entries():
        if entry.quality_rank is None or (sees and not entry.sees):
            continue
        for form in entry.forms:
            facts = catalogue_facts(form.repo)
            if facts is not None:
                candidates.append(Candidate(facts, -entry.quality_rank))
    return candidates


def with_instead(plan: Plan, machine: Machine) -> Plan:
    """A plan with layers in main memory, and beside it the best of the catalogue that fits whole."""
    if plan.choice is None or not plan.choice.option.offload:
        return plan
    wishes = replace(plan.wishes, backend="auto", quality="any", weights=None)
    return replace(plan, instead=solve(catalogue_candidates(sees=wishes.images > 0), machine, wishes).choice)

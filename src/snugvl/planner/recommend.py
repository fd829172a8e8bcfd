"""Which models a plan without a model chooses from: those of the catalogue that have a place in its order."""

from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Final

from snugvl.checkpoint.catalogue import catalogue_facts, entries, find
from snugvl.checkpoint.facts import ModelFacts, Role, TensorFact
from snugvl.hardware.machine import Machine
from snugvl.planner.plan import Plan
from snugvl.planner.solve import Candidate, solve

GROUP: Final = 128  # inputs that share a scale in nearly all ready-made 4-bit editions


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
    facts = plan.closest.option.model.facts
    known = find(facts.name)
    others = [form.repo for form in known[0].forms if form != known[1]] if known else []
    editions = [Candidate(form) for repo in others if (form := catalogue_facts(repo)) is not None]
    other = solve(editions, machine, plan.wishes).choice if editions else None
    other = None if other is not None and other.option.offload else other
    if other is None and facts.quantization is None and facts.gguf is None and machine.gpus:
        edition = replace(awq(facts), name=f"a ready-made 4-bit edition of {facts.name} (AWQ, GPTQ)")
        other = solve([Candidate(edition)], machine, plan.wishes).choice
    return replace(plan, instead=other)


def awq(facts: ModelFacts) -> ModelFacts:
    """The same model with its decoder in 4 bits: codes, scales and zero points of 128 inputs each."""
    tensors: list[TensorFact] = []
    for tensor in facts.tensors:
        if tensor.role not in ("linear", "expert") or not tensor.loaded or len(tensor.shape) < 2:
            tensors.append(tensor)
            continue
        *experts, rows, columns = tensor.shape
        name, role, groups, many = (
            tensor.name.removesuffix("weight"),
            tensor.role,
            columns // GROUP,
            prod(experts),
        )
        parts: tuple[tuple[str, Role, str, int, int], ...] = (
            ("qweight", role, "I32", columns, 4),
            ("qzeros", role, "I32", groups, 4),
            ("scales", "scale", "F16", groups, 16),
        )
        for part, kind, dtype, inputs, bits in parts:
            shape = (*experts, inputs, rows // 8 if dtype == "I32" else rows)
            tensors.append(TensorFact(f"{name}{part}", kind, dtype, shape, many * inputs * rows * bits // 8))
    stored = sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in facts.tensors)
    return replace(
        facts, tensors=tuple(tensors), quantization="int4", download_bytes=facts.download_bytes + stored
    )

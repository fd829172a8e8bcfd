"""Which models a plan without a model chooses from: those of the catalogue that have a place in its order."""

from snugvl.checkpoint.catalogue import catalogue_facts, entries
from snugvl.planner.solve import Candidate


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

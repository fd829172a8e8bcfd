"""`facts_of`: what the planner must know of a model, from the nearest place that knows it."""

from pathlib import Path

from snugvl.checkpoint.assemble import assemble
from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.facts import FactSource, ModelFacts
from snugvl.checkpoint.folder import folder_material
from snugvl.checkpoint.locate import POCKET, near
from snugvl.errors import CheckpointNotFound


def facts_of(
    model: str,
    *,
    offline: bool = False,
    token: str | None = None,
    revision: str | None = None,
    cache: Path | None = None,
) -> ModelFacts:
    """Facts of `model`: "pocket", a folder, or a Hub id; never from weights.

    Asked in this order: the folder; the local Hub cache; our own cache of headers; the Hub, by range
    requests; the built-in catalogue, where there is no network or `offline` forbids it.
    `ModelFacts.source` says which.

    Args:
        offline: ask no network.
        token: for private and gated repositories; else the one that huggingface_hub finds.
        revision: branch, tag or commit; a folder has none.
        cache: where headers are kept, by commit.

    Raises:
        CheckpointNotFound: nothing under that name, anywhere that may be asked.
        CheckpointError: broken files, or a repository we may not read.
        UnsupportedModel: an architecture or a format that snugvl doesn't know.
    """
    place = near(model, revision=revision)
    if place is not None:
        source: FactSource = "folder" if model == POCKET or Path(model).expanduser() == place else "hub cache"
        return assemble(model, folder_material(place, source=source))
    facts = catalogue_facts(model)
    if facts is None:
        raise CheckpointNotFound(f"no model {model!r}")
    return facts

"""`facts_of`: what the planner must know of a model, from the nearest place that knows it."""

from pathlib import Path

from snugvl.checkpoint.assemble import assemble
from snugvl.checkpoint.cache import HeaderCache
from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.folder import folder_material
from snugvl.checkpoint.hub import Hub, HubRefused, HubUnreachable
from snugvl.checkpoint.locate import POCKET, complete, is_hub_cached, looks_like_hub_id, near
from snugvl.errors import CheckpointError, CheckpointNotFound


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
    folder = near(model, revision=revision)
    if folder is not None and not is_hub_cached(model, folder):
        return assemble(model, folder_material(folder))
    if folder is not None and complete(folder):
        return assemble(model, folder_material(folder, source="hub cache", revision=folder.name))
    if not looks_like_hub_id(model):
        raise CheckpointNotFound(
            f"no model {model!r}; use {POCKET!r}, a folder, or a Hub id such as Qwen/Qwen3-VL-2B-Instruct-FP8"
        )
    return _remote(model, revision, Hub(token), HeaderCache(cache), offline=offline)


def _remote(model: str, revision: str | None, hub: Hub, cache: HeaderCache, *, offline: bool) -> ModelFacts:
    """A Hub id that is not on this machine."""
    known = cache.get(model, revision, stale=offline)
    if known is not None:
        return assemble(model, known)
    problem: CheckpointError | None = None
    if not offline:
        try:
            material = hub.material(hub.listing(model, revision))
        except (HubUnreachable, HubRefused) as error:
            problem = error
        else:
            cache.put(model, revision, material)
            return assemble(model, material)
    facts = _without_network(model, revision, cache)
    if facts is not None:
        return facts
    if problem is not None:
        raise problem
    raise CheckpointNotFound(
        f"{model} is neither on this machine nor in the catalogue, and offline the Hub is not asked; "
        f"get it with: snugvl pull {model}"
    )


def _without_network(model: str, revision: str | None, cache: HeaderCache) -> ModelFacts | None:
    """What an earlier look at the Hub said; else the catalogue, which knows no revisions but the newest."""
    stale = cache.get(model, revision, stale=True)
    if stale is not None:
        return assemble(model, stale)
    return catalogue_facts(model) if revision in (None, "main") else None

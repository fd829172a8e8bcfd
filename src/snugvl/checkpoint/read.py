"""`facts_of`: what the planner must know of a model, from the nearest place that knows it.

What was read from the Hub is kept by commit, so that a plan works offline afterwards:

    headers/OWNER--NAME/refs.json      branch or tag → [commit, when it was asked, seconds since 1970]
    headers/OWNER--NAME/COMMIT.json    configuration and tensors
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from snugvl.checkpoint.assemble import assemble, folder_material
from snugvl.checkpoint.catalogue import catalogue_facts, meant_or
from snugvl.checkpoint.facts import Material, ModelFacts, Stored
from snugvl.checkpoint.gguf_files import file_material, gguf_files, repository
from snugvl.checkpoint.hub import Hub, HubRefused, HubUnreachable
from snugvl.checkpoint.listing import is_commit, of_quant
from snugvl.checkpoint.locate import complete, is_hub_cached, looks_like_hub_id, near, no_such
from snugvl.core.folders import cache_folder, write_whole
from snugvl.errors import CheckpointError, CheckpointNotFound

FRESH_SECONDS = 24 * 3600  # a branch may move: after a day the Hub is asked again, if there is a network


class HeaderCache:
    """What was read of repositories. A broken file counts as none; one that can't be written is left out."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "headers" if folder is None else folder

    def get(self, repo: str, revision: str | None, *, stale: bool) -> Material | None:
        """What is known of `revision`. `stale`: also if its branch was last asked for more than a day ago."""
        revision = revision or "main"
        commit: Any = revision
        if not is_commit(revision):
            commit, asked = self._refs(repo).get(revision, (None, 0.0))
            if not stale and not 0 <= time.time() - asked < FRESH_SECONDS:
                return None
        if not is_commit(commit):
            return None
        return self._load(repo, commit)

    def put(self, repo: str, revision: str | None, material: Material) -> None:
        """Keep `material` under its commit, and the commit under its branch."""
        if not is_commit(material.revision):
            return
        values = {
            "config": material.config,
            "images": material.images,
            "tensors": material.tensors,
            "download_bytes": material.download_bytes,
        }
        refs = self._refs(repo) | {revision or "main": (material.revision, time.time())}
        with suppress(OSError):
            self._place(repo).mkdir(parents=True, exist_ok=True)
            self._keep(repo, str(material.revision), values)
            self._keep(repo, "refs", refs)

    def _keep(self, repo: str, name: str, values: object) -> None:
        text = json.dumps(values)
        write_whole(self._place(repo) / f"{name}.json", lambda path: path.write_text(text, "utf-8"))

    def _place(self, repo: str) -> Path:
        return self.folder / repo.replace("/", "--").replace(":", "--")

    def _refs(self, repo: str) -> dict[str, tuple[Any, float]]:
        try:
            values = json.loads((self._place(repo) / "refs.json").read_text(encoding="utf-8"))
            return {str(name): (commit, float(asked)) for name, (commit, asked) in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _load(self, repo: str, commit: str) -> Material | None:
        try:
            values = json.loads((self._place(repo) / f"{commit}.json").read_text(encoding="utf-8"))
            tensors = tuple(
                Stored(str(name), str(dtype), tuple(map(int, shape)), int(nbytes))
                for name, dtype, shape, nbytes in values["tensors"]
            )
            size = int(values["download_bytes"])
            material = Material(repo, "hub", commit, values["config"], values["images"], tensors, size)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        right = isinstance(material.config, dict) and isinstance(material.images, dict | None) and tensors
        return material if right else None


def facts_of(
    model: str,
    *,
    offline: bool = False,
    token: str | None = None,
    revision: str | None = None,
    cache: Path | None = None,
) -> ModelFacts:
    """Facts of `model`: "pocket", a folder, a Hub id, or a GGUF (`gguf_files.py`); never from weights.

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
    if (files := gguf_files(model)) is not None:
        return assemble(model, file_material(model, files))
    if repository(model) is not None:
        return _remote(model, revision, Hub(token), HeaderCache(cache), offline=offline)
    folder = near(model, revision=revision)
    if folder is not None and not is_hub_cached(model, folder):
        return assemble(model, folder_material(folder))
    if folder is not None and complete(folder):
        return assemble(model, folder_material(folder, source="hub cache", revision=folder.name))
    if not looks_like_hub_id(model):
        raise no_such(model)
    return _remote(model, revision, Hub(token), HeaderCache(cache), offline=offline)


def _remote(model: str, revision: str | None, hub: Hub, cache: HeaderCache, *, offline: bool) -> ModelFacts:
    """A Hub id that is not on this machine."""
    known = cache.get(model, revision, stale=offline)
    if known is not None:
        return assemble(model, known)
    problem: CheckpointError | None = None
    if not offline:
        try:
            repo, quant = repository(model) or (model, None)
            material = hub.material(of_quant(hub.listing(repo, revision), quant))
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
        f"{model} is neither on this machine nor in the catalogue, and the Hub is not asked when offline"
        + meant_or(model, f"get it with: snugvl pull {model}")
    )


def _without_network(model: str, revision: str | None, cache: HeaderCache) -> ModelFacts | None:
    """What an earlier look at the Hub said; else the catalogue, which knows no revisions but the newest."""
    stale = cache.get(model, revision, stale=True)
    if stale is not None:
        return assemble(model, stale)
    return catalogue_facts(model) if revision in (None, "main") else None

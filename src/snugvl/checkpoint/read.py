"""`facts_of`: a model's facts for the planner, from the nearest place that has them.

Facts from the Hub are kept, so that a plan works offline afterwards:

    headers/OWNER--NAME.json    commit, when it was asked in seconds since 1970, configuration, tensors
"""

import json
import time
from contextlib import suppress
from pathlib import Path

from snugvl.checkpoint.assemble import assemble, folder_material
from snugvl.checkpoint.catalogue import catalogue_facts, meant_or
from snugvl.checkpoint.facts import Material, ModelFacts, Stored
from snugvl.checkpoint.gguf_files import file_material, gguf_files, repository
from snugvl.checkpoint.hub import Hub, HubRefused, HubUnreachable
from snugvl.checkpoint.listing import is_commit, of_quant
from snugvl.checkpoint.locate import complete, incomplete, is_hub_cached, looks_like_hub_id, near, no_such
from snugvl.checkpoint.section import MAX_JSON_BYTES
from snugvl.core.folders import cache_folder, json_object, read_small, write_whole
from snugvl.errors import CheckpointError, CheckpointNotFound

FRESH_SECONDS = 24 * 3600  # a branch may move: after a day the Hub is asked again, if there is a network


def facts_of(model: str, *, offline: bool = False) -> ModelFacts:
    """Facts of `model`: "pocket", a folder, a Hub id, or a GGUF (`gguf_files.py`); never from weights.

    Asked in this order: the folder; the local Hub cache; our own cache of headers; the Hub, by range
    requests; the built-in catalogue, where there is no network or `offline` forbids it.
    `ModelFacts.source` says which.

    Args:
        offline: ask no network.

    Raises:
        CheckpointNotFound: nothing under that name, anywhere that may be asked.
        CheckpointError: broken files, or a repository that the user may not read.
        UnsupportedModel: an architecture or a format that snugvl doesn't know.
    """
    if (files := gguf_files(model)) is not None:
        return assemble(model, file_material(model, files))
    if repository(model) is not None:
        return _remote(model, offline=offline)
    folder = near(model)
    if folder is not None and not is_hub_cached(model, folder):
        return assemble(model, folder_material(folder))
    if folder is not None and complete(folder):
        return assemble(model, folder_material(folder, source="hub cache", revision=folder.name))
    if not looks_like_hub_id(model):
        raise no_such(model)
    try:
        return _remote(model, offline=offline)
    except CheckpointNotFound:
        if folder is None:
            raise
        raise incomplete(model) from None


def _remote(model: str, *, offline: bool) -> ModelFacts:
    """Facts of a Hub id that is not on this machine."""
    if (known := _kept(model, stale=offline)) is not None:
        return assemble(model, known)
    problem: CheckpointError | None = None
    if not offline:
        try:
            (repo, quant), hub = repository(model) or (model, None), Hub()
            material = hub.material(of_quant(hub.listing(repo), quant))
        except (HubUnreachable, HubRefused) as error:
            problem = error
        else:
            _keep(model, material)
            return assemble(model, material)
    stale = _kept(model, stale=True)
    facts = catalogue_facts(model) if stale is None else assemble(model, stale)
    if facts is not None:
        return facts
    if problem is not None:
        raise problem
    raise CheckpointNotFound(
        f"{model} is neither on this machine nor in the catalogue, and the Hub is not asked when offline"
        + meant_or(model, f"get it with: snugvl pull {model}")
    )


def _place(model: str) -> Path:
    return cache_folder() / "headers" / f"{model.replace('/', '--').replace(':', '--')}.json"


def _kept(model: str, *, stale: bool) -> Material | None:
    """The kept material of a model of the Hub, or None; a broken file counts as none.

    Args:
        stale: whether material of more than a day ago will do.
    """
    try:
        values = json_object(read_small(_place(model), MAX_JSON_BYTES)) or {}
        if not stale and not 0 <= time.time() - float(values["asked"]) < FRESH_SECONDS:
            return None
        tensors = tuple(
            Stored(str(name), str(dtype), tuple(map(int, shape)), int(nbytes))
            for name, dtype, shape, nbytes in values["tensors"]
        )
        size, config, images = int(values["download_bytes"]), values["config"], values["images"]
        material = Material(model, "hub", values["commit"], config, images, tensors, size)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    right = is_commit(material.revision) and isinstance(config, dict) and isinstance(images, dict | None)
    return material if right and tensors else None


def _keep(model: str, material: Material) -> None:
    """Keep a model's material from the Hub, where that can be written."""
    if not is_commit(material.revision):
        return
    values = {
        "commit": material.revision,
        "asked": time.time(),
        "config": material.config,
        "images": material.images,
        "tensors": material.tensors,
        "download_bytes": material.download_bytes,
    }
    place, text = _place(model), json.dumps(values)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, lambda path: path.write_text(text, "utf-8"))

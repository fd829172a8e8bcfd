"""Finds the folder, or GGUF, of a model by the name that the user gives. Nothing is downloaded here."""

from pathlib import Path
from typing import Final

from snugvl.checkpoint.gguf_files import HUB, OLLAMA, gguf_files, hub_id, repository
from snugvl.checkpoint.listing import SUFFIX, is_repo
from snugvl.checkpoint.safetensors import weight_files
from snugvl.checkpoint.section import read_json
from snugvl.checkpoint.store import MAX_REF_BYTES, repo_folder
from snugvl.core.folders import expanded, read_small
from snugvl.core.training import Training, read_training
from snugvl.errors import CheckpointError, CheckpointNotFound

POCKET = "pocket"
# Limits of a checkpoint's training, in its config.json; copies of it keep them:
# "snugvl": {"drawings": true, "videos": false, "min_images": 1, "max_images": 5}
TRAINING: Final = "snugvl"


def locate(model: str) -> Path:
    """The checkpoint folder of `model` (`pocket`, a folder, or a Hub id in the local cache), or the first
    file of a GGUF.

    Raises:
        CheckpointNotFound: says how to get it.
    """
    if (files := gguf_files(model)) is not None:
        return files.parts[0]
    folder = near(model)
    if folder is not None and not (is_hub_cached(model, folder) and not complete(folder)):
        return folder
    if folder is not None:
        raise incomplete(model)
    if not looks_like_hub_id((repository(model) or (model,))[0]):
        raise no_such(model)
    from snugvl.checkpoint.catalogue import meant_or

    hint = f"download it with: snugvl pull {model}"
    raise CheckpointNotFound(f"no model {model!r} on this machine{meant_or(model, hint)}")


def incomplete(model: str) -> CheckpointNotFound:
    """The error about a model of which the Hub cache has some files."""
    return CheckpointNotFound(f"the download of {model} is incomplete; finish it with: snugvl pull {model}")


def no_such(model: str) -> CheckpointNotFound:
    """The error about a name that is neither a model on this machine nor a Hub id."""
    from snugvl.checkpoint.catalogue import find, meant_or

    hint = f"use {POCKET!r}, a folder, or a Hub id such as Qwen/Qwen3-VL-2B-Instruct-FP8"
    if (meant := hub_id(model)) != model:
        return CheckpointNotFound(f"{model} is an address; the model's name is {meant}")
    if "://" in model:
        return CheckpointNotFound(f"{model} is not the address of a model at Hugging Face; {hint}")
    if (plain := model.strip().rstrip("/")) != model and find(plain) is not None:
        return CheckpointNotFound(f"there is no folder {model!r}; a model of the Hub is written {plain}")
    repo, _, revision = model.partition("@")
    if looks_like_hub_id(repo) and revision:
        way = f"snugvl pull {repo} --revision {revision}"
        return CheckpointNotFound(f"{model!r} is not the name of a model; for a revision of one: {way}")
    if (path := expanded(model)).is_symlink():
        return CheckpointNotFound(f"{model} is a link to {path.readlink()}, which isn't there")
    # Written like a folder, it can't be a Hub id.
    if model.startswith((".", "~", "/", "\\")) or model.endswith(("/", "\\")) or model.count("/") > 1:
        what = "file" if model.lower().endswith(SUFFIX) else "folder"
        return CheckpointNotFound(f"there is no {what} {model!r}; {hint}")
    if ":" in model and "/" not in model and not model.startswith(HUB):
        hint = f"a model that Ollama has here is written {OLLAMA}{model}; {hint}"
    return CheckpointNotFound(f"no model {model!r} on this machine{meant_or(model, hint)}")


def near(model: str) -> Path | None:
    """The folder of `model` on this machine, or None.

    Raises:
        CheckpointNotFound: `model` is a file.
    """
    if model == POCKET:
        return Path(__file__).parent.parent / "pocket"
    folder = expanded(model)
    if model and folder.is_dir():  # Path('') would be the current folder
        return folder
    if folder.is_file():
        raise CheckpointNotFound(f"{model} is a file; give the folder that holds config.json and the weights")
    return _in_hub_cache(model)


def is_hub_cached(model: str, folder: Path) -> bool:
    """Whether `folder`, which `near` found, is a snapshot of the Hub cache."""
    return model != POCKET and expanded(model) != folder


def complete(folder: Path) -> bool:
    """Whether a snapshot has its configuration and all its weights; others may fetch the former alone."""
    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except CheckpointError:
        return False


def looks_like_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name."""
    return is_repo(model) and not any(part.startswith((".", "~")) for part in model.split("/"))


def _in_hub_cache(model: str) -> Path | None:
    """The model's snapshot in the Hub cache, or None. refs/BRANCH has a commit, snapshots/COMMIT the
    files."""
    if not looks_like_hub_id(model):
        return None
    repo = repo_folder(model)
    ref = repo / "refs" / "main"
    try:
        commit = read_small(ref, MAX_REF_BYTES).decode().strip() if ref.is_file() else "main"
        snapshot = repo / "snapshots" / commit
        inside = snapshot.name == commit and commit != ".."
        return snapshot if inside and snapshot.is_dir() else None
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def training_of(model: str) -> Training:
    """Limits of `model`'s training; no limits where it is not on this machine, or says nothing."""
    try:
        folder = near(model)
        values = {} if folder is None else read_json(folder / "config.json")
        return read_training(values.get(TRAINING))
    except CheckpointError:
        return Training()

"""From what the user calls a model to the folder that holds it. Nothing is downloaded here."""

from pathlib import Path

from snugvl.errors import CheckpointNotFound

POCKET = "pocket"


def locate(model: str) -> Path:
    """The checkpoint folder of `model`: `pocket`, a folder, or a Hub id that is in the local cache.

    Raises:
        CheckpointNotFound: says how to get it.
    """
    if model == POCKET:
        return Path(__file__).parent.parent / "pocket"
    folder = Path(model).expanduser()
    if model and folder.is_dir():  # Path('') would be the current folder
        return folder
    if folder.is_file():
        raise CheckpointNotFound(f"{model} is a file; give the folder that holds config.json and the weights")
    cached = _in_hub_cache(model)
    if cached is not None:
        return cached
    hint = (
        f"download it with: hf download {model}"
        if _looks_like_hub_id(model)
        else f"use {POCKET!r}, a folder, or a Hub id such as Qwen/Qwen3-VL-2B-Instruct-FP8"
    )
    raise CheckpointNotFound(f"no model {model!r} on this machine; {hint}")


def _looks_like_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _in_hub_cache(model: str) -> Path | None:
    if not _looks_like_hub_id(model):
        return None
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None

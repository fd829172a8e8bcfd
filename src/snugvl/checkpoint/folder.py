"""A checkpoint folder as material for the planner: headers only, no weight is read."""

from pathlib import Path
from typing import Any

from snugvl.checkpoint.assemble import Material, Stored
from snugvl.checkpoint.facts import FactSource
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.checkpoint.section import read_json
from snugvl.errors import CheckpointError

CONFIG = "config.json"
IMAGES = "preprocessor_config.json"
PROCESSOR = "processor_config.json"


def folder_material(folder: Path, *, source: FactSource = "folder", revision: str | None = None) -> Material:
    """What a folder says of its model.

    Raises:
        CheckpointError: no config.json, no weights, or a file that is truncated or nonsense.
        UnsupportedModel: weights in another format than safetensors.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    config = read_json(folder / CONFIG)
    tensors = tuple(
        Stored(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in read_tensors(folder).values()
    )
    documents = {name: read_json(folder / name) for name in (IMAGES, PROCESSOR) if (folder / name).is_file()}
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Material(str(folder), source, revision, config, image_settings(documents), tensors, size)


def image_settings(documents: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The image processor's settings from the files that exist, or None.

    transformers 5 saves them inside processor_config.json; what else that file says of images (the tokens of
    one) is kept beside them.
    """
    processor = documents.get(PROCESSOR, {})
    nested = processor.get("image_processor")
    settings = nested if isinstance(nested, dict) else documents.get(IMAGES)
    if settings is None:
        return None
    lengths = {key: processor[key] for key in ("image_seq_len", "image_seq_length") if processor.get(key)}
    return {**settings, **lengths}

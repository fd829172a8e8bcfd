"""Limits of a checkpoint's training: "snugvl" in its config.json, which copies of it keep.

"snugvl": {"drawings": true, "videos": false, "min_images": 1, "max_images": 5}
"""

from typing import Final

from snugvl.checkpoint.locate import near
from snugvl.checkpoint.section import read_json
from snugvl.core.training import Training, read_training
from snugvl.errors import CheckpointError

KEY: Final = "snugvl"


def training_of(model: str) -> Training:
    """Limits of `model`'s training; no limits where it is not on this machine, or says nothing."""
    try:
        folder = near(model)
        return Training() if folder is None else read_training(read_json(folder / "config.json").get(KEY))
    except CheckpointError:
        return Training()

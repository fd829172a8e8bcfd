"""What a checkpoint says that it was trained on: "snugvl" in its config.json, which copies of it keep.

"snugvl": {"drawings": true, "videos": false, "min_images": 1, "max_images": 5}
"""

from collections.abc import Mapping
from typing import Any, Final

from snugvl.checkpoint.locate import near
from snugvl.checkpoint.section import read_json
from snugvl.core.training import Training
from snugvl.errors import CheckpointError

KEY: Final = "snugvl"


def training_of(model: str) -> Training:
    """Limits of `model`'s training; no limits where it is not on this machine, or says nothing."""
    try:
        folder = near(model)
        return Training() if folder is None else read_training(read_json(folder / "config.json").get(KEY))
    except CheckpointError:
        return Training()


def read_training(value: object) -> Training:
    """Limits as a checkpoint, or a server's `/v1/models`, writes them; what is no limit counts as none."""
    said: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    least, most = said.get("min_images"), said.get("max_images")
    return Training(
        drawings=said.get("drawings") is True,
        videos=said.get("videos") is not False,
        min_images=least if type(least) is int and least >= 0 else 0,
        max_images=most if type(most) is int and most >= 1 else None,
    )

"""What was read of a checkpoint, wherever it was, before anything is made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from snugvl.checkpoint.facts import FactSource


class Stored(NamedTuple):
    """One tensor as a header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Material:
    """What was read of a checkpoint.

    Attributes:
        where: the folder or the Hub id, for errors.
        config: config.json, or a GGUF's metadata.
        images: the image processor's settings, or the metadata of a GGUF's mmproj; None where there are none.
        download_bytes: weight files and the small files beside them.
    """

    where: str
    source: FactSource
    revision: str | None
    config: Mapping[str, Any]
    images: Mapping[str, Any] | None
    tensors: tuple[Stored, ...]
    download_bytes: int

"""Names of GGUF files: which are parts of one model, which quantisation they say, which is the mmproj.

Names of tensors are in `gguf_network.py`.

model-Q4_K_M.gguf                one file, or model-Q4_K_M-00001-of-00003.gguf and the others
mmproj-model-F16.gguf            its vision tower; of several the one named most like it, in 16 bits
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from snugvl.checkpoint.section import plain
from snugvl.errors import CheckpointError, CheckpointNotFound

SUFFIX: Final = ".gguf"
MAX_PARTS: Final = 1024
# An mmproj of 16 bits is what vendors test; in 32 it is twice as large for the same answers.
PROJECTOR_TYPES: Final = ("F16", "BF16", "Q8_0", "F32")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*)$", re.IGNORECASE)


def is_projector(name: str) -> bool:
    """Whether a file is a vision tower."""
    return "mmproj" in PurePosixPath(name).name.lower()


def is_first(name: str) -> bool:
    """Whether a file is a model's only one, or the first of its parts."""
    match = _PART.fullmatch(name)
    return not is_projector(name) and (match is None or int(match["number"]) == 1)


def parts_of(name: str) -> list[str]:
    """All parts of the model that a file is, or is a part of.

    Raises:
        CheckpointError: there are too many.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= MAX_PARTS:
        raise CheckpointError(f"{plain(name)} is one of {count:,} parts; {MAX_PARTS:,} are read at most")
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, count + 1)]


def says(name: str, quant: str) -> bool:
    """Whether a file's name has a quantisation as a word of its own: BF16 doesn't say F16."""
    pattern = rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, PurePosixPath(name).name, re.IGNORECASE) is not None


def first_of(names: Iterable[str], quant: str, where: str) -> str:
    """The file of a quantisation, or the first of its parts.

    Raises:
        CheckpointNotFound: there is none; names those there are.
    """
    models = sorted(name for name in names if name.lower().endswith(SUFFIX) and is_first(name))
    mine = next((name for name in models if says(name, quant)), None)
    if mine is None:
        there = sorted({quant_of(name) for name in models})
        has = f"it has {', '.join(map(plain, there))}" if there else "it has no GGUF files"
        raise CheckpointNotFound(f"{where} has no {plain(quant)}; {has}")
    return mine


def projectors_of(names: Iterable[str], model: str) -> list[str]:
    """The vision towers beside a model, the likeliest to belong to it first."""

    def rank(name: str) -> tuple[int, int, str]:
        kinds = [index for index, kind in enumerate(PROJECTOR_TYPES) if says(name, kind)]
        stem = re.sub(r"^mmproj[-_.]?|[-_.]?mmproj", "", PurePosixPath(name).name.lower())
        pairs = zip(stem, PurePosixPath(model).name.lower(), strict=False)
        shared = next((index for index, (mine, its) in enumerate(pairs) if mine != its), len(stem))
        return -shared, kinds[0] if kinds else len(PROJECTOR_TYPES), name

    return sorted((name for name in names if name.lower().endswith(SUFFIX) and is_projector(name)), key=rank)


def quant_of(name: str) -> str:
    """The quantisation that a file's name says; the whole name where it says none."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", PurePosixPath(name).stem)
    match = _QUANT.search(stem)
    return match[0] if match else stem

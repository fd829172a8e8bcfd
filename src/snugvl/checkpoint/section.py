"""JSON of a checkpoint, checked field by field: every error names the file, the field and its value."""

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snugvl.core.folders import read_small
from snugvl.errors import CheckpointError

MAX_COUNT = 2**40  # what products of a few of them still show in a line; no model has so many of anything
MAX_LAYERS = 1000  # a name is made for each tensor of each layer: nonsense must not fill the memory
MAX_JSON_BYTES = 64_000_000
ADAPTER = "adapter_config.json"

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 100, 100, 50


def shown(value: object) -> str:
    """`value` as Python writes it, cut where it is long or deep: it is from a file of unknown origin."""
    return _short.repr(value)


def plain(name: str) -> str:
    """A name as it is, or as Python writes it where its characters could garble a line."""
    return name if name.isprintable() and len(name) <= _short.maxstring else shown(name)


def foreign(first: bytes) -> str | None:
    """The kind of a file that begins with `first`, not with weights, and what to do, as a clause; or None."""
    if not first:
        return "is empty; download it again"
    if first.startswith(b"version http"[: len(first)]):
        return "is a Git LFS pointer, not the file itself; fetch it with git lfs pull, or download it again"
    if first.lstrip()[:2].lower() in (b"<!", b"<h", b"<?"):
        return "is a web page, saved under the model's name (of a login or an error?); download it again"
    if first[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "is in GGML, the format before GGUF, which nothing here reads; get the model as GGUF"
    return None


class Section:
    """A JSON object of a file; errors about missing or wrong fields name the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} is {shown(values)}, expected an object")
        self.values = values
        self.where = where

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"{self.where} has no {key!r}; the checkpoint's configuration is incomplete"
            )
        right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind is float:
            number = finite(value)
            value, right = (value, False) if number is None else (number, True)
        if not right:
            raise CheckpointError(f"{self.where} has {key!r} = {shown(value)}, expected {kind.__name__}")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        value: int = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.where} has {key!r} = {shown(value)}, expected a positive number")
        if value > most:
            raise CheckpointError(f"{self.where} has {key!r} = {shown(value)}; at most {most:,} is possible")
        return value

    def need(self, *keys: str) -> None:
        """Refuse a file that leaves one of `keys` out, whatever its default would be."""
        for key in keys:
            self.get(key, object)

    def require(self, right: bool, problem: str) -> None:
        """Raise CheckpointError unless `right`: contradictions are refused here, not deep in the network."""
        if not right:
            raise CheckpointError(f"{self.where}: {problem}")

    def section(self, key: str) -> "Section":
        return Section(self.get(key, dict), f"{self.where}: {key}")


def finite(value: object) -> float | None:
    """A number as float, or None: JSON has whole numbers that no float holds, and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def adapter_words(folder: Path) -> str | None:
    """The sentence about a folder that holds an adapter (LoRA) of another model; None for other folders."""
    if not (folder / ADAPTER).is_file():
        return None
    try:
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    of = f"of {shown(base)}" if isinstance(base, str) and base else "of another model"
    return (
        f"{folder} is an adapter (LoRA) {of}, not a whole model; merge it into that (merge_and_unload of "
        "peft), and name the folder that this is saved to"
    )


def _absent(folder: Path, name: str) -> str:
    """The sentence about a folder without a file that each checkpoint has, with the likely way out."""
    if adapter := adapter_words(folder):
        return adapter
    inside = (each.parent for kind in ("*", "snapshots/*") for each in folder.glob(f"{kind}/{name}"))
    if near := next((each for each in inside if next(each.glob("*.safetensors"), None)), None):
        return f"{folder} has no {name}, but {near} has; name that folder"
    return (
        f"{folder} has no {name}, so the checkpoint is incomplete; download it again, or name another folder"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(read_small(path, MAX_JSON_BYTES).decode())
    except FileNotFoundError:
        raise CheckpointError(_absent(path.parent, path.name)) from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value

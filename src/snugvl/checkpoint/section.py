"""JSON of a checkpoint, checked field by field: every error names the file, the field and its value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snugvl.errors import CheckpointError


class Section:
    """A JSON object that names itself when a field is missing or of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
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
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.where} has {key!r} = {value!r}, expected {kind.__name__}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.where} has {key!r} = {value}, expected a positive number")
        return value

    def section(self, key: str) -> "Section":
        return Section(self.get(key, dict), f"{self.where}: {key}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; it is not a complete checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value

"""The last start of our own engine on this machine: its memory, and what `snugvl bench` measured of one.

For `snugvl doctor --report`: figures, formats and names of networks; none of a model, a file or a person.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.core.folders import cache_folder, write_whole

MAX_FILE_BYTES: Final = 1 << 20
Part = Literal["start", "speed"]


def last_start_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where it lies."""
    return cache_folder(environ) / "last_start.json"


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Both parts that are there, by name. Never fails."""
    with suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_FILE_BYTES))
        if isinstance(value, dict):
            return {name: part for name, part in value.items() if isinstance(part, dict)}
    return {}


def save(path: Path, part: Part, value: Mapping[str, object]) -> None:
    """Keep a part in place of what was there; where that can't be written, nothing is kept."""
    document = json.dumps(load(path) | {part: dict(value)}, indent=1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda draft: draft.write_text(document + "\n", encoding="utf-8"))

"""The ledger: every component of memory, planned and measured, side by side; and the plan behind it.

Kept for `snugvl doctor --report`: the last start of our own engine on this machine, its memory, and what
`snugvl bench` measured of one; figures, formats and names of networks, none of a model, a file or a person.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.core.folders import cache_folder, json_object, write_whole
from snugvl.core.memory_kinds import Kind

LARGEST_FILE_BYTES: Final = 1 << 20
StartPart = Literal["start", "speed"]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One component of memory, in bytes.

    Attributes:
        name: name of the component in the plan or in the engine's log.
        planned_bytes: what the plan gave it, or None for what no plan knew of.
        measured_bytes: what it holds now, or None where that can't be told apart.
        used_bytes: how much of that is in use (KV blocks held by requests), where that makes sense.
        kind: how it is counted and shown.
    """

    name: str
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    used_bytes: int | None = None
    kind: Kind = Kind.OTHER


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A component of a plan: its bytes, in which phase it lives, and why it takes so much."""

    name: str
    nbytes: int
    phase: str
    why: str


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The plan that an engine runs, in plain values.

    Attributes:
        settings: every choice that changes a byte, by its name.
        total_bytes: what the parts come to in the largest phase.
        usable_bytes: what the plan counted on.
        changed: how it differs from what was printed, and why, as a sentence; empty where it doesn't.
        speed: the likely speed with its range, for people; empty where it isn't known.
    """

    settings: Mapping[str, object]
    parts: tuple[PlannedPart, ...]
    total_bytes: int
    usable_bytes: int
    changed: str
    speed: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Memory that one engine holds on its device, and all that the device has.

    Attributes:
        device: name of the device for people.
        rows: components, largest part of the plan first.
        total_bytes: bytes of memory that the device has (host memory for a CPU).
        free_bytes: bytes of it that are free now.
        process_bytes: bytes that the engine's process holds in all, as the driver or the system counts it.
        cap_bytes: what the process will never exceed, or None without a cap.
    """

    device: str
    rows: tuple[LedgerRow, ...]
    total_bytes: int
    free_bytes: int
    process_bytes: int
    cap_bytes: int | None = None

    @property
    def others_bytes(self) -> int:
        """Bytes that other processes hold."""
        return max(self.total_bytes - self.free_bytes - self.process_bytes, 0)

    def row(self, name: str) -> LedgerRow | None:
        """The component of that name; None where there is none."""
        return next((row for row in self.rows if row.name == name), None)


def last_start_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that keeps the last start."""
    return cache_folder(environ) / "last_start.json"


def read_last_start(path: Path) -> dict[str, dict[str, Any]]:
    """Both parts of the last start that are there, by name. Never fails."""
    with suppress(OSError), path.open("rb") as file:
        value = json_object(file.read(LARGEST_FILE_BYTES)) or {}
        return {name: part for name, part in value.items() if isinstance(part, dict)}
    return {}


def keep_last_start(path: Path, part: StartPart, value: Mapping[str, object]) -> None:
    """Keep a part in place of what was there; where that can't be written, nothing is kept."""
    document = json.dumps(read_last_start(path) | {part: dict(value)}, indent=1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda draft: draft.write_text(document + "\n", encoding="utf-8"))

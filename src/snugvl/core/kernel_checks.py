"""Findings of kernel checks on this machine's cards (`engine/kernel_check.py`), kept for later starts.

One JSON file in the user's cache folder. A check holds for one card, driver, torch, Triton and snugvl,
and for one job: a network's shapes and formats. Names of models and of files aren't in it.

    {"schema": 1, "checks": [{"on": {"gpu": …, …}, "job": …, "verdicts": [{"kernel": …, …}], …}]}
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from snugvl.core.folders import cache_folder, read_small, write_whole

T = TypeVar("T")
SCHEMA: Final = 1
MOST: Final = 64  # checks that are kept
MAX_FILE_BYTES: Final = 16 << 20
OK: Final = "ok"
UNCHECKED: Final = "not checked"  # how verdicts begin that say nothing of the kernel


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The outcome of checking one variant of a kernel.

    Attributes:
        kernel: name of its function.
        shape: of its first input and of what it is multiplied with, as people write it.
        error: largest error beside plain torch, as a share of what torch found; −1: none is known.
        ms: milliseconds of the operation that it is a part of; 0 where it wasn't timed.
        verdict: "ok", or what was wrong in a few words.
    """

    kernel: str
    shape: str
    error: float
    ms: float
    verdict: str

    @property
    def withdrawn(self) -> bool:
        """Whether the kernel isn't used because of it."""
        return self.verdict != OK and not self.verdict.startswith(UNCHECKED)


@dataclass(frozen=True, slots=True)
class CheckedOn:
    """Where a check holds. `capability`: CUDA's, such as "12.0"."""

    gpu: str
    capability: str
    driver: str
    torch: str
    triton: str
    snugvl: str


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One check.

    Attributes:
        job: digest of the shapes, the formats and our sources.
        network: its architecture and format, for people.
        seconds: it took.
        when: ISO 8601, UTC.
        loaded_bytes: GPU memory that libraries, kernels and their local memory took beside a context; −1:
            nobody could tell.
        whole: whether every kernel was looked at; else a later start checks again.
        context_bytes: GPU memory of the bare context before that; −1: the driver doesn't tell (WSL2), or the
            check is of before this was measured.
    """

    on: CheckedOn
    job: str
    network: str
    seconds: float
    when: str
    loaded_bytes: int
    whole: bool
    verdicts: tuple[KernelVerdict, ...]
    context_bytes: int = -1

    @property
    def withdrawn(self) -> tuple[KernelVerdict, ...]:
        """Verdicts of the kernels that were found wrong, one a kernel."""
        return tuple({each.kernel: each for each in self.verdicts if each.withdrawn}.values())


def told(verdicts: Iterable[KernelVerdict]) -> tuple[str, ...]:
    """A sentence for each kernel that isn't used."""
    return tuple(
        f"the kernel {each.kernel} isn't used on this GPU ({each.verdict}): slower ones or plain torch "
        "compute the same"
        for each in verdicts
    )


def checks_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the checks lie."""
    return cache_folder(environ) / "kernel_checks.json"


def load(path: Path) -> tuple[KernelCheck, ...]:
    """Checks that `path` holds, the oldest first; none where it can't be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        value = json.loads(read_small(path, MAX_FILE_BYTES))
        if value["schema"] == SCHEMA:
            return tuple(_check(each) for each in value["checks"])
    return ()


def add(path: Path, check: KernelCheck) -> None:
    """Put a check into `path` in place of an older one of the same.

    Raises:
        OSError: the folder or the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [each for each in load(path) if (each.on, each.job) != (check.on, check.job)]
    document = {"schema": SCHEMA, "checks": [asdict(each) for each in (*kept, check)[-MOST:]]}
    write_whole(path, lambda draft: draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8"))


def _check(value: Any) -> KernelCheck:
    on = CheckedOn(**value.pop("on"))
    verdicts = tuple(_whole(KernelVerdict(**each)) for each in value.pop("verdicts"))
    return _whole(KernelCheck(on=_whole(on), verdicts=verdicts, **value))


def _whole(made: T) -> T:
    """`made`, whose every plain field is of its type."""
    for field in fields(made):  # type: ignore[arg-type]
        if field.type in (str, float, bool, int) and type(getattr(made, field.name)) is not field.type:
            raise TypeError(field.name)
    return made

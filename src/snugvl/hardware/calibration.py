"""What was measured on this machine, so that later plans need not estimate it.

One JSON file in the user's cache folder. A figure holds for one GPU model, driver, torch and snugvl, one
engine, one component of the footprint, and one subject (a model and settings; "" where it depends on none).

    {"schema": 1, "measurements": [{"gpu": …, "engine": …, "component": …, "measured_bytes": …, …}]}

A file that can't be read counts as empty, with a note; it is replaced by the next measurement.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from snugvl.core.folders import cache_folder
from snugvl.hardware.machine import Gpu
from snugvl.hardware.software import torch_build
from snugvl.version import __version__

SCHEMA: Final = 1
ANY_ENGINE: Final = "any"
MAX_FILE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """Where a figure holds. `snugvl` "": whatever its version, for what isn't made by us."""

    gpu: str
    driver: str
    torch: str
    snugvl: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured component. `when`: ISO 8601, UTC."""

    gpu: str
    driver: str
    torch: str
    snugvl: str
    engine: str
    component: str
    subject: str
    planned_bytes: int
    measured_bytes: int
    when: str

    @property
    def key(self) -> tuple[str, ...]:
        """What a newer measurement of the same replaces."""
        return (self.gpu, self.driver, self.torch, self.snugvl, self.engine, self.component, self.subject)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of this machine. `note`: why the file couldn't be used, if it couldn't."""

    measurements: tuple[Measurement, ...] = ()
    note: str | None = None

    def measured(
        self, engine: str, component: str, place: MeasuredOn | None, *, subject: str = ""
    ) -> Measurement | None:
        """The figure for exactly this, before one for any engine or any snugvl, or None."""
        if place is None:
            return None
        matches = [
            each
            for each in self.measurements
            if (each.gpu, each.driver, each.torch) == (place.gpu, place.driver, place.torch)
            and each.snugvl in (place.snugvl, "")
            and each.engine in (engine, ANY_ENGINE)
            and (each.component, each.subject) == (component, subject)
        ]
        return max(matches, key=lambda each: (each.engine == engine, bool(each.snugvl)), default=None)


def place_of(gpu: Gpu, *, torch: str | None = None, snugvl: str = __version__) -> MeasuredOn | None:
    """Where figures of a probed GPU hold; None for a described one, of which nothing was measured."""
    if gpu.driver is None:
        return None
    if torch is None:
        build = torch_build()
        torch = build.version if build else ""
    return MeasuredOn(gpu.name, gpu.driver, torch, snugvl)


def calibration_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the measurements lie."""
    return cache_folder(environ) / "measurements.json"


def load(path: Path) -> Calibration:
    """What `path` holds. Never fails."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        return Calibration(
            note=f"Measurements in {path} can't be read ({error.strerror or error}); estimating."
        )
    try:
        if len(text) > MAX_FILE_BYTES:
            raise ValueError
        value = json.loads(text)
        if value["schema"] != SCHEMA:
            raise ValueError
        return Calibration(tuple(_measurement(each) for each in value["measurements"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Calibration(note=f"{path} is damaged or of another version; its measurements are ignored.")


def add(path: Path, measurements: Sequence[Measurement], *, largest: Sequence[Measurement] = ()) -> None:
    """Put `measurements` into `path`, each in place of an older one of the same; at once or not at all.

    Of `largest` only those that exceed an older one are taken: they depend on what ran as well.

    Raises:
        OSError: the folder or the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept = {each.key: each for each in (*load(path).measurements, *measurements)}
        for each in largest:
            if each.key not in kept or each.measured_bytes > kept[each.key].measured_bytes:
                kept[each.key] = each
        text = json.dumps(
            {"schema": SCHEMA, "measurements": [asdict(each) for each in kept.values()]}, indent=1
        )
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(draft).unlink()
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, so that two engines that finish together both leave their figures."""
    try:
        import fcntl
    except ImportError:  # Windows: the last writer wins
        yield
        return
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _measurement(value: Any) -> Measurement:
    """A measurement whose every field is there and of its type."""
    read = {field.name: value[field.name] for field in fields(Measurement)}
    for field in fields(Measurement):
        if type(read[field.name]) is not field.type:
            raise TypeError(field.name)
    if read["measured_bytes"] < 0 or read["planned_bytes"] < 0:
        raise ValueError
    return Measurement(**read)

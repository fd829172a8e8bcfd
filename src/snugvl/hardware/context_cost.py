"""What a CUDA context with torch's libraries costs: measured once in a throw-away process, then remembered.

    context = NVML free before − NVML free while the process holds nothing of its own after one cuBLAS product

so it includes the driver's context, torch's kernels and cuBLAS with its workspace: a plan must not add those
again. It depends on GPU, driver and torch, so it is kept for exactly these (`calibration.py`).

CUDA's own total of the card is taken along, as only a context tells it (`Gpu.cuda_total_bytes`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from snugvl.core.sizes import MIB, format_size
from snugvl.errors import EngineError
from snugvl.hardware import calibration
from snugvl.hardware.calibration import ANY_ENGINE, Measurement
from snugvl.hardware.machine import Gpu

COMPONENT: Final = "context"
TOTAL: Final = "CUDA's total"

# Published for single processes with lazily loaded kernels: 256 MiB (RTX 3090, torch 2.7+cu128,
# InvokeAI#9413), 426 MiB (RTX 6000 Ada, torch 2.10+cu130, unsloth-zoo#1053); ours, with a cuBLAS product:
# 719 MiB (H200; 526 of the driver alone). Plans take the higher of those for their kind of card.
DEFAULT_CONTEXT_BYTES: Final = 450 * MIB
OTHER_CONTEXT_BYTES: Final = 256 * MIB  # assumed
DATA_CENTRE_CONTEXT_BYTES: Final = 719 * MIB

SECONDS: Final = 180
TRIES: Final = 3
QUIET_BYTES: Final = 16 * MIB  # others may change this much meanwhile; more and the measurement is repeated


def estimate(gpu: Gpu) -> int:
    """The context's bytes where it wasn't measured: more for Hopper and data-centre Blackwell.

    Of other makers' GPUs nothing was measured: torch's libraries aren't there, so it is less.
    """
    return estimate_of(gpu.compute_capability) if gpu.api == "cuda" else OTHER_CONTEXT_BYTES


def estimate_of(compute_capability: tuple[int, int] | None) -> int:
    """Bytes of a CUDA context, estimated by compute capability alone."""
    big = compute_capability is not None and compute_capability[0] in (9, 10)
    return DATA_CENTRE_CONTEXT_BYTES if big else DEFAULT_CONTEXT_BYTES


def recall(gpu: Gpu, environ: Mapping[str, str] = os.environ) -> int | None:
    """The context's bytes as measured for this GPU, driver and torch, or None."""
    return _recall(gpu, COMPONENT, environ)


def recall_total(gpu: Gpu, environ: Mapping[str, str] = os.environ) -> int | None:
    """CUDA's total as measured for this GPU, driver and torch, or None."""
    return _recall(gpu, TOTAL, environ)


def _recall(gpu: Gpu, component: str, environ: Mapping[str, str]) -> int | None:
    file = calibration.calibration_file(environ)
    if gpu.driver is None or not file.exists():
        return None
    found = calibration.load(file).measured(ANY_ENGINE, component, calibration.place_of(gpu))
    return found.measured_bytes if found else None


@dataclass(frozen=True, slots=True)
class ContextStages:
    """NVML's free bytes in the life of the throw-away process; `end`: after it.

    `total`: CUDA's total of the card; 0 where it wasn't told.
    """

    before: int
    context: int
    kernels: int
    product: int
    settled: int
    end: int
    total: int = 0

    @property
    def driver_bytes(self) -> int:
        """The bare context."""
        return self.before - self.context

    @property
    def context_bytes(self) -> int:
        """All of it."""
        return self.before - self.settled

    @property
    def drift_bytes(self) -> int:
        """What others took or gave back meanwhile."""
        return abs(self.before - self.end)


def measure(
    gpu: Gpu,
    environ: Mapping[str, str] = os.environ,
    run: "Callable[[Gpu, Mapping[str, str]], ContextStages] | None" = None,
) -> ContextStages:
    """Measure the cost on `gpu` and remember it. Takes some seconds.

    Raises:
        EngineError: no CUDA torch, a described GPU, a process that fails, or others that don't hold still.
    """
    if gpu.uuid is None:
        raise EngineError(f"{gpu.name} was not probed on this machine, so its context can't be measured")
    drift = 0
    for _ in range(TRIES):
        stages = (run or _run)(gpu, environ)
        drift = stages.drift_bytes
        if drift <= QUIET_BYTES and stages.context_bytes > 0:
            _remember(gpu, stages, environ)
            return stages
    raise EngineError(
        f"other processes changed the memory of {gpu.name} by {format_size(drift)} while its context was "
        "measured; close them or try again"
    )


def _remember(gpu: Gpu, stages: ContextStages, environ: Mapping[str, str]) -> None:
    place = calibration.place_of(gpu, snugvl="")
    assert place is not None  # a probed GPU has a driver
    figures = [(COMPONENT, estimate(gpu), stages.context_bytes)]
    if stages.total:
        figures.append((TOTAL, gpu.cuda_total_bytes or gpu.total_bytes, stages.total))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    measurements = [
        Measurement(
            **asdict(place),
            engine=ANY_ENGINE,
            component=component,
            subject="",
            planned_bytes=planned,
            measured_bytes=measured,
            when=when,
        )
        for component, planned, measured in figures
    ]
    calibration.add(calibration.calibration_file(environ), measurements)


def _run(gpu: Gpu, environ: Mapping[str, str], command: Sequence[str] = ()) -> ContextStages:
    """One throw-away process; its stages."""
    line = [*(command or (sys.executable, "-m", "snugvl.hardware.context_child")), str(gpu.uuid)]
    environment = {**environ, "CUDA_VISIBLE_DEVICES": str(gpu.uuid)}
    try:
        ran = subprocess.run(  # noqa: S603 (ourselves)
            line, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"measuring the context of {gpu.name} took more than {SECONDS} s") from None
    lines = ran.stdout.strip().splitlines()
    try:
        return ContextStages(**_whole(json.loads(lines[-1])))
    except (IndexError, ValueError, TypeError):
        said = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
        raise EngineError(
            f"the context of {gpu.name} can't be measured: the process left with "
            f"{ran.returncode}, saying {said!r}"
        ) from None


def _whole(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(each) is int for each in value.values()):
        raise TypeError
    return value

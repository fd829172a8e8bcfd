"""Measurements on this machine, kept so that later plans need not estimate.

One JSON file in the user's cache folder. A figure holds for one GPU model, driver, torch and snugvl, one
engine, one component of the footprint, and one subject (a model and settings; "" where it depends on none).

    {"schema": 1, "measurements": [{"gpu": …, "engine": …, "component": …, "measured_bytes": …, …}]}

A file that can't be read counts as empty, with a note; it is replaced by the next measurement.

The memory of a CUDA context with torch's libraries is measured by every engine of ours that starts. Until one
has, a check of kernels (`core/kernel_checks.py`) counts where it took more than is assumed. And it is
measured once in a throw-away process:

    context = NVML free before − NVML free while the process holds nothing of its own after one cuBLAS product

so it includes the driver's context, torch's kernels and cuBLAS with its workspace: a plan must not add those
again. CUDA's own total of the card is taken along, as only a context tells it (`Gpu.cuda_total_bytes`). The
process is `python -m snugvl.hardware.calibration UUID`: it prints NVML's free bytes at each stage, and CUDA's
total, as one JSON object, and starts its work in another process, so that the last figure is taken when the
context is gone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from snugvl.core import kernel_checks
from snugvl.core.folders import cache_folder, read_small, write_whole
from snugvl.core.kernel_checks import KernelCheck, checks_file
from snugvl.core.sizes import GIB, MIB, format_size
from snugvl.errors import EngineError
from snugvl.hardware.machine import Gpu
from snugvl.hardware.software import torch_build
from snugvl.version import __version__

SCHEMA: Final = 1
ANY_ENGINE: Final = "any"
MAX_FILE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """The place where a figure holds. `snugvl` "": any version, for components that snugvl doesn't make."""

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
        """The key under which a newer measurement replaces this one."""
        return (self.gpu, self.driver, self.torch, self.snugvl, self.engine, self.component, self.subject)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of this machine. `note`: why the file couldn't be used, if it couldn't."""

    measurements: tuple[Measurement, ...] = ()
    note: str | None = None

    def measured(
        self, engine: str, component: str, place: MeasuredOn | None, *, subject: str = ""
    ) -> Measurement | None:
        """The figure for exactly this, else one for any engine or any version of snugvl, else None."""
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
    """The place where figures of a probed GPU hold; None for a described one, which has no measurements."""
    if gpu.driver is None:
        return None
    if torch is None:
        build = torch_build()
        torch = build.version if build else ""
    return MeasuredOn(gpu.name, gpu.driver, torch, snugvl)


def calibration_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file of the measurements."""
    return cache_folder(environ) / "measurements.json"


def load(path: Path) -> Calibration:
    """Read the measurements of `path`. Never fails: an unreadable file counts as empty."""
    try:
        text = read_small(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        return Calibration(
            note=f"Measurements in {path} can't be read ({error.strerror or error}); estimating."
        )
    try:
        value = json.loads(text)
        if value["schema"] != SCHEMA:
            raise ValueError
        return Calibration(tuple(_measurement(each) for each in value["measurements"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Calibration(note=f"{path} is damaged or of another version; its measurements are ignored.")


def add(path: Path, measurements: Sequence[Measurement], *, largest: Sequence[Measurement] = ()) -> None:
    """Put `measurements` into `path`, each replacing an older one of the same key; all at once or none.

    Measurements of `largest` replace only smaller ones: they depend on the requests that ran.

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

        def write(draft: Path) -> None:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())

        write_whole(path, write)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the writers' lock for the block, so that two engines that end together both keep their figures."""
    try:
        import fcntl
    except ImportError:  # Windows: the last writer wins
        yield
        return
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _measurement(value: Any) -> Measurement:
    """Make a measurement of a JSON object, refusing a missing field or a wrong type."""
    read = {field.name: value[field.name] for field in fields(Measurement)}
    for field in fields(Measurement):
        if type(read[field.name]) is not field.type:
            raise TypeError(field.name)
    if read["measured_bytes"] < 0 or read["planned_bytes"] < 0:
        raise ValueError
    return Measurement(**read)


COMPONENT: Final = "context"
TOTAL: Final = "CUDA's total"

# Published for single processes with lazily loaded kernels: 256 MiB (RTX 3090, torch 2.7+cu128,
# InvokeAI#9413), 426 MiB (RTX 6000 Ada, torch 2.10+cu130, unsloth-zoo#1053); ours, with a cuBLAS product:
# 719 MiB (H200; 526 of the driver alone). Plans take the higher of those for their kind of card.
DEFAULT_CONTEXT_BYTES: Final = 450 * MIB
OTHER_CONTEXT_BYTES: Final = 256 * MIB  # assumed
DATA_CENTRE_CONTEXT_BYTES: Final = 719 * MIB
# Of these 123 (RTX 3090), 213 and 264 MiB are local memory, which grows with the card, and this is the rest.
DEFAULT_REST_BYTES: Final = 237 * MIB
DATA_CENTRE_REST_BYTES: Final = 455 * MIB
# Local memory: a stack for every thread that a card can hold at a time, whether it runs or not. So much of a
# thread comes with a context (`cudaLimitStackSize`); the driver takes more of the whole card when a kernel is
# loaded that needs more. None of ours does on any card: `tests/layers/kernels/test_other_cards.py`.
STACK_BYTES: Final = 1024
# Threads that a multiprocessor holds. Source: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability".
THREADS: Final = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
MOST_THREADS: Final = 2048  # of the others

# Of a plan, beside the context, for our compiled kernels and the driver's part of recorded graphs.
KERNEL_BYTES: Final = 32 * MIB
LIBRARIES_BYTES: Final = 193 * MIB  # of the estimate, beyond the bare context, on the H200
CHECK_SPREAD_BYTES: Final = 8 * MIB  # twice what starts on one card differ by (benchmarks/LOG.md: 690 to 694)
MOST_CONTEXT_BYTES: Final = 3 * GIB  # more is not a context: others took memory while it was measured

SECONDS: Final = 180
TRIES: Final = 3
QUIET_BYTES: Final = 16 * MIB  # others may change this much meanwhile; more and the measurement is repeated


def estimate(gpu: Gpu) -> int:
    """Estimated bytes of a context that wasn't measured: more for Hopper and data-centre Blackwell.

    For other makers' GPUs it is a guess: torch's libraries aren't there, so it is less.
    """
    return estimate_of(gpu.compute_capability) if gpu.api == "cuda" else OTHER_CONTEXT_BYTES


def estimate_of(compute_capability: tuple[int, int] | None, multiprocessors: int = 0) -> int:
    """Bytes of a CUDA context, estimated by compute capability and, where known, multiprocessors."""
    big = compute_capability is not None and compute_capability[0] in (9, 10)
    least = DATA_CENTRE_CONTEXT_BYTES if big else DEFAULT_CONTEXT_BYTES
    rest = DATA_CENTRE_REST_BYTES if big else DEFAULT_REST_BYTES
    return max(least, rest + local_memory_bytes(compute_capability, multiprocessors))


def local_memory_bytes(
    compute_capability: tuple[int, int] | None, multiprocessors: int, stack_bytes: int = STACK_BYTES
) -> int:
    """Bytes of a card's memory that stacks of `stack_bytes` a thread take."""
    return multiprocessors * THREADS.get(compute_capability or (0, 0), MOST_THREADS) * stack_bytes


def _recall(gpu: Gpu, component: str, environ: Mapping[str, str]) -> Measurement | None:
    file = calibration_file(environ)
    if gpu.driver is None or not file.exists():
        return None
    return load(file).measured(ANY_ENGINE, component, place_of(gpu))


def with_measured(gpu: Gpu, environ: Mapping[str, str] = os.environ) -> Gpu:
    """The GPU with what was measured of its context here, by engines and by checks of kernels.

    An engine's figure counts, as it is what engines take. Until there is one a check's counts where it is
    more than what is assumed: its process runs each kernel beside plain torch.
    """
    found = _recall(gpu, COMPONENT, environ)
    known, basis = (found.measured_bytes, f"measured on this card{_day(found.when)}") if found else (None, "")
    checks = [(checked_bytes(gpu, each), each.when) for each in _checks(gpu, environ)]
    nbytes, when = max((each for each in checks if each[0] <= MOST_CONTEXT_BYTES), default=(0, ""))
    if nbytes and known is None:
        check = f"a check of kernels{_day(when)}"
        if nbytes > estimate(gpu):
            known, basis = nbytes, f"measured on this card by {check}"
        else:
            basis = f"documented default; {check} saw no more"
    told = _recall(gpu, TOTAL, environ)
    total = told.measured_bytes if told else gpu.cuda_total_bytes
    return replace(gpu, context_bytes=known, context_basis=basis, cuda_total_bytes=total)


def checked_bytes(gpu: Gpu, check: KernelCheck) -> int:
    """Bytes of a context with torch's libraries, by what a check of kernels took.

    With what torch gives cuBLAS and with what such figures differ by, without a plan's part for our kernels.
    Where the driver doesn't tell what a bare context takes it is what an estimate leaves for it.
    """
    bare = check.context_bytes if check.context_bytes >= 0 else max(estimate(gpu) - LIBRARIES_BYTES, 0)
    planned = KERNEL_BYTES - cublas_bytes(gpu.compute_capability)
    return max(bare + check.loaded_bytes - planned, 0) + CHECK_SPREAD_BYTES


def cublas_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of cuBLAS' workspace in torch, for each stream: 32 MiB since Hopper, 8.1 MiB before."""
    return 32 * MIB if capability is None or capability[0] >= 9 else 8_519_680


def _checks(gpu: Gpu, environ: Mapping[str, str]) -> list[KernelCheck]:
    """Checks of this card with the driver, torch and Triton that are here, which measured its memory."""
    file = checks_file(environ)
    if gpu.driver is None or not file.exists():
        return []
    place, triton = place_of(gpu), triton_version()
    assert place is not None
    return [
        each
        for each in kernel_checks.load(file)
        if (each.on.gpu, each.on.driver, each.on.torch) == (place.gpu, place.driver, place.torch)
        and each.on.triton.partition("+")[0] == triton
        and each.loaded_bytes >= 0
    ]


def triton_version() -> str:
    """The version of Triton that is installed, without its build; empty without one."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("triton").partition("+")[0]
    return ""


def _day(when: str) -> str:
    """ " on 27 Nov 2026", or nothing where it isn't a time."""
    with suppress(ValueError):
        day = datetime.fromisoformat(when)
        return f" on {day.day} {day:%b %Y}"
    return ""


@dataclass(frozen=True, slots=True)
class ContextStages:
    """NVML's free bytes at each stage of the throw-away process; `end`: after it.

    `total`: CUDA's total of the card; 0 where unknown.
    """

    before: int
    context: int
    kernels: int
    product: int
    settled: int
    end: int
    total: int = 0

    @property
    def context_bytes(self) -> int:
        """Bytes of context, kernels and libraries together."""
        return self.before - self.settled

    @property
    def drift_bytes(self) -> int:
        """Bytes that other programs took or freed meanwhile."""
        return abs(self.before - self.end)


def measure(
    gpu: Gpu,
    environ: Mapping[str, str] = os.environ,
    run: "Callable[[Gpu, Mapping[str, str]], ContextStages] | None" = None,
) -> ContextStages:
    """Measure the context's memory on `gpu` and keep it. Takes some seconds.

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
    place = place_of(gpu, snugvl="")
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
    add(calibration_file(environ), measurements)


def _run(gpu: Gpu, environ: Mapping[str, str], command: Sequence[str] = ()) -> ContextStages:
    """Run one throw-away process and return its stages."""
    line = [*(command or (sys.executable, "-m", "snugvl.hardware.calibration")), str(gpu.uuid)]
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
            f"the context of {gpu.name} can't be measured: its process exited with {ran.returncode}: {said!r}"
        ) from None


def _whole(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(each) is int for each in value.values()):
        raise TypeError
    return value


WORK = "--work"


def stages(free: Callable[[], int]) -> dict[str, int]:
    """Free bytes with a context, after a kernel, after a cuBLAS product, and with all tensors freed.

    It also has CUDA's `total` of the card's memory, which NVML doesn't tell.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} can't use a GPU here")
    found = {}
    torch.cuda.synchronize()  # makes the context
    found["context"] = free()
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    found["kernels"] = free()
    product = ones @ ones
    product.sum().item()
    found["product"] = free()
    del ones, product
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    found["settled"] = free()
    found["total"] = torch.cuda.mem_get_info()[1]
    return found


def main(uuid: str, *, work: bool) -> None:
    """Print the stages; `work`: those in which the context lives."""
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def free() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)

    if work:
        sys.stdout.write(json.dumps(stages(free)) + "\n")
        return
    before = free()
    command = [sys.executable, "-m", "snugvl.hardware.calibration", uuid, WORK]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 (ourselves)
    if ran.returncode:
        sys.exit(ran.returncode)
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    sys.stdout.write(json.dumps({"before": before, **found, "end": free()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], work=WORK in sys.argv)

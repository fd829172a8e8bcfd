"""The device that a model goes to: its free memory, and how much of it this process may take."""

import logging
from dataclasses import dataclass, replace

import torch

from snugvl.backends.measure import process_reader
from snugvl.core.options import DtypeName
from snugvl.errors import EngineError, RequestError
from snugvl.hardware import host, nvml
from snugvl.hardware.advice import no_launcher, unusable
from snugvl.hardware.calibration import estimate_of
from snugvl.hardware.machine import Gpu, Machine, OperatingSystem
from snugvl.hardware.probe import probe
from snugvl.hardware.software import build_tools, torch_build
from snugvl.layers.device import CAPTURES, give_back_free_blocks, in_thread_that_ends, stream_on
from snugvl.layers.kernels.compiler.first_launch import has_launcher
from snugvl.planner.budget import Budget, beside_bytes, host_margin_bytes, margin_bytes
from snugvl.planner.engines.native.footprint import KERNEL_BYTES
from snugvl.planner.footprint.total import MOST_MULTIPROCESSORS, Device

# What is not a context with libraries: other programs took or gave memory while it was measured.
LEAST_DRIVER_BYTES, MOST_DRIVER_BYTES = 64 << 20, 3 << 30
logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """A device with its free memory.

    Attributes:
        name: its name for people.
        free_bytes: free bytes now; for a GPU before this process has a CUDA context, where that can be read.
        context_bytes: bytes of the CUDA context and its libraries that are still to come.
        limit_bytes: most that may be taken, the context included, or None without a wish.
        gpu: NVML's facts of it, or None.
        host_bytes: host memory that weights beside a GPU may take; None where it wasn't measured.
        pinned_bytes: available page-locked host memory, where it is scarce (WSL2), or None.
        seen: the machine, where it was probed already.
    """

    device: torch.device
    name: str
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    system: OperatingSystem = "linux"
    context_bytes: int = 0
    context_measured: bool = False
    limit_bytes: int | None = None
    multiprocessors: int = MOST_MULTIPROCESSORS
    gpu: Gpu | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    seen: Machine | None = None

    @property
    def machine(self) -> Machine:
        """The machine with this device alone."""
        gpus = () if self.gpu is None else (self.gpu,)
        if self.seen is not None:
            return replace(self.seen, gpus=gpus)
        free = self.host_bytes or self.free_bytes
        return Machine(self.system, gpus, 1, free, free, 0, pinned_bytes=self.pinned_bytes)

    @property
    def budget(self) -> Budget:
        """The budget for the solver: bytes that others hold, the margin, and bytes that may be used."""
        total = self.free_bytes if self.gpu is None else max(self.gpu.total_bytes, self.free_bytes)
        margin = self.free_bytes - self.usable_bytes
        return Budget(self.name, total, total - self.free_bytes, margin, self.planned(), self.gpu)

    @property
    def unified(self) -> bool:
        """Whether the GPU's memory is host memory."""
        return self.gpu is not None and self.gpu.unified

    @property
    def margin_bytes(self) -> int:
        """Bytes of the free memory that are left alone."""
        if self.device.type == "cpu" or self.unified:
            return host_margin_bytes(self.free_bytes)
        return margin_bytes(self.free_bytes, self.system)

    @property
    def usable_bytes(self) -> int:
        """Bytes that the engine may take."""
        usable = max(self.free_bytes - self.margin_bytes, 0)
        return usable if self.limit_bytes is None else min(usable, self.limit_bytes)

    def _context_basis(self) -> str:
        """Where the context's bytes are from, in words; empty where this process has measured them."""
        kept = self.gpu is not None and self.gpu.context_bytes in (None, self.context_bytes)
        return self.gpu.context_basis if self.gpu is not None and kept else ""

    def planned(self) -> Device:
        """The device for the planner."""
        cpu = self.device.type == "cpu"
        return Device(
            self.context_bytes,
            self.context_measured,
            self.compute_capability,
            cpu=cpu,
            free_bytes=min(self.free_bytes, self.limit_bytes or self.free_bytes) if cpu else 0,
            multiprocessors=self.multiprocessors,
            host_bytes=self.host_bytes,
            pinned_bytes=self.pinned_bytes,
            unified=self.unified,
            context_basis=self._context_basis(),
        )


def device_of(name: str) -> torch.device:
    """The device that a user names, as `LoadOptions` has it.

    Raises:
        RequestError: it is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return device_of("cuda")
        if why := _hindrance(0):
            logger.warning("the model runs on the processor: %s", why)
        return torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        # With a driver that is too old torch counts GPUs, by NVML, and has none.
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            why = _hindrance(device.index or 0) or f"torch sees {count} CUDA GPUs"
            raise RequestError(f"device {name!r} is not there: {why}; use cpu", field="device")
        if ":" not in name:  # the first one, unless the process has chosen
            initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            return torch.device("cuda", torch.cuda.current_device() if initialized else 0)
    return device


def _hindrance(index: int) -> str | None:
    """Why torch can't use a GPU that the driver shows, with what to do; None where none is shown."""
    machine, build = probe(), torch_build()
    gpu = next((gpu for gpu in machine.gpus if gpu.index == index), None)
    return None if gpu is None or build is None else unusable(gpu, machine, build)


def dtype_of(name: DtypeName, place: TargetDevice, *, wide: bool) -> torch.dtype:
    """Type of activations: as asked for, else by a GPU's age; float32 on a CPU where it is `wide`."""
    if name != "auto":
        return DTYPES[name]
    if place.compute_capability is not None:
        return torch.bfloat16 if place.compute_capability >= (8, 0) else torch.float16
    return torch.float32 if wide else torch.bfloat16


def place_on(
    device: torch.device,
    limit_bytes: int | None = None,
    machine: Machine | None = None,
    *,
    kernels: bool = True,
) -> TargetDevice:
    """The device with its memory now.

    Args:
        limit_bytes: most bytes that the user allows, or None.
        machine: as it was before this process had a CUDA context, where it was probed then.
        kernels: whether our own kernels will run there, on a GPU.

    Raises:
        EngineError: Triton can't launch kernels, for want of a compiler.
        RequestError: the limit is nothing, or not even the CUDA context fits into it.
    """
    if device.type == "cpu":
        return TargetDevice(device, "host memory", host.memory().free_bytes, limit_bytes=limit_bytes)
    # What Triton compiled on this machine once is enough.
    if kernels and (lacking := no_launcher(build_tools())) and not has_launcher():
        raise EngineError(lacking)
    fresh = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    machine = machine or probe()  # first: whatever asks torch for more makes a context
    facts = torch.cuda.get_device_properties(device)
    gpu = next((gpu for gpu in machine.gpus if gpu.index == (device.index or 0)), None)
    capability = (facts.major, facts.minor)
    measured = gpu.context_bytes if gpu is not None else None
    cost = estimate_of(capability, facts.multi_processor_count) if measured is None else measured
    if limit_bytes is not None and limit_bytes <= cost:
        raise RequestError(
            f"memory of {limit_bytes:,} bytes doesn't even hold the CUDA context and its libraries "
            f"({cost:,} bytes on {facts.name}); give more",
            field="memory",
        )
    if fresh and gpu is not None:
        free = gpu.free_bytes
    else:  # a context is there already, perhaps with other models: only what is new counts
        free = torch.cuda.mem_get_info(device)[0]
        taken = process_reader(device)() or cost + torch.cuda.memory_reserved(device)
        limit_bytes = None if limit_bytes is None else max(limit_bytes - taken, 0)
        cost = 0
    return TargetDevice(
        device,
        facts.name,
        free,
        capability,
        machine.os,
        cost,
        measured is not None,
        limit_bytes,
        facts.multi_processor_count,
        gpu,
        beside_bytes(machine, gpu),
        machine.pinned_bytes,
        machine,
    )


def with_driver(place: TargetDevice) -> TargetDevice:
    """`place` with the driver's memory as this process has it: all that our engine needs of it is taken now,
    before anything is planned, and measured.

    The context, cuBLAS with its handle and the stream of captures cost what card, driver and torch make of
    them. Nothing is done on a CPU, or where this process had a context when it was looked at. A figure that
    an earlier engine left stays where it is larger: kernels that came later are part of it.

    Where the driver doesn't tell what a process holds (WSL2, some containers), it is what the card has lost
    since `place.free_bytes`, unless that can't be a context: others also take and give memory.
    """
    if place.device.type == "cpu" or not place.context_bytes:
        return place
    in_thread_that_ends(lambda: _take_driver(place.device))
    give_back_free_blocks()
    taken = process_reader(place.device)()
    if taken is not None:
        known = place.context_bytes if place.context_measured else 0
        return replace(place, context_bytes=max(taken, known), context_measured=True)
    free = _free_bytes(place)
    lost = 0 if free is None else place.free_bytes - free
    if not LEAST_DRIVER_BYTES <= lost <= MOST_DRIVER_BYTES:
        return place
    return replace(place, context_bytes=lost, context_measured=True)


def _take_driver(device: torch.device) -> None:
    """Make a context, a stream, kernels, a product by cuBLAS: `hardware/calibration.py` measures the same."""
    stream_on(device, CAPTURES)
    ones = torch.ones(1024, 1024, device=device, dtype=torch.float16)
    (ones @ ones).sum().item()


def _free_bytes(place: TargetDevice) -> int | None:
    """The card's free memory by NVML, as `TargetDevice.free_bytes` is; None where it doesn't tell."""
    module = nvml.started()
    if module is None or place.gpu is None or place.gpu.uuid is None:
        return None
    try:
        return int(module.nvmlDeviceGetMemoryInfo(module.nvmlDeviceGetHandleByUUID(place.gpu.uuid)).free)
    except module.NVMLError:
        return None


def cap(place: TargetDevice, late_bytes: int = 0) -> int | None:
    """Forbid torch to take more than planned from now on; returns the limit of the process in bytes, None on
    a CPU.

    torch counts its own allocations alone, so the context comes off, and what the driver may load later.
    """
    if place.device.type == "cpu":
        return None
    before = torch.cuda.memory_reserved(place.device)
    total = torch.cuda.get_device_properties(place.device).total_memory
    # What torch gives cuBLAS is part of the context as it was measured, and torch's allocation.
    context = place.context_bytes + KERNEL_BYTES + late_bytes if place.context_bytes else 0
    most = before + place.usable_bytes - context + place.planned().cublas_bytes
    torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0), place.device)
    return before + place.usable_bytes


def hold(device: torch.device, most_bytes: int) -> None:
    """Forbid torch to take more than this, from now on, where it was allowed more."""
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(max(most_bytes, 0) / total, allowed), device)

"""How much of a machine may be used: free memory less a margin.

| system | margin | why |
|---|---|---|
| WSL2, Windows | 10 % of free, at least 256 MiB | free is not usable there: 0.3 to 1.3 GiB were missing |
| Linux and others | 3 % of free, 128 MiB to 1 GiB | the band of our own predictions |
| host memory (no GPU, or one that has it) | 10 % of free, at least 512 MiB | the system's own needs vary |

Under WSL2 what exceeds the usable memory silently moves to system memory and runs 2 to 10 times slower.
A budget never shrinks when more memory is free.
"""

from dataclasses import dataclass, replace

from snugvl.core.sizes import GIB, MIB, format_size
from snugvl.hardware.calibration import estimate
from snugvl.hardware.devices import NAMES
from snugvl.hardware.machine import RESERVED, SYSTEM_BYTES, Gpu, Machine, OperatingSystem
from snugvl.planner.engines.transformers.footprint import HOST_PROCESS_BYTES
from snugvl.planner.footprint.total import Device

WINDOWS_BYTES = 4 * GIB  # of a PC's memory that WSL2 is never told to take


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one device: total = held by others + margin + usable. `gpu` is None for host memory.

    `forbidden_bytes`: the part of the margin that is left alone only because a limit was given.
    `ram_bandwidth`, `cores`: of the machine around it, see `Machine`; no cores: unknown.
    `most_bytes`: of host memory under WSL2, what it could be given (`wsl_most_bytes`); else None.
    """

    name: str
    total_bytes: int
    held_bytes: int
    margin_bytes: int
    device: Device
    gpu: Gpu | None = None
    forbidden_bytes: int = 0
    system: OperatingSystem = "linux"
    ram_bandwidth: float | None = None
    cores: int = 0
    most_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that a footprint may take, its CUDA context included."""
        return max(0, self.total_bytes - self.held_bytes - self.margin_bytes)

    @property
    def page_locks(self) -> bool:
        """Whether the system gives page-locked memory for gigabytes of weights, of which WSL2 has little."""
        return self.system != "wsl2"

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that other programs don't hold."""
        return self.total_bytes - self.held_bytes


def margin_bytes(free_bytes: int, system: OperatingSystem) -> int:
    """Bytes of free GPU memory that are left alone."""
    if system in ("wsl2", "windows"):
        return min(free_bytes, max(free_bytes // 10, 256 * MIB))
    return min(free_bytes, max(min(free_bytes * 3 // 100, GIB), 128 * MIB))


def host_margin_bytes(free_bytes: int) -> int:
    """Bytes of free host memory that are left alone."""
    return min(free_bytes, max(free_bytes // 10, 512 * MIB))


def programs_bytes(budget: Budget) -> int:
    """Bytes that other programs hold and could free: without the driver's part and the system's own."""
    gpu = budget.gpu
    if gpu is None:
        return max(0, budget.held_bytes - SYSTEM_BYTES)
    return max(0, budget.held_bytes - sum(each.held_bytes for each in gpu.tenants if each.name == RESERVED))


def free_for(budget: Budget, nbytes: int) -> int:
    """Free bytes with which at least `nbytes` are usable, under the larger of the systems' margins."""
    return max(-(-nbytes * 10 // 9), nbytes + _floor(budget))


def changed(budget: Budget, free_bytes: int, limit_bytes: int | None) -> Budget:
    """The budget with `free_bytes` free and that limit instead, under the larger of the systems' margins."""
    usable = max(0, free_bytes - max(free_bytes // 10, _floor(budget)))
    usable = usable if limit_bytes is None else min(usable, limit_bytes)
    return replace(budget, held_bytes=budget.total_bytes - free_bytes, margin_bytes=free_bytes - usable)


def _floor(budget: Budget) -> int:
    return 512 * MIB if budget.gpu is None or budget.device.unified else 256 * MIB


def gpu_budget(
    gpu: Gpu,
    system: OperatingSystem,
    limit_bytes: int | None = None,
    host_bytes: int | None = None,
    pinned_bytes: int | None = None,
) -> Budget:
    """The budget of one GPU: what is free beyond `limit_bytes` counts as margin.

    `host_bytes`, `pinned_bytes`: see `Device`.
    """
    margin = host_margin_bytes(gpu.free_bytes) if gpu.unified else margin_bytes(gpu.free_bytes, system)
    device = Device(
        estimate(gpu) if gpu.context_bytes is None else gpu.context_bytes,
        gpu.context_bytes is not None,
        gpu.compute_capability,
        host_bytes=host_bytes,
        pinned_bytes=pinned_bytes,
        api=NAMES[gpu.api],
        unified=gpu.unified,
        context_basis=gpu.context_basis,
    )
    found = Budget(gpu.name, gpu.total_bytes, gpu.held_bytes, margin, device, gpu, system=system)
    return _limited(found, limit_bytes)


def _limited(budget: Budget, limit_bytes: int | None) -> Budget:
    """A copy of the budget in which all free memory beyond the limit is margin."""
    forbidden = 0 if limit_bytes is None else max(0, budget.free_bytes - limit_bytes - budget.margin_bytes)
    return replace(budget, margin_bytes=budget.margin_bytes + forbidden, forbidden_bytes=forbidden)


def host_budget(machine: Machine, limit_bytes: int | None = None) -> Budget:
    """The budget of host memory, for a machine without a GPU."""
    free, total = machine.ram_free_bytes, machine.ram_total_bytes
    device = Device(0, cpu=True, free_bytes=free if limit_bytes is None else min(free, limit_bytes))
    margin = host_margin_bytes(free)
    found = Budget(
        "host memory",
        total,
        total - free,
        margin,
        device,
        system=machine.os,
        ram_bandwidth=machine.ram_bandwidth,
        cores=machine.cpu_cores,
        most_bytes=wsl_most_bytes(machine),
    )
    return _limited(found, limit_bytes)


def ram_for(nbytes: int, held_bytes: int = SYSTEM_BYTES) -> int:
    """Host memory, whole GiB in bytes, of which `nbytes` may be used beside what is held and the margin."""
    whole = max(-(-nbytes * 10 // 9), nbytes + 512 * MIB) + max(held_bytes, SYSTEM_BYTES)
    return -(-whole // GIB) * GIB


def wsl_words(needed_bytes: int) -> str:
    """The clause that says how to give WSL2 `needed_bytes` of the PC's memory."""
    return (
        f"in %UserProfile%\\.wslconfig write [wsl2] and below it memory={needed_bytes // GIB}GB, then run "
        "wsl --shutdown in Windows"
    )


def wsl_remedy(needed_bytes: int, most_bytes: int) -> str:
    """The clause that says how to give WSL2 `needed_bytes`, of a PC that can give it `most_bytes`."""
    if needed_bytes <= most_bytes:
        return f" for WSL2: {wsl_words(needed_bytes)}"
    return f" for WSL2, of a PC that has {format_size(needed_bytes + WINDOWS_BYTES)}"


def wsl_most_bytes(machine: Machine) -> int | None:
    """Memory that WSL2 could be given of the PC around it, in bytes, Windows left its part; None elsewhere.

    WSL2 has half of a PC whose memory wasn't given, as it does by default.
    """
    if machine.os != "wsl2" or machine.container:
        return None
    return max((machine.pc_ram_bytes or 2 * machine.ram_total_bytes) - WINDOWS_BYTES, 0)


def beside_bytes(machine: Machine, gpu: Gpu | None = None) -> int:
    """Bytes of host memory that weights beside a GPU may take; what one in the processor takes is missing."""
    taken = gpu.free_bytes if gpu is not None and gpu.unified else 0
    return max(host_budget(machine).usable_bytes - HOST_PROCESS_BYTES - taken, 0)


def budgets(machine: Machine, limit_bytes: int | None = None) -> list[Budget]:
    """One budget a GPU, most usable first; host memory where there is no GPU.

    `limit_bytes`: most that may be taken of each.
    """
    found = []
    for gpu in machine.gpus:
        host_bytes = beside_bytes(machine, gpu)
        budget = gpu_budget(gpu, machine.os, limit_bytes, host_bytes, machine.pinned_bytes)
        found.append(replace(budget, ram_bandwidth=machine.ram_bandwidth, cores=machine.cpu_cores))
    return sorted(found, key=lambda budget: -budget.usable_bytes) or [host_budget(machine, limit_bytes)]

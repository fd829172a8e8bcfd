"""A machine from a description, to plan for one that isn't here."""

from dataclasses import replace
from typing import Final, get_args

from snugvl.core.sizes import GIB, format_size, parse_size
from snugvl.errors import InputError
from snugvl.hardware import gpus
from snugvl.hardware.devices import with_used
from snugvl.hardware.machine import (
    RESERVED,
    SHARES,
    SYSTEM_BYTES,
    Gpu,
    Machine,
    OperatingSystem,
    Tenant,
    ddr_bandwidth,
)

DESKTOP: Final = "desktop and other apps"
NO_GPU: Final = "none"

# Windows draws on the GPU that shows the desktop: 0.3 to 1.3 GiB were seen (memory.md, section D).
ASSUMED_DESKTOP_BYTES: Final = 1 * GIB
ASSUMED_RAM_BYTES: Final = 16 * GIB
ASSUMED_DISK_BYTES: Final = 1024 * GIB
ASSUMED_CORES: Final = 8
MAX_GPUS: Final = 1024


def describe(
    gpu: str | None = None,
    *,
    os: str = "linux",
    held: str | int | None = None,
    vram: str | int | None = None,
    count: int = 1,
    ram: str | int | None = None,
    ddr: str | None = None,
) -> Machine:
    """A machine with `count` GPUs of one kind; missing values are assumed, and a note says so.

    Args:
        gpu: a name of the table, however spelled, or "none"; or None with `vram`: an NVIDIA GPU of that
            memory.
        held: memory of each GPU that others hold, such as "951MiB". On Linux the driver keeps its part beside
            that (`gpus.reserved_bytes`), which nvidia-smi shows neither as used nor as free.
        vram: total memory of each GPU; the table's by default.
        ram: system memory, of which the system has its part; under WSL2 the PC's, of which WSL2 has half.
        ddr: its kind, such as "DDR4-3200", of two channels; "4xDDR4-3200" has four.

    Raises:
        InputError: an unknown GPU or system, or a GPU that the system doesn't have; a size that is no
            size, zero or negative; more held than there is.
    """
    system = _system(os)
    model = _model(gpu, system, held, vram, count)
    notes: list[str] = []
    ram_bytes = _size(ram, "ram")
    said = ram_bytes is not None
    usual = model.total_bytes if model is not None and model.unified else 0
    ram_bytes = ram_bytes or usual or ASSUMED_RAM_BYTES
    pc_bytes = ram_bytes if said and system == "wsl2" else None
    ram_bytes = ram_bytes if pc_bytes is None else pc_bytes // 2
    taken = min(SYSTEM_BYTES, ram_bytes // 4)
    rest = f"{format_size(taken)} of it"
    by = "held by the system and other programs"
    half = "" if pc_bytes is None else f"WSL2 has half of the PC's {format_size(pc_bytes)}, "
    notes.append(
        f"System memory: {half}{rest} is assumed to be {by}."
        if said
        else f"System memory wasn't described; {format_size(ram_bytes)} is assumed, {rest} {by}; "
        "--ram SIZE says how much there is."
    )
    machine = Machine(
        os=system,
        gpus=(),
        cpu_cores=ASSUMED_CORES,
        ram_total_bytes=ram_bytes,
        ram_free_bytes=ram_bytes - taken,
        disk_free_bytes=ASSUMED_DISK_BYTES,
        source="described",
        spills=system in ("wsl2", "windows"),
        pinned_bytes=ram_bytes // 2 if system in ("wsl2", "windows") else None,
        notes=tuple(notes),
        ram_bandwidth=_bandwidth(ddr),
        ram_assumed=not said,
        pc_ram_bytes=pc_bytes,
    )
    if model is None and gpu is not None:
        return machine
    cards = _gpus(model, machine, _size(vram, "vram"), _size(held, "held", zero=True), count, notes)
    machine = replace(machine, notes=tuple(notes))
    return with_used(machine, cards) if cards[0].api != "cuda" else replace(machine, gpus=cards)


def _model(
    name: str | None, system: OperatingSystem, held: str | int | None, vram: str | int | None, count: int
) -> gpus.GpuModel | None:
    """The GPU of the table; None for no GPU, and for one without a name.

    Raises:
        InputError: an unknown one, or one that a machine can't have together with the rest.
    """
    if not 1 <= count <= MAX_GPUS:
        raise InputError(f"number of GPUs {count} is not from 1 to {MAX_GPUS}")
    if name is not None and name.strip().lower() == NO_GPU:
        if vram is not None or held is not None or count > 1:
            raise InputError("GPUs were described for a machine with --gpu none; leave one of them out")
        return None
    if name is None and vram is None:
        raise InputError("a description needs a GPU: --gpu rtx-5060, --vram 8151MiB, or --gpu none")
    model = gpus.lookup(name, _size(vram, "vram")) if name is not None else None
    if (model is not None and model.api == "metal") != (system == "macos"):
        what = f"no Mac has {name or 'an NVIDIA GPU'}" if system == "macos" else f"{name} is a Mac's"
        raise InputError(
            f"{what}, but --os is {system}; a Mac is --os macos --gpu m4 (or another) --ram 16GiB"
        )
    if model is not None and model.unified and (vram is not None or held is not None or count > 1):
        raise InputError(f"{name} has host memory as its own; describe that with --ram alone")
    return model


def _gpus(
    model: gpus.GpuModel | None,
    machine: Machine,
    vram_bytes: int | None,
    held_bytes: int | None,
    count: int,
    notes: list[str],
) -> tuple[Gpu, ...]:
    if model is None:
        notes.append("The GPU has no name: its speed and what it can compute aren't known.")
    elif model.unified:
        if model.api == "cuda":
            notes.append(SHARES.format(model.product))
        return (_unified(model, machine),)
    total = vram_bytes or (model.total_bytes if model else 0)
    reserved = gpus.reserved_bytes(total) if machine.os == "linux" else 0
    if held_bytes is None:
        held_bytes = min(ASSUMED_DESKTOP_BYTES, total // 2) if machine.spills else 0
        assumed = format_size(held_bytes) if held_bytes else "nothing"
        kept = f", beside the {format_size(reserved)} that the driver keeps" if reserved else ""
        notes.append(
            f"It is assumed that the desktop and other programs hold {assumed} of the GPU's memory{kept}; "
            "--held SIZE says how much it really is."
        )
    if held_bytes > total - reserved:
        kept = f", of which the driver keeps {format_size(reserved)}" if reserved else ""
        raise InputError(
            f"--held {format_size(held_bytes)} is more than the GPU has ({format_size(total)}{kept})"
        )
    return tuple(_gpu(index, model, total, held_bytes, reserved) for index in range(count))


def _unified(model: gpus.GpuModel, machine: Machine) -> Gpu:
    """A GPU that has host memory: all of it by CUDA, half of it by Vulkan (amdgpu's and Windows' limit).

    Metal lends two thirds up to 36 GiB, three quarters of more.
    """
    ram = machine.ram_total_bytes
    lent = {"cuda": ram, "vulkan": ram // 2}.get(model.api, ram * 2 // 3 if ram <= 36 * GIB else ram * 3 // 4)
    return replace(
        _gpu(0, model, lent, 0, 0), free_bytes=min(lent, machine.ram_free_bytes), tenants=(), unified=True
    )


def _gpu(
    index: int, model: gpus.GpuModel | None, total_bytes: int, held_bytes: int, reserved_bytes: int
) -> Gpu:
    holders = (Tenant(DESKTOP, held_bytes), Tenant(RESERVED, reserved_bytes))
    return Gpu(
        index=index,
        name=model.product if model else "NVIDIA GPU",
        total_bytes=total_bytes,
        free_bytes=total_bytes - held_bytes - reserved_bytes,
        compute_capability=model.compute_capability if model else None,
        bandwidth=model.bandwidth if model else None,
        bf16_flops=model.bf16_flops if model else None,
        cycles_per_s=model.cycles_per_s if model else None,
        tenants=tuple(tenant for tenant in holders if tenant.held_bytes),
        cuda_total_bytes=total_bytes - reserved_bytes,
        api=model.api if model else "cuda",
    )


def _system(name: str) -> OperatingSystem:
    for known in get_args(OperatingSystem):
        if name.strip().lower() == known:
            system: OperatingSystem = known
            return system
    raise InputError(f"unknown system {name!r}; use one of {', '.join(get_args(OperatingSystem))}")


def _bandwidth(ddr: str | None) -> float | None:
    found = None if ddr is None else ddr_bandwidth(ddr)
    if ddr is not None and found is None:
        raise InputError(f"ddr {ddr!r} is not a kind of memory; write it like DDR4-3200 or DDR5-5600")
    return found


def _size(value: str | int | None, what: str, *, zero: bool = False) -> int | None:
    """`value` in bytes: a text such as "951MiB", or a number of bytes already."""
    if value is None:
        return None
    size = parse_size(value if isinstance(value, str) else f"{value}B", what)
    if size == 0 and not zero:
        raise InputError(f"{what} {value!r} is zero; say how much there is, such as 8GiB")
    return size

"""GPUs by NVML, NVIDIA's management library: memory, who holds it, driver, slices. It makes no CUDA context.

Missing or refused answers become notes; a GPU that doesn't answer is left out. WSL2 lists processes without
their memory, or not at all; containers don't see those outside: the rest of the used memory has no name.
"""

import importlib
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from snugvl.core.sizes import MIB
from snugvl.hardware import gpus, host
from snugvl.hardware.describe import DESKTOP
from snugvl.hardware.machine import RESERVED as RESERVED
from snugvl.hardware.machine import SHARES, Gpu, Tenant, pcie_bandwidth


@dataclass(frozen=True, slots=True)
class Visible:
    """Identifiers of the visible GPUs in CUDA's order, and a note where the list has a problem."""

    uuids: tuple[str, ...]
    note: str | None = None


def visible(variable: str | None, uuids: Sequence[str], slices: Mapping[str, int]) -> Visible:
    """Which of the GPUs `uuids` and of `slices` (identifier → position of the GPU it is cut from) are
    visible.

    A GPU that is cut into slices can't be used as a whole.
    """
    first: dict[int, str] = {}
    for uuid, position in slices.items():
        first.setdefault(position, uuid)
    usable = [first.get(position, uuid) for position, uuid in enumerate(uuids)]
    if variable is None:
        chosen, note = list(usable), None
    else:
        chosen, note = _named(variable, usable, [*uuids, *slices])
    cut = [uuid for uuid in chosen if uuid in slices]
    if not cut:
        return Visible(tuple(chosen), note)
    if len(slices) > 1 and variable is None:
        note = (
            f"The GPU is cut into {len(slices)} slices (MIG) and CUDA uses one at a time, the first unless "
            f"CUDA_VISIBLE_DEVICES names another: {', '.join(slices)}."
        )
    return Visible((cut[0],), note)


def _named(variable: str, usable: Sequence[str], known: Sequence[str]) -> tuple[list[str], str | None]:
    chosen: list[str] = []
    words = [word.strip() for word in variable.split(",")] if variable.strip() else []
    for word in words:
        uuid = _one(word, usable, known)
        if uuid is None:
            seen = f"the {len(chosen)} before it" if chosen else "none"
            return chosen, f"CUDA_VISIBLE_DEVICES={variable} has {word!r}, no GPU here; CUDA sees {seen}."
        if uuid in chosen:
            return [], f"CUDA_VISIBLE_DEVICES={variable} names a GPU twice; CUDA then sees none."
        chosen.append(uuid)
    hidden = len(usable) - len(chosen)
    if not hidden or not usable:
        return chosen, None
    return chosen, f"CUDA_VISIBLE_DEVICES={variable} hides {hidden} of {len(usable)} GPUs."


def _one(word: str, usable: Sequence[str], known: Sequence[str]) -> str | None:
    if word.isdigit():
        return usable[int(word)] if int(word) < len(usable) else None
    matches = [uuid for uuid in known if word and uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


SAMPLES: Final = 6
SAMPLE_SECONDS: Final = 0.25
OUTSIDE: Final = "processes outside this container"
UNNAMED: Final = "driver and unnamed processes"
_DRIVER_BYTES: Final = 32 * MIB
_NOISE_BYTES: Final = MIB  # less than this is page rounding, no program's


@dataclass(slots=True)
class Readout:
    """The GPUs as NVML reports them, with problems in whole sentences."""

    gpus: tuple[Gpu, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Around:
    """Facts that NVML doesn't have: where this process runs."""

    wsl2: bool
    container: bool
    ram_total_bytes: int
    ram_free_bytes: int
    root: Path = Path("/")


def read(
    environ: Mapping[str, str],
    around: Around,
    module: Any = None,
    pause: Callable[[float], None] = time.sleep,
) -> Readout:
    """Every GPU that CUDA would use here, in its order. `module` stands for pynvml in tests."""
    found = Readout()
    try:
        nvml = module or importlib.import_module("pynvml")
    except ImportError:
        found.notes.append("The package nvidia-ml-py is missing, so GPUs can't be seen; pip install it.")
        return found
    if not _start(nvml, around, found):
        return found
    try:
        found.gpus = tuple(_gpus(nvml, environ, around, found, pause))
    except nvml.NVMLError as error:
        found.notes.append(f"NVML failed while listing GPUs: {error}.")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return found


def _start(nvml: Any, around: Around, found: Readout) -> bool:
    try:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError_LibraryNotFound:
            if not host.load_nvml(around.root):
                raise
            nvml.nvmlInit()
    except nvml.NVMLError as error:
        found.notes.append(_why_not(nvml, error, around))
        return False
    return True


def _why_not(nvml: Any, error: Exception, around: Around) -> str:
    """The sentence on a failed start of NVML, with what to do."""
    if isinstance(error, nvml.NVMLError_LibraryNotFound):
        if around.container:
            return (
                "No NVIDIA driver is visible in this container; if the host has a GPU, start the container "
                "with docker run --gpus all."
            )
        if around.wsl2:
            return "No NVIDIA driver is visible in WSL2; install NVIDIA's driver in Windows, none in WSL2."
        return "No NVIDIA driver is installed (libnvidia-ml.so.1 was not found)."
    if isinstance(error, nvml.NVMLError_DriverNotLoaded):
        return "NVIDIA's driver is installed but not loaded; load it with `sudo modprobe nvidia` or restart."
    if isinstance(error, nvml.NVMLError_LibRmVersionMismatch):
        return "NVIDIA's driver was updated while it ran (its library and kernel module differ); restart."
    if isinstance(error, nvml.NVMLError_NoPermission):
        return "This user may not use the GPU (/dev/nvidia*); ask for the group that owns it, such as video."
    return f"NVML didn't start: {error}."


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU or a slice of one, before its memory is sampled."""

    handle: Any
    uuid: str
    name: str
    parent: Any = None
    position: int | None = None


def _gpus(
    nvml: Any, environ: Mapping[str, str], around: Around, found: Readout, pause: Callable[[float], None]
) -> Sequence[Gpu]:
    physical, slices = _devices(nvml, found)
    chosen = visible(
        environ.get("CUDA_VISIBLE_DEVICES"),
        [device.uuid for device in physical],
        {device.uuid: index for index, owned in slices.items() for device in owned},
    )
    if chosen.note:
        found.notes.append(chosen.note)
    by_uuid = {
        device.uuid: device for device in (*physical, *(each for own in slices.values() for each in own))
    }
    devices = [by_uuid[uuid] for uuid in chosen.uuids]
    names = {device.name for device in physical}
    if len(names) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        found.notes.append(
            "GPUs of several kinds: CUDA puts the fastest first, the list here goes by PCI bus; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID so that both mean the same."
        )
    driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
    memory = _sample(nvml, devices, around, found, pause)
    devices = [device for device in devices if device.uuid in memory]
    return [
        _gpu(nvml, index, device, memory[device.uuid], driver, around) for index, device in enumerate(devices)
    ]


def _devices(nvml: Any, found: Readout) -> tuple[list[_Device], dict[int, list[_Device]]]:
    """Physical GPUs, and by position the slices of those that are cut up."""
    physical: list[_Device] = []
    slices: dict[int, list[_Device]] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            device = _Device(handle, nvml.nvmlDeviceGetUUID(handle), name, position=index)
        except nvml.NVMLError as error:
            found.notes.append(f"GPU {index} doesn't answer ({error}) and is left out.")
            continue
        mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
        if mode is not None and mode[0] == 1:
            own = list(_slices(nvml, device))
            if not own:  # nor can CUDA use it as a whole
                found.notes.append(
                    f"{device.name} is in MIG mode without a slice; make one: nvidia-smi mig -cgi"
                )
                continue
            slices[len(physical)] = own
        physical.append(device)
    return physical, slices


def _slices(nvml: Any, parent: _Device) -> Sequence[_Device]:
    own = []
    for index in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, parent.handle) or 0):
        handle = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent.handle, index)
        if handle is not None:
            own.append(
                _Device(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), parent)
            )
    return own


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int
    free: int
    reserved: int
    shared: bool = False  # host memory


def _sample(
    nvml: Any, devices: Sequence[_Device], around: Around, found: Readout, pause: Callable[[float], None]
) -> dict[str, _Memory]:
    """The lowest free memory of each device over a moment, because a desktop's share varies."""
    lowest: dict[str, _Memory] = {}
    for number in range(SAMPLES):
        if number:
            pause(SAMPLE_SECONDS / (SAMPLES - 1))
        for device in devices:
            try:
                now = _memory(nvml, device.handle)
            except nvml.NVMLError_NotSupported:
                now = _Memory(around.ram_total_bytes, around.ram_free_bytes, 0, shared=True)
                if number == 0:
                    found.notes.append(SHARES.format(device.name))
            except nvml.NVMLError as error:
                lowest.pop(device.uuid, None)
                note = f"{device.name} doesn't tell its memory ({error}) and is left out."
                if note not in found.notes:
                    found.notes.append(note)
                continue
            if device.uuid not in lowest or now.free < lowest[device.uuid].free:
                lowest[device.uuid] = now
    return lowest


def _memory(nvml: Any, handle: Any) -> _Memory:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):  # drivers before 510
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return _Memory(int(info.total), int(info.free), int(getattr(info, "reserved", 0)))


def _gpu(nvml: Any, index: int, device: _Device, memory: _Memory, driver: str | None, around: Around) -> Gpu:
    owner = device.parent or device
    whole = _memory(nvml, owner.handle).total if device.parent else memory.total
    model = gpus.find(owner.name, whole)
    share = memory.total / whole if device.parent else 1.0
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, owner.handle)
    return Gpu(
        index=index,
        name=device.name,
        total_bytes=memory.total,
        free_bytes=memory.free,
        compute_capability=tuple(capability) if capability else None,
        bandwidth=model.bandwidth * share if model else None,
        bf16_flops=model.bf16_flops * share if model and model.bf16_flops else None,
        tenants=_tenants(nvml, device, memory, around),
        driver=driver,
        mig=device.parent is not None,
        uuid=device.uuid,
        position=device.position,
        link_bandwidth=_link(nvml, owner.handle),
        cuda_total_bytes=_cuda_total(memory, around, mig=device.parent is not None),
        cycles_per_s=model.cycles_per_s * share if model and model.cycles_per_s else None,
        unified=memory.shared,
    )


def _cuda_total(memory: _Memory, around: Around, *, mig: bool) -> int | None:
    """CUDA's total, which NVML doesn't tell: to the byte on an H200, by logs under WSL2; None for slices."""
    if around.wsl2:
        return memory.total
    return memory.total - memory.reserved if memory.reserved and not mig else None


def _link(nvml: Any, handle: Any) -> float | None:
    """Bytes per second that card and slot allow at most: the current link of an idle card is slower."""
    generation = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    return pcie_bandwidth(generation, _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle))


def _tenants(nvml: Any, device: _Device, memory: _Memory, around: Around) -> tuple[Tenant, ...]:
    """The holders of a device's memory, most first; memory without a known holder comes last."""
    held: dict[int, int] = {}
    silent: list[str] = []
    lists = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
    for processes in lists:
        for process in _ask(nvml, processes, device.handle) or ():
            if process.usedGpuMemory is None:
                silent.append(_name(nvml, process.pid, around))
            else:  # a process that computes and draws is in both lists, with the same bytes
                held[process.pid] = max(held.get(process.pid, 0), int(process.usedGpuMemory))
    named = [Tenant(_name(nvml, pid, around), size, pid) for pid, size in held.items() if size]
    named.sort(key=lambda tenant: -tenant.held_bytes)
    if memory.reserved >= _NOISE_BYTES:
        named.append(Tenant(RESERVED, memory.reserved))
    rest = memory.total - memory.free - sum(tenant.held_bytes for tenant in named)
    if rest >= _NOISE_BYTES:
        # The driver keeps some MiB beside each process; more than that has a holder.
        named.append(Tenant(UNNAMED if rest < _DRIVER_BYTES and named else _rest(silent, around), rest))
    return tuple(named)


def _rest(silent: Sequence[str], around: Around) -> str:
    if not around.wsl2:
        return OUTSIDE if around.container else UNNAMED
    return f"{DESKTOP} ({', '.join(dict.fromkeys(silent))} among them)" if silent else DESKTOP


def _name(nvml: Any, pid: int, around: Around) -> str:
    """A process' name: its program, with the script or module where the program is an interpreter."""
    try:
        words = (around.root / f"proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        words = []
    if not any(words):
        told = _ask(nvml, nvml.nvmlSystemGetProcessName, pid) or f"process {pid}"
        words = [told.split("\0")[0]]
    program = words[0].split(" ")[0].rsplit("/", 1)[-1] or f"process {pid}"
    if not program.startswith("python"):
        return program
    script = next((word for word in words[1:] if word and not word.startswith("-")), "")
    return f"{program} {script.rsplit('/', 1)[-1]}".strip()


def _ask(nvml: Any, function: Any, *args: Any) -> Any:
    """NVML's answer, or None where this GPU or driver has none."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def started() -> Any:
    """NVML, ready to be asked; None without a GPU, a driver or a permission."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml if nvml.nvmlDeviceGetCount() else None
    except Exception:  # whatever is missing
        return None


def held_by(nvml: Any, handle: Any, pids: Container[int]) -> int:
    """Bytes of a GPU that processes hold; 0 where the driver doesn't tell (WSL2, some containers)."""
    found = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    own = [process for process in found if process.pid in pids]
    # A container's process ids are not the driver's; a process that is alone on the GPU is still ours.
    own = own or (found if len(found) == 1 else [])
    return sum(int(process.usedGpuMemory or 0) for process in own)

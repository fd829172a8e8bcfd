"""A machine as the planner sees it. Nothing here probes anything; all sizes are bytes.

Recorded as JSON, it is replayed elsewhere: in tests, in a bug report, in a plan for another.

    {"schema": 1, "machine": {…the fields of Machine…, "gpus": [{…Gpu…, "tenants": [{…Tenant…}]}]}}

Fields with a default may be missing; unknown ones are refused, because they may change the meaning.
"""

import dataclasses
import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from snugvl.core.folders import read_small
from snugvl.errors import InputError

OperatingSystem = Literal["linux", "wsl2", "windows", "macos", "other"]
Source = Literal["probed", "described", "recorded"]
Api = Literal["cuda", "rocm", "vulkan", "sycl", "metal"]
SYSTEMS: Final[Mapping[OperatingSystem, str]] = {
    "linux": "Linux", "wsl2": "WSL2", "windows": "Windows", "macos": "macOS", "other": "another system",
}  # fmt: skip

# The tenant of the memory that the driver keeps of a GPU for itself: it can't be freed.
RESERVED: Final = "driver (reserved)"
SHARES: Final = "{} has no memory of its own and shares the system's."
# What a system with its services holds of host memory, whatever else runs: assumed.
SYSTEM_BYTES: Final = 2 << 30
SCHEMA: Final = 1
MAX_FILE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Tenant:
    """A holder of GPU memory: a process, or several that can't be told apart ("desktop and other apps")."""

    name: str
    held_bytes: int
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        free_bytes: free now (the lowest of a few samples).
        compute_capability: (major, minor), such as (12, 0) for an RTX 5060.
        bandwidth: bytes per second of device memory, from the table of known GPUs, or None.
        bf16_flops: dense bf16 (fp16 before Ampere) matrix operations per second, or None.
        context_bytes: cost of a CUDA context with torch's libraries, measured on this machine, or None.
        context_basis: where that is from, or what is known where it is None; in words, or empty.
        mig: whether this is a slice of a GPU.
        index: its number among the GPUs visible to CUDA, `cuda:index`; 0 for those that CUDA doesn't know.
        uuid: NVML's id, which CUDA_VISIBLE_DEVICES takes; None where described.
        position: its number among all GPUs in NVML's order, which is CUDA's with
            CUDA_DEVICE_ORDER=PCI_BUS_ID; None for a slice, and where described.
        link_bandwidth: bytes per second between host memory and the GPU, as its PCI Express slot allows,
            or None.
        cuda_total_bytes: CUDA's total of the card (`cuMemGetInfo`), of which vLLM's utilisation is a share:
            NVML's `total_bytes` less the driver's reserve, but under WSL2 all of it. None where unknown.
        api: API by which programs reach it; only llama.cpp uses those other than CUDA.
        listed: its name in `llama-server --list-devices`, such as "Vulkan1"; empty where it wasn't asked.
        unified: whether its memory is host memory.
        cycles_per_s: clock cycles of all multiprocessors together, from the table of known GPUs, or None.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    bandwidth: float | None = None
    bf16_flops: float | None = None
    tenants: tuple[Tenant, ...] = ()
    driver: str | None = None
    context_bytes: int | None = None
    mig: bool = False
    uuid: str | None = None
    position: int | None = None
    link_bandwidth: float | None = None
    cuda_total_bytes: int | None = None
    api: Api = "cuda"
    listed: str = ""
    unified: bool = False
    cycles_per_s: float | None = None
    context_basis: str = ""

    @property
    def held_bytes(self) -> int:
        """Bytes that other programs hold."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, with all facts that a plan needs.

    Attributes:
        pinned_bytes: available page-locked host memory, where it is limited (WSL2), or None.
        spills: over-committed GPU memory silently moves to system memory instead of failing (WSL2, Windows).
        disk_free_bytes: free bytes on the disk that models are downloaded to.
        notes: problems while probing, in whole sentences.
        host_ram_bytes: memory of the whole machine where a container may use only `ram_total_bytes` of it.
        others: GPUs that aren't NVIDIA's, or that NVML doesn't see, the one to be used first.
        ram_bandwidth: bytes per second of all channels of host memory, where its kind was given, or None.
        ram_assumed: the size of host memory is assumed, not given.
        pc_ram_bytes: memory of the PC around WSL2, of which `ram_total_bytes` are WSL2's; None where it
            wasn't given.
    """

    os: OperatingSystem
    gpus: tuple[Gpu, ...]
    cpu_cores: int
    ram_total_bytes: int
    ram_free_bytes: int
    disk_free_bytes: int
    source: Source = "probed"
    container: bool = False
    spills: bool = False
    pinned_bytes: int | None = None
    notes: tuple[str, ...] = ()
    host_ram_bytes: int | None = None
    others: tuple[Gpu, ...] = ()
    ram_bandwidth: float | None = None
    ram_assumed: bool = False
    pc_ram_bytes: int | None = None


# Bytes per second and lane, one way, after line coding (PCI-SIG): 8b/10b to generation 2, 128b/130b to 5.
LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


_DDR: Final = re.compile(r"(?:([1-9]\d?)x)?(?:lp)?ddr([345]x?)[\s-]?(\d{3,5})\s?(?:mhz|mt/s)?", re.ASCII)
# Bytes per second that a processor reads of host memory of which nothing is known: half of two DDR5 channels.
HOST_RATE: Final = 30e9
CHANNEL_BYTES: Final = 8  # a transfer


def ddr_bandwidth(kind: str) -> float | None:
    """Bytes per second of two channels of "DDR4-3200", of four of "4xDDR4-3200"; None for other words."""
    found = _DDR.fullmatch(kind.strip().lower())
    return None if found is None else float(found[3]) * 1e6 * CHANNEL_BYTES * int(found[1] or 2)


def pcie_bandwidth(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second of a link, or None where either is unknown."""
    if not generation or not lanes:
        return None
    return LANE_BYTES_PER_S[min(max(generation, 1), max(LANE_BYTES_PER_S))] * lanes


def as_json(machine: Machine) -> dict[str, Any]:
    """The fields of `machine` in JSON's types."""
    value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(machine)))
    return value


def record(machine: Machine) -> str:
    """`machine` as JSON text that `replay` reads."""
    return json.dumps({"schema": SCHEMA, "machine": as_json(machine)}, indent=2, ensure_ascii=False) + "\n"


def replay(path: Path) -> Machine:
    """The machine that was recorded in a file.

    Raises:
        InputError: no such file, no recording, of another schema, or with a field that can't be.
    """
    try:
        text = read_small(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON; make a recording with: snugvl doctor --record FILE") from None
    if not isinstance(value, dict) or "machine" not in value:
        raise InputError(
            f"{path} is not a recording of a machine; make one with: snugvl doctor --record FILE"
        )
    if value.get("schema") != SCHEMA:
        raise InputError(
            f"{path} has schema {value.get('schema')!r}, this version reads {SCHEMA}; record it again"
        )
    try:
        machine: Machine = read_value(Machine, value["machine"], "machine")
        _check(machine)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    told = zip(machine.gpus, value["machine"].get("gpus", ()), strict=True)
    filled = tuple(gpu if "cycles_per_s" in each else _with_clock(gpu) for gpu, each in told)
    return dataclasses.replace(machine, source="recorded", gpus=filled)


def _with_clock(gpu: Gpu) -> Gpu:
    """A card with its clock, from the table of known ones: recordings of before 0.3 don't have it."""
    from snugvl.hardware import gpus  # which describes cards in this module's nouns

    model = gpus.find(gpu.name, gpu.total_bytes)
    return dataclasses.replace(gpu, cycles_per_s=model.cycles_per_s if model else None)


def read_value(kind: Any, value: Any, where: str) -> Any:
    """`value` of a JSON document as `kind`, all the way down; ValueError names the field."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return read_value(kind, value, where)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(get_args(kind))}")
        return value
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r:.60}, not a value of type {kind.__name__}")
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, not an object")
    hints = get_type_hints(kind)
    unknown = sorted(value.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
    for field in dataclasses.fields(kind):
        if field.name not in value and field.default is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {field.name!r}")
    return kind(**{name: read_value(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r:.60}, not a list")
    if kinds[-1] is Ellipsis:
        return tuple(read_value(kinds[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} values, not {len(kinds)}")
    return tuple(read_value(kind, each, where) for kind, each in zip(kinds, value, strict=True))


def _check(machine: Machine) -> None:
    """Refuse values that types allow and a machine can't have: negative ones, more free than in total."""
    for index, gpu in enumerate((*machine.gpus, *machine.others)):
        where = f"machine.gpus[{index}]" if index < len(machine.gpus) else "machine.others"
        if not 0 <= gpu.free_bytes <= gpu.total_bytes or not gpu.total_bytes:
            raise ValueError(f"{where}: {gpu.free_bytes} bytes free of {gpu.total_bytes}")
        if any(tenant.held_bytes < 0 for tenant in gpu.tenants):
            raise ValueError(f"{where}: a tenant holds less than nothing")
    if not 0 <= machine.ram_free_bytes <= machine.ram_total_bytes:
        raise ValueError(f"machine: {machine.ram_free_bytes} bytes free of {machine.ram_total_bytes} of RAM")
    if machine.cpu_cores < 1 or machine.disk_free_bytes < 0:
        raise ValueError("machine: no CPU core, or less than no disk space")

"""A machine as the planner sees it. Nothing here probes anything; all sizes are bytes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

OperatingSystem = Literal["linux", "wsl2", "windows", "macos", "other"]
Source = Literal["probed", "described", "recorded"]
Api = Literal["cuda", "rocm", "vulkan", "sycl", "metal"]
SYSTEMS: Final[Mapping[OperatingSystem, str]] = {
    "linux": "Linux", "wsl2": "WSL2", "windows": "Windows", "macos": "macOS", "other": "another system",
}  # fmt: skip

# The tenant of the memory that the driver keeps of a GPU for itself: it can't be freed.
RESERVED: Final = "driver (reserved)"
# What a system with its services holds of host memory, whatever else runs: assumed.
SYSTEM_BYTES: Final = 2 << 30


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
        pinned_bytes: page-locked host memory that can be had, where it is limited (WSL2), or None.
        spills: over-committed GPU memory silently moves to system memory instead of failing (WSL2, Windows).
        disk_free_bytes: free bytes on the disk that models are downloaded to.
        notes: problems while probing, in whole sentences.
        host_ram_bytes: memory of the whole machine where a container may use only `ram_total_bytes` of it.
        others: GPUs that aren't NVIDIA's, or that NVML doesn't see, the one to be used first.
        ram_bandwidth: bytes per second of all channels of host memory, where somebody said its kind, or None.
        ram_assumed: nobody said how much host memory there is.
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


# Bytes per second and lane, one way, after line coding (PCI-SIG): 8b/10b to generation 2, 128b/130b to 5.
LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


_DDR: Final = re.compile(r"(?:lp)?ddr([345]x?)-?(\d{3,5})", re.ASCII)
# Bytes per second that a processor reads of host memory of which nothing is known: half of two DDR5 channels.
HOST_RATE: Final = 30e9
DDR_BYTES: Final = 2 * 8  # of two channels, a transfer


def ddr_bandwidth(kind: str) -> float | None:
    """Bytes per second of two channels of "DDR4-3200" and its like; None for other words."""
    found = _DDR.fullmatch(kind.strip().lower())
    return None if found is None else float(found[2]) * 1e6 * DDR_BYTES


def pcie_bandwidth(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second of a link, or None where either is unknown."""
    if not generation or not lanes:
        return None
    return LANE_BYTES_PER_S[min(max(generation, 1), max(LANE_BYTES_PER_S))] * lanes

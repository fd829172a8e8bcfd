"""The machine around the GPU: cores, system memory, room on the disk where models are downloaded to, and
their limits by containers, control groups and WSL2.

Limits are read from the control group of this process and all above it, versions 1 and 2, because docker,
podman, Kubernetes, systemd and Slurm all set them there. Inside a container's own namespace the path in
/proc/self/cgroup is "/" or one that isn't mounted; the mount's root then holds the limits. In WSL2 the GPU is
paravirtual (/dev/dxg, the Windows driver's libraries in /usr/lib/wsl/lib); an over-commit does not fail but
spills to system memory (microsoft/WSL#11050); page-locked memory is scarce.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snugvl.core.folders import hub_cache


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the control groups; None: not limited.

    Attributes:
        memory_bytes: the lowest limit.
        memory_free_bytes: fewest bytes left under any limit; page cache counts as free.
        cores: number of cores, quota over period, such as 1.5.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """The resources that this process may use.

    Attributes:
        ram_total_bytes, ram_free_bytes: host memory under the limits of control groups.
        host_ram_bytes: memory of the whole machine, where a limit leaves less of it.
        disk_free_bytes: free bytes in `cache`, the folder that models are downloaded to.
    """

    cores: int
    ram_total_bytes: int
    ram_free_bytes: int
    host_ram_bytes: int | None
    cache: Path
    disk_free_bytes: int
    container: bool


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory in bytes: all of it, and the part that may still be taken."""

    total_bytes: int
    free_bytes: int


def memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine, or of this process's control group where that allows less."""
    return _within(limits(root), _memory(root))


def cores(root: Path = Path("/")) -> int:
    """Number of processors of this process; a container may have a share of them."""
    return _cores(limits(root).cores)


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Host:
    """Look at this machine. `root` stands for / and `environ` for the environment in tests."""
    allowed, whole = limits(root), _memory(root)
    memory = _within(allowed, whole)
    cache = hub_cache(environ)
    return Host(
        cores=_cores(allowed.cores),
        ram_total_bytes=memory.total_bytes,
        ram_free_bytes=memory.free_bytes,
        host_ram_bytes=whole.total_bytes if memory.total_bytes < whole.total_bytes else None,
        cache=cache,
        disk_free_bytes=disk_free(cache),
        container=in_container(root, environ),
    )


def disk_free(folder: Path) -> int:
    """Bytes free for this user where `folder` is or would be made; 0 where that can't be told."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return 0
    return 0


def _cores(quota: float | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _within(limits: Limits, whole: HostMemory) -> HostMemory:
    free = whole.free_bytes if limits.memory_free_bytes is None else limits.memory_free_bytes
    return HostMemory(
        min(whole.total_bytes, limits.memory_bytes or whole.total_bytes), min(whole.free_bytes, free)
    )


def _memory(root: Path) -> HostMemory:
    """Memory of the whole machine, from /proc/meminfo, else psutil, else the C library (all as free)."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
        return HostMemory(values["MemTotal"], values["MemAvailable"])
    except (OSError, ValueError, KeyError):
        pass
    import psutil

    try:
        found = psutil.virtual_memory()
        return HostMemory(found.total, found.available)
    except OSError:  # Linux without /proc: free pages alone lack what the cache of files gives back
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return HostMemory(total, total)


_CGROUPS: Final = Path("sys/fs/cgroup")
_MARKS: Final = (".dockerenv", "run/.containerenv")
_RUNTIMES: Final = ("docker", "kubepods", "containerd", "libpod", "lxc")
_NO_LIMIT: Final = 2**60  # version 1 writes 2^63 less a page where nothing is limited


def in_container(root: Path, environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a container: docker, podman, Kubernetes, LXC or systemd-nspawn."""
    if any((root / mark).exists() for mark in _MARKS):
        return True
    if environ.get("container") or environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return any(runtime in _text(root / "proc/1/cgroup") for runtime in _RUNTIMES)


def limits(root: Path) -> Limits:
    """The limits on this process."""
    memory: list[int] = []
    free: list[int] = []
    cores: list[float] = []
    for folder in _folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        memory.append(limit)
        free.append(max(0, limit - max(0, used - _page_cache(folder))))
    for folder in _folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores.append(quota)
    return Limits(min(memory, default=None), min(free, default=None), min(cores, default=None))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process for one controller, and all above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":  # version 2, or the unified part beside version 1
            mount = root / _CGROUPS
        elif controller in names.split(","):
            mount = root / _CGROUPS / names  # "cpu,cpuacct" where they are mounted together
            if not mount.is_dir():
                mount = root / _CGROUPS / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _page_cache(folder: Path) -> int:
    """Bytes of files that the kernel drops when memory is wanted: counted as used, but free all the same."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _cpu_quota(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" and -1 mean no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


LIBRARIES: Final = Path("usr/lib/wsl/lib")
NVML_LIBRARY: Final = "libnvidia-ml.so.1"

# The first kernel with which CUDA could pin memory in WSL2 at all; vLLM checks the same.
PINNING_KERNEL: Final = (4, 19, 121)
# WDDM caps page-locked memory at about half of system memory. The virtual machine sees half of the PC's by
# default, so half of what it sees stays well below.
PINNED_FRACTION: Final = 0.5

_KERNEL = re.compile(r"Linux version (\d+)\.(\d+)\.(\d+)")
_LINUX_DRIVERS: Final = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64")


@dataclass(frozen=True, slots=True)
class Wsl:
    """Facts of WSL2. `pinned_bytes`: available page-locked memory, an upper bound."""

    kernel: tuple[int, int, int]
    pinned_bytes: int
    notes: tuple[str, ...]


def detect(root: Path, ram_total_bytes: int, *, container: bool = False) -> Wsl | None:
    """WSL2's facts, or None elsewhere. WSL1, which has no GPU, counts as elsewhere."""
    version = _text(root / "proc/version")
    match = _KERNEL.search(version)
    if match is None or "microsoft" not in version.lower():
        return None
    kernel = (int(match[1]), int(match[2]), int(match[3]))
    if kernel < (4, 19, 0):  # WSL1 calls itself 4.4.0-…-Microsoft
        return None
    notes = []
    if not (root / "dev/dxg").exists():
        notes.append(
            "WSL2 shows no GPU (/dev/dxg is missing); "
            + ("start the container with --gpus all." if container else "run `wsl --update` in Windows.")
        )
    elif not (root / LIBRARIES).is_dir() and not container:  # a container gets them mounted elsewhere
        notes.append(
            "The Windows driver's libraries (/usr/lib/wsl/lib) are missing; update NVIDIA's Windows driver."
        )
    foreign = [folder for folder in _LINUX_DRIVERS if (root / folder / "libcuda.so.1").exists()]
    if foreign and not container:
        notes.append(
            f"A Linux NVIDIA driver is installed in WSL2 (/{foreign[0]}/libcuda.so.1) and hides the Windows "
            "one; remove its packages (libnvidia-compute-*, nvidia-driver-*)."
        )
    if kernel < PINNING_KERNEL:
        notes.append(
            f"The kernel {'.'.join(map(str, kernel))} is older than 4.19.121, so no memory can be pinned; "
            "run `wsl --update` in Windows."
        )
    pinned_bytes = int(ram_total_bytes * PINNED_FRACTION) if kernel >= PINNING_KERNEL else 0
    return Wsl(kernel, pinned_bytes, tuple(notes))


def is_wsl1(root: Path) -> bool:
    """Whether this is the older WSL, where no GPU can be used."""
    match = _KERNEL.search(version := _text(root / "proc/version"))
    return match is not None and "Microsoft" in version and (int(match[1]), int(match[2])) < (4, 19)


def load_nvml(root: Path = Path("/")) -> bool:
    """Load NVML from WSL2's folder where the loader's path lacks it; later look-ups by name then find it."""
    library = root / LIBRARIES / NVML_LIBRARY
    if not library.exists():
        return False
    import ctypes  # which plans need not

    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True

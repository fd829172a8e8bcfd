"""Containers and control groups: what of the machine this process may use.

Limits are read from the control group of this process and all above it, versions 1 and 2, because docker,
podman, Kubernetes, systemd and Slurm all set them there. Inside a container's own namespace the path in
/proc/self/cgroup is "/" or one that isn't mounted; the mount's root then holds the limits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("sys/fs/cgroup")
_MARKS: Final = (".dockerenv", "run/.containerenv")
_RUNTIMES: Final = ("docker", "kubepods", "containerd", "libpod", "lxc")
_NO_LIMIT: Final = 2**60  # version 1 writes 2^63 less a page where nothing is limited


@dataclass(frozen=True, slots=True)
class Limits:
    """What the control groups allow; None: not limited.

    Attributes:
        memory_bytes: the lowest limit.
        memory_free_bytes: the least that is left under any limit; page cache counts as free.
        cores: quota over period, such as 1.5.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    cores: float | None = None


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

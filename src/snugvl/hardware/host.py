"""The machine around the GPU: cores, system memory, room on the disk where models are downloaded to."""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snugvl.core.folders import hub_cache
from snugvl.hardware import container


@dataclass(frozen=True, slots=True)
class Host:
    """What this process may use.

    Attributes:
        ram_total_bytes, ram_free_bytes: after the limits of control groups.
        host_ram_bytes: of the whole machine, where a limit leaves less of it.
        disk_free_bytes: in `cache`, the folder that models are downloaded to.
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
    """Main memory: all, and what of it may still be taken."""

    total_bytes: int
    free_bytes: int


def memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine, or of this process's control group where that allows less."""
    return _within(container.limits(root), _memory(root))


def cores(root: Path = Path("/")) -> int:
    """Processors of this process: a container may have a share of them."""
    return _cores(container.limits(root).cores)


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Host:
    """This machine. `root` stands for / and `environ` for the environment in tests."""
    limits, whole = container.limits(root), _memory(root)
    memory = _within(limits, whole)
    cache = hub_cache(environ)
    return Host(
        cores=_cores(limits.cores),
        ram_total_bytes=memory.total_bytes,
        ram_free_bytes=memory.free_bytes,
        host_ram_bytes=whole.total_bytes if memory.total_bytes < whole.total_bytes else None,
        cache=cache,
        disk_free_bytes=disk_free(cache),
        container=container.in_container(root, environ),
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


def _within(limits: container.Limits, whole: HostMemory) -> HostMemory:
    free = whole.free_bytes if limits.memory_free_bytes is None else limits.memory_free_bytes
    return HostMemory(
        min(whole.total_bytes, limits.memory_bytes or whole.total_bytes), min(whole.free_bytes, free)
    )


def _memory(root: Path) -> HostMemory:
    """Memory of the whole machine, from /proc/meminfo or else psutil."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
        return HostMemory(values["MemTotal"], values["MemAvailable"])
    except (OSError, ValueError, KeyError):
        import psutil

        found = psutil.virtual_memory()
        return HostMemory(found.total, found.available)

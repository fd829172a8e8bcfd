"""Probes this machine once: GPUs by NVML, system memory, cores, disk, WSL2 and containers. No torch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from snugvl.hardware import calibration, devices, host, nvml
from snugvl.hardware.machine import Machine, OperatingSystem


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    nvml_module: Any = None,
    platform: str = sys.platform,
) -> Machine:
    """The machine as it is now. Never fails: a part that can't be read is left out, and a note says why.

    Takes a quarter of a second, over which free GPU memory is sampled. The arguments stand in for this
    machine's files, environment, NVML and platform in tests.
    """
    around = host.look(root, environ)
    subsystem = host.detect(root, around.ram_total_bytes, container=around.container)
    system = _system(platform, wsl2=subsystem is not None)
    found = nvml.read(
        environ,
        nvml.Around(
            wsl2=subsystem is not None,
            container=around.container,
            ram_total_bytes=around.ram_total_bytes,
            ram_free_bytes=around.ram_free_bytes,
            root=root,
        ),
        nvml_module,
    )
    notes = [*(subsystem.notes if subsystem else ()), *found.notes]
    if host.is_wsl1(root):
        notes.append("This is WSL1, where no GPU can be used; move to WSL2 with `wsl --set-version`.")
    spills = system in ("wsl2", "windows")
    machine = Machine(
        os=system,
        gpus=found.gpus,
        cpu_cores=around.cores,
        ram_total_bytes=around.ram_total_bytes,
        ram_free_bytes=around.ram_free_bytes,
        disk_free_bytes=around.disk_free_bytes,
        container=around.container,
        spills=spills,
        pinned_bytes=subsystem.pinned_bytes if subsystem else around.ram_total_bytes // 2 if spills else None,
        notes=tuple(notes),
        host_ram_bytes=around.host_ram_bytes,
    )
    if not machine.gpus:
        machine = devices.with_others(machine, devices.listing(platform, root, environ))
    return replace(machine, gpus=tuple(calibration.with_measured(gpu, environ) for gpu in machine.gpus))


def _system(platform: str, *, wsl2: bool) -> OperatingSystem:
    if wsl2:
        return "wsl2"
    if platform.startswith("linux"):
        return "linux"
    named: dict[str, OperatingSystem] = {"win32": "windows", "darwin": "macos"}
    return named.get(platform, "other")

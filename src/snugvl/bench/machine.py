"""The machine of the client, and of the server where that is the same one."""

import platform
from dataclasses import dataclass

from snugvl.hardware.probe import probe
from snugvl.hardware.software import torch_build


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where the client ran. `torch`: the installed version, by its metadata."""

    system: str
    processor: str
    cpu_cores: int
    ram_total_bytes: int
    gpus: tuple[str, ...]
    driver: str | None
    python: str
    torch: str | None


def describe() -> MachineFacts:
    """This machine."""
    found, build = probe(), torch_build()
    return MachineFacts(
        system=f"{found.os} {platform.release()}",
        processor=_processor(),
        cpu_cores=found.cpu_cores,
        ram_total_bytes=found.ram_total_bytes,
        gpus=tuple(gpu.name for gpu in found.gpus),
        driver=next((gpu.driver for gpu in found.gpus), None),
        python=platform.python_version(),
        torch=build.version if build else None,
    )


def _processor() -> str:
    """Linux tells the model in /proc/cpuinfo, `platform` only the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a stream that is left early
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

"""A file system of another machine, and a probe of it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from snugvl.hardware import nvml
from snugvl.hardware.machine import Machine
from snugvl.hardware.probe import probe
from tests.hardware.fake_nvml import FakeNvml

LINUX = "Linux version 6.8.0-86-generic (buildd@lcy02) (x86_64-linux-gnu-gcc) #87-Ubuntu SMP"
WSL2 = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c826d3017f) (gcc) #1 SMP"
MEMINFO = "MemTotal: 16384000 kB\nMemFree: 1024000 kB\nMemAvailable: 12288000 kB\nHugePages_Total: 0\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files of a machine below a folder that stands for /."""
    root = tmp_path / "root"

    def writes(files: Mapping[str, str], *, version: str = LINUX) -> Path:
        for name, text in {"proc/version": version, "proc/meminfo": MEMINFO, **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return writes


@pytest.fixture
def probed(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Probes a machine of invented files, environment and NVML."""
    monkeypatch.setattr(nvml.host, "load_nvml", lambda root: False)
    monkeypatch.setattr(nvml, "SAMPLE_SECONDS", 0.0)

    def run(
        module: FakeNvml | None = None,
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        version: str = LINUX,
    ) -> Machine:
        root = write(files or {}, version=version)
        home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return probe(root, {**home, **(environ or {})}, module or FakeNvml(), "linux")

    return run

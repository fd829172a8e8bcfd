"""WSL2: whether this is it, and what differs there.

The GPU is paravirtual (/dev/dxg, the Windows driver's libraries in /usr/lib/wsl/lib); an over-commit does not
fail but spills to system memory (microsoft/WSL#11050); page-locked memory is scarce.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    """What WSL2 offers. `pinned_bytes`: page-locked memory that can be had, an upper bound."""

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
    """The older WSL, where no GPU can be used."""
    match = _KERNEL.search(version := _text(root / "proc/version"))
    return match is not None and "Microsoft" in version and (int(match[1]), int(match[2])) < (4, 19)


def load_nvml(root: Path = Path("/")) -> bool:
    """Load NVML from WSL2's folder where the loader's path lacks it; later look-ups by name then find it."""
    library = root / LIBRARIES / NVML_LIBRARY
    if not library.exists():
        return False
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""The installed torch, and its needs of driver, GPU and compilers, found without importing it.

It also calls the CUDA driver by itself, for work that can begin before torch is imported.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Lowest driver of each CUDA major version (NVIDIA's CUDA toolkit release notes: minor version compatibility).
# Under WSL2 NVML tells the Windows driver's version, whose lowest is 528.33 and 580 likewise.
MIN_DRIVER: Final = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
MIN_DRIVER_WINDOWS: Final = {11: (452, 39), 12: (528, 33), 13: (580, 0)}


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch. `cuda`: the version it was built with, None for a CPU build or an unknown one."""

    version: str
    cuda: tuple[int, int] | None
    cpu_only: bool


@dataclass(frozen=True, slots=True)
class BuildTools:
    """Tools beside this Python, to compile and to install, which are missing on a fresh Ubuntu.

    Attributes:
        compiler: the C compiler that Triton would take, or None.
        headers: whether Python.h is there; Triton's launcher includes it.
        venv: whether this Python can make environments (Debian has that in a package of its own).
        apt: whether packages are installed by apt.
        python: "3.12", as the packages of Debian and Ubuntu are named.
    """

    compiler: str | None
    headers: bool
    venv: bool
    apt: bool
    python: str

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian's packages of the missing tools."""
        wanted = (
            ("build-essential", self.compiler is None),
            (f"python{self.python}-dev", not self.headers),
            (f"python{self.python}-venv", not self.venv),
        )
        return tuple(name for name, missing in wanted if missing)


def build_tools(
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    include: Path | None = None,
    spec_of: Callable[[str], object] = importlib.util.find_spec,
) -> BuildTools:
    """The compilers as Triton looks for them: $CC, gcc, clang; the headers of the Python that runs."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own, which has no headers
    folder = include or Path(sysconfig.get_paths(scheme=scheme)["include"])
    named = environ.get("CC", "").split()
    return BuildTools(
        compiler=which(named[0]) if named else which("gcc") or which("clang"),
        headers=(folder / "Python.h").is_file(),
        venv=spec_of("ensurepip") is not None,
        apt=which("apt") is not None,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )


def torch_build(version_of: Callable[[str], str] | None = None) -> TorchBuild | None:
    """The installed torch, or None.

    A wheel of an index of its own says "+cpu" or "+cu128"; the plain one of the package index for Linux is a
    CUDA build whose runtime is a package beside it.
    """
    version = _version(version_of, "torch")
    if version is None:
        return None
    local = version.partition("+")[2]
    if local.startswith("cpu"):
        return TorchBuild(version, None, cpu_only=True)
    if match := re.fullmatch(r"cu(\d+)(\d)", local):
        return TorchBuild(version, (int(match[1]), int(match[2])), cpu_only=False)
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        runtime = _version(version_of, package)
        if runtime and (match := re.match(r"(\d+)\.(\d+)", runtime)):
            return TorchBuild(version, (int(match[1]), int(match[2])), cpu_only=False)
    return TorchBuild(version, None, cpu_only=False)


def driver_too_old(driver: str | None, build: TorchBuild, *, windows: bool) -> str | None:
    """The lowest driver that `build` runs with, if `driver` is below it."""
    if driver is None or build.cuda is None:
        return None
    lowest = (MIN_DRIVER_WINDOWS if windows else MIN_DRIVER).get(build.cuda[0])
    have = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    if lowest is None or not have or have >= lowest:
        return None
    return f"{lowest[0]}.{lowest[1]:02}"


def lacks_kernels(capability: tuple[int, int] | None, build: TorchBuild) -> str | None:
    """The CUDA version that torch needs for this GPU ("12.8 or later"), if `build` has no code for it.

    Blackwell (10.0 and up) came with CUDA 12.8; CUDA 13 dropped everything before Turing (7.5).
    """
    if capability is None or build.cuda is None:
        return None
    if capability >= (10, 0) and build.cuda < (12, 8):
        return "12.8 or later"
    if capability < (7, 5) and build.cuda >= (13, 0):
        return "12"
    return None


def _version(version_of: Callable[[str], str] | None, package: str) -> str | None:
    from importlib import metadata  # it takes longer than a plan for a described GPU, which asks for none

    try:
        return (version_of or metadata.version)(package)
    except metadata.PackageNotFoundError:
        return None


LIBRARY = "libcuda.so.1"


def open_context(index: int, library: str = LIBRARY) -> bool:
    """Make the primary context of a GPU, which torch finds and uses later; whether that worked.

    It takes a large part of a second, without Python's lock: run in a thread it costs nothing while torch is
    imported. A failure here is left to torch, which tries again and says why.

    Args:
        index: of the GPU, as CUDA and torch count those that are visible.
        library: the driver's.
    """
    import ctypes  # which plans need not

    try:
        driver = ctypes.CDLL(library)
    except OSError:  # no driver, or not Linux
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )

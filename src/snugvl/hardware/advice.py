"""Advice on a machine: its problems, and what would free memory on it, most bytes first. Pure: no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from snugvl.core.sizes import GIB, MIB, format_size
from snugvl.hardware.machine import RESERVED, Gpu, Machine, Tenant
from snugvl.hardware.nvml import OUTSIDE, UNNAMED
from snugvl.hardware.software import BuildTools, TorchBuild, driver_too_old, lacks_kernels

Resource = Literal["gpu", "ram", "disk"]

LOW_DISK_BYTES: Final = 20 * GIB  # the largest model that an 8 GB card runs is a download of 17.5 GB
LOW_RAM_BYTES: Final = 8 * GIB
# The newest torch that the package index has for CUDA 12, for drivers and GPUs that CUDA 13 has left behind.
CUDA_12: Final = "torch<2.11"
_WITH_CUDA_12: Final = f"pip install '{CUDA_12}'"
_WORTH_BYTES: Final = 64 * MIB  # less is not worth closing a program

# Programs by name, and how each gives its memory back. The first that matches counts.
_ENGINES: Final = (
    (r"ollama", "ollama", "`ollama stop MODEL`, or `sudo systemctl stop ollama`"),
    (r"vllm", "vLLM", "stop its server"),
    (r"sglang", "SGLang", "stop its server"),
    (r"llama[-_.](server|cli|box)|llamacpp|koboldcpp", "llama.cpp", "stop its server"),
    (r"comfy", "ComfyUI", "“Unload models” in its menu, or stop it"),
    (r"lm[-_ ]?studio|\blms\b", "LM Studio", "`lms unload --all`"),
    (r"tabby|exllama|text-generation|tgi|tritonserver|invokeai|webui", "an engine", "stop its server"),
    (r"snugvl", "snugvl", "stop its server"),
)
_DESKTOP: Final = re.compile(
    r"xorg|xwayland|gnome|mutter|kwin|plasma|cinnamon|muffin|xfwm|marco|compiz|weston|sway|hyprland|niri|budgie"
    r"|\bgdm|sddm|desktop portal|kded|ksmserver",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FreeingStep:
    """A step that frees memory. `frees_bytes` is an upper bound; `gpu`: whose memory, where it is a GPU's."""

    text: str
    frees_bytes: int
    resource: Resource
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Problems, in whole sentences, and steps that free memory, most bytes first."""

    odd: tuple[str, ...]
    steps: tuple[FreeingStep, ...]


def advise(
    machine: Machine,
    build: TorchBuild | None = None,
    downloads: Sequence[tuple[str, int]] = (),
    tools: BuildTools | None = None,
) -> Advice:
    """Advice for `machine`; where it is this one, also give torch's `build`, `downloads` and `tools`."""
    steps = [step for gpu in machine.gpus for step in _gpu_steps(gpu, machine)]
    steps += [*_ram_steps(machine), *_disk_steps(machine, downloads)]
    steps = [step for step in steps if step.frees_bytes >= _WORTH_BYTES]
    compiles = machine.gpus and machine.os in ("linux", "wsl2")  # Triton does, for a GPU, on Linux
    odd = (*_odd(machine, build), *(_missing_tools(tools) if tools and compiles else ()))
    return Advice(odd, tuple(sorted(steps, key=lambda step: -step.frees_bytes)))


def _odd(machine: Machine, build: TorchBuild | None) -> Sequence[str]:
    found = list(machine.notes)
    if machine.spills and machine.gpus:
        found.append(
            f"{'WSL2' if machine.os == 'wsl2' else 'Windows'} doesn't fail when GPU memory runs out: it "
            "moves some to system memory and everything gets 2 to 10 times slower, so plans keep a margin."
        )
    if machine.pinned_bytes is not None and machine.gpus:
        found.append(
            f"At most about {format_size(machine.pinned_bytes)} of system memory can be pinned for transfers."
        )
    if machine.host_ram_bytes is not None:
        found.append(
            f"A limit ({'container' if machine.container else 'control group'}) leaves "
            f"{format_size(machine.ram_total_bytes)} of {format_size(machine.host_ram_bytes)} system memory."
        )
    found += [
        f"{gpu.name} is a slice of a GPU (MIG): no other slice can lend it memory."
        for gpu in machine.gpus
        if gpu.mig
    ]
    if machine.disk_free_bytes < LOW_DISK_BYTES:
        found.append(
            f"Only {format_size(machine.disk_free_bytes)} are free on the disk that models are downloaded to."
        )
    if build is not None:
        found += _odd_torch(machine, build)
    return list(dict.fromkeys(found))


def unusable(gpu: Gpu, machine: Machine, build: TorchBuild) -> str | None:
    """Why torch can't reach `gpu`, which the driver shows, and what to do; None where it can."""
    if build.cpu_only:
        plain = build.version.partition("+")[0]
        return (
            f"torch {build.version} is a CPU build although there is a GPU; install a CUDA build of torch: "
            f"pip install --force-reinstall torch=={plain}"
        )
    windows = machine.os in ("wsl2", "windows")
    lowest = driver_too_old(gpu.driver, build, windows=windows)
    if lowest is None:
        return None
    where = "in Windows, " if machine.os == "wsl2" else ""
    older = TorchBuild(CUDA_12, (12, 0), cpu_only=False)
    too_old = driver_too_old(gpu.driver, older, windows=windows)
    instead = "" if too_old else f", or install a torch for CUDA 12: {_WITH_CUDA_12}"
    return (
        f"Driver {gpu.driver} is too old for torch {build.version} (CUDA {_cuda(build)}); {where}update "
        f"it to {lowest} or later{instead}"
    )


def _cuda(build: TorchBuild) -> str:
    return ".".join(map(str, build.cuda or ()))


def _odd_torch(machine: Machine, build: TorchBuild) -> Sequence[str]:
    found = []
    for gpu in machine.gpus:
        if why := unusable(gpu, machine, build):
            found.append(why)
        needed = lacks_kernels(gpu.compute_capability, build)
        if needed:
            how = f": {_WITH_CUDA_12}" if needed == "12" else ""
            found.append(
                f"torch {build.version} (CUDA {_cuda(build)}) has no code for {gpu.name}; install one built "
                f"with CUDA {needed}{how}"
            )
    return found


def no_launcher(tools: BuildTools) -> str | None:
    """The clause on what Triton lacks to compile a launcher, with the command that installs it, or None."""
    lacking = {"C compiler": tools.compiler is None, "Python.h": not tools.headers}
    names = " and no ".join(name for name, missing in lacking.items() if missing)
    if not names:
        return None
    return f"Triton compiles a launcher for its kernels, and there is no {names}: {_installing(tools)}"


def _installing(tools: BuildTools) -> str:
    packages = " ".join(tools.packages)
    return f"sudo apt install {packages}" if tools.apt else "install it with the system's package manager"


def _missing_tools(tools: BuildTools) -> Sequence[str]:
    """Sentences on tools that a fresh Ubuntu lacks, with the command that installs them."""
    launcher = no_launcher(tools)
    found = [] if launcher is None else [launcher]
    if not tools.venv:
        found.append(
            "Python can't make environments (no ensurepip), and vLLM needs one of its own: "
            + _installing(tools)
        )
    return found


def _gpu_steps(gpu: Gpu, machine: Machine) -> Sequence[FreeingStep]:
    def step(text: str, frees_bytes: int) -> FreeingStep:
        return FreeingStep(text, frees_bytes, "gpu", gpu.index)

    steps: list[FreeingStep] = []
    drawing = [tenant for tenant in gpu.tenants if _DESKTOP.search(tenant.name) and tenant.pid is not None]
    if drawing:
        names = ", ".join(tenant.name for tenant in drawing)
        steps.append(
            step(
                f"Draw the desktop ({names}) on the processor's graphics, {_elsewhere(gpu)}; or end it, and "
                "every program in it, with `sudo systemctl isolate multi-user.target` (graphical.target "
                "brings it back)",
                sum(tenant.held_bytes for tenant in drawing),
            )
        )
    others = [tenant for tenant in gpu.tenants if tenant not in drawing and tenant.name != RESERVED]
    return [*steps, *(step(_about(tenant, gpu, machine), tenant.held_bytes) for tenant in others)]


def _elsewhere(gpu: Gpu) -> str:
    """The sentence on how to have the desktop drawn by other graphics than `gpu`."""
    if "laptop" in gpu.name.lower():
        return "as hybrid graphics do (a setting of the firmware or of the maker's program)"
    return "where the processor has some (monitor on the mainboard's socket)"


def _about(tenant: Tenant, gpu: Gpu, machine: Machine) -> str:
    """The sentence on how to make one tenant free its memory."""
    if tenant.pid is not None:
        for pattern, name, how in _ENGINES:
            if re.search(pattern, tenant.name, re.IGNORECASE):
                also = "" if tenant.name.lower() == name.lower() else f"{tenant.name}, "
                return f"If it isn't needed, end {name} ({also}process {tenant.pid}): {how}"
        return f"Close {tenant.name} (process {tenant.pid}), if it isn't needed"
    if tenant.name == OUTSIDE:
        who = "Look outside this container who uses the GPU (nvidia-smi on the host)"
        return f"{who}, and ask whether they need it"
    if tenant.name == UNNAMED:
        return "See what else uses the GPU (sudo fuser -v /dev/nvidia*), and end what isn't needed"
    if machine.os in ("wsl2", "windows"):
        return (
            "Close in Windows what draws or computes: browsers, chat, games, engines such as Ollama, LM "
            "Studio and ComfyUI (Task Manager, Details, column “Dedicated GPU memory”); or draw the "
            f"desktop on the processor's graphics, {_elsewhere(gpu)}"
        )
    return f"Close {tenant.name}; nvidia-smi names the processes"


def _ram_steps(machine: Machine) -> Sequence[FreeingStep]:
    if machine.host_ram_bytes is None:
        if machine.os == "wsl2" and machine.source != "described" and machine.ram_total_bytes < LOW_RAM_BYTES:
            text = (
                "Give WSL2 more memory: memory=… under [wsl2] in %UserProfile%\\.wslconfig, then "
                "`wsl --shutdown`, which ends everything that runs in WSL"
            )
            # By default WSL2 gets half of the PC's memory, so as much again is there.
            return [FreeingStep(text, machine.ram_total_bytes, "ram")]
        return []
    gain = machine.host_ram_bytes - machine.ram_total_bytes
    text = (
        "Raise the container's memory limit (docker run --memory, resources.limits.memory in Kubernetes)"
        if machine.container
        else "Raise this session's memory limit (systemd MemoryMax, Slurm --mem)"
    )
    return [FreeingStep(text, gain, "ram")]


def _disk_steps(machine: Machine, downloads: Sequence[tuple[str, int]]) -> Sequence[FreeingStep]:
    if machine.disk_free_bytes >= LOW_DISK_BYTES:
        return []
    return [
        FreeingStep(f"Delete the download of {name}: snugvl rm --all {name}", size, "disk")
        for name, size in downloads
    ]

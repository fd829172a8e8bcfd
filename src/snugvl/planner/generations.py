"""Where engines run: makers, systems, and generations of GPUs."""

from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.quantized import OWN_UPPER
from snugvl.hardware.machine import OperatingSystem
from snugvl.planner.footprint.total import Device
from snugvl.planner.settings import Engine

Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor number."""

PLANES: Final = (8, 0)  # whose kernels unpack five and six bits
NATIVE: Final = (7, 5)  # oldest GPUs that our kernels are compiled for (`other_cards.py`)
# Oldest GPUs by engine: vLLM's, whose FP8 weights go through Marlin from here on, and those of torch's builds
# for CUDA 13. llama.cpp runs on older ones, too.
OLDEST: Final[dict[Engine, Capability]] = {"native": NATIVE, "transformers": (7, 5), "vllm": (7, 5)}
VLLM_FP8_KV: Final = (8, 9)


def older(capability: Capability | None, needed: Capability) -> str | None:
    """As a clause: that a GPU is older than what is needed; None where it isn't, or is no GPU."""
    if capability is None or capability >= needed:
        return None
    return f"compute capability {_dotted(capability)} is older than {_dotted(needed)}"


def too_old(facts: ModelFacts, capability: Capability | None) -> str | None:
    """Why our engine doesn't run a model on a GPU for its age, or None."""
    planes = facts.own and any(tensor.name.endswith(f".{OWN_UPPER}") for tensor in facts.tensors)
    if planes and (why := older(capability, PLANES)):
        return f"some of its matrices have 5 or 6 bits, and {why}; quantise the original to int4"
    return older(capability, NATIVE)


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def not_here(engine: Engine, device: Device, system: OperatingSystem) -> str | None:
    """Why an engine runs on no machine of this maker, system or age, as a clause, or None."""
    if engine == "llamacpp":
        return None
    if system == "windows":
        return "it does not run on Windows; in WSL2 it does"
    if engine == "vllm" and system not in ("linux", "wsl2"):
        return "it runs on Linux and in WSL2 alone"
    if device.api != "CUDA":
        return f"it has nothing for a GPU that is reached by {device.api}"
    return older(device.compute_capability, OLDEST[engine])

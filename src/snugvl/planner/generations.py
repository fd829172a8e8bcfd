"""Generations of GPUs, by compute capability."""

from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.quantized import OWN_UPPER

Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor number."""

PLANES: Final = (8, 0)  # whose kernels unpack five and six bits
NATIVE: Final = (7, 5)  # oldest GPUs that our kernels are compiled for (`other_cards.py`)
# Oldest GPUs of torch's builds for CUDA 13, and of vLLM, whose FP8 weights go through Marlin from here on.
TORCH: Final = (7, 5)


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

"""Generations of GPUs, by compute capability."""

from typing import Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.quantized import own_precisions
from snugvl.core.formats import FEW_BITS, FORMATS, Precision

Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor number."""

NATIVE: Final = (7, 5)  # oldest GPUs that our kernels are compiled for (`other_cards.py`)
# Oldest GPUs of torch's builds for CUDA 13, and of vLLM, whose FP8 weights go through Marlin from here on.
TORCH: Final = (7, 5)


def older(capability: Capability | None, needed: Capability) -> str | None:
    """As a clause: that a GPU is older than what is needed; None where it isn't, or is no GPU."""
    if capability is None or capability >= needed:
        return None
    return f"compute capability {_dotted(capability)} is older than {_dotted(needed)}"


def too_old(facts: ModelFacts, capability: Capability | None, *, cpu: bool) -> str | None:
    """Why our engine doesn't run a model on a device for a GPU's age, or None."""
    for kind in () if cpu else own_precisions(facts):
        if why := no_kernels(kind, capability):
            alike = (form for form in FORMATS.values() if form.zero and form.since == FORMATS[kind].since)
            bits = " or ".join(map(str, sorted(form.bits for form in alike)))
            instead = next(each for each in FEW_BITS if not no_kernels(each, capability))
            return f"some of its matrices have {bits} bits, and {why}; quantise the original to {instead}"
    return older(capability, NATIVE)


def no_kernels(precision: Precision, capability: Capability | None) -> str | None:
    """Why the kernels of our engine don't read weights of a precision on a GPU, as a clause, or None."""
    since = FORMATS[precision].since if precision in FORMATS else NATIVE
    return f"no GPU has kernels for {precision}" if since is None else older(capability, since)


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"

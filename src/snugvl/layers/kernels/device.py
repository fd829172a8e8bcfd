"""What the hardware under the kernels can do."""

from functools import cache

import torch


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of the hardware; none where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def native_fp8(device: torch.device) -> bool:
    """Whether the hardware converts float8 (Ada and later)."""
    return capability(device) >= (8, 9)


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends (Hopper and later).

    Such a kernel is launched with `launch_pdl`, and waits (`gdc_wait`) before it reads or writes what
    another kernel writes or reads. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch".
    """
    return capability(device) >= (9, 0)

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

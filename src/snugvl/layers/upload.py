"""Numbers of the host on their way to the device, without waiting for what it is doing.

A plain copy of pageable memory waits until everything that was started before is finished, and with it the
host, which could have started more meanwhile.
"""

from collections.abc import Sequence

import torch


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`; in the order of its stream, on a GPU."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`, likewise."""
    if device.type != "cuda":
        return tensor.to(device)
    # torch keeps the pinned copy until the transfer is done, and gives its memory to later ones.
    return tensor.pin_memory().to(device, non_blocking=True)

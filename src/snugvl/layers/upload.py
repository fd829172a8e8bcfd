"""Numbers on their way from the host to the device or back, without waiting for what the device is doing.

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


class HostCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Start to copy `tensor` to `into` of the host, of page-locked memory where the tensor is a GPU's.

        Without `into` a copy is made of a GPU's tensor, and one of the host is read where it is.
        """
        self._event: torch.cuda.Event | None = None
        if into is None and tensor.is_cuda:
            into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host = tensor if into is None else into
        if into is not None:
            into.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> torch.Tensor:
        """The copy, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

"""Networks without memory, and the memory that they are given."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.models.networks import LoadableNetwork, network_of


class _NoInitialValues(TorchFunctionMode):
    """Makes `torch.nn.init` do nothing.

    The values come from the files; and drawing them for a tensor without memory imports all of
    `torch._dynamo`, which takes longer than loading a small model.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":  # a C method has no module
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def without_memory(config: ModelConfig) -> LoadableNetwork:
    """The network that a configuration describes, on torch's device for tensors without memory."""
    with torch.device("meta"), _NoInitialValues():
        return network_of(config)


def give_memory(model: nn.Module, device: torch.device, beside: Iterable[int] = ()) -> None:
    """`model.to_empty(device=device)`, which imports all of sympy for a second on the way.

    On a GPU in one piece, of which torch's allocator then cuts the tensors: pieces of their own would be
    rounded up to 2 MiB each, or lie in 20 MiB with holes (`planner/footprint/allocator.py`). `beside`: bytes
    of the next tensors after these.
    """
    if device.type == "cuda":
        sizes = [tensor.nbytes for tensor in chain(model.parameters(), model.buffers()) if tensor.is_meta]
        torch.empty(segment_bytes([*sizes, *beside]), dtype=torch.uint8, device=device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # it has a place in host memory
                continue
            made = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty(tuple(buffer.shape), dtype=buffer.dtype, device=device))


def segment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of one segment for tensors of more than 1 MiB, each to 512 bytes: torch keeps others apart."""
    return sum(-(-size // 512) * 512 for size in sizes if size > 1 << 20)

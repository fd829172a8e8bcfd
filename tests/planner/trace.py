"""Peak bytes of live tensors while a network runs on the meta device: the oracle of the workspace formulas.

Every operation is dispatched through a mode that counts each new storage and forgets it when it dies, as
PyTorch's caching allocator would (its rounding apart). Fused attention is stood in for by what it allocates:
its output, and nothing else that counts.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Trace(TorchDispatchMode):
    """Counts storages that operations create while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.where: str = ""
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage(), str(func))
        return output

    def keep(self, tensor: torch.Tensor) -> None:
        """A tensor from before: it doesn't count."""
        self._known.setdefault(tensor.untyped_storage()._cdata, 0)

    def _add(self, storage: torch.UntypedStorage, what: str) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.live += size
        if self.live > self.peak:
            self.peak, self.where = self.live, what
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What a fused attention kernel allocates: its output, in the layout of the query."""
    return torch.empty_like(query)


@contextmanager
def fused_attention(*places: str) -> Any:
    """Stand in for `scaled_dot_product_attention` at the given dotted names."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch(place, fused))
        yield


def peak_bytes(run: Callable[[], Any], *kept: torch.Tensor) -> tuple[int, int]:
    """(peak live bytes of `run` beyond what was there, bytes of what it returns)."""
    trace = Trace()
    for tensor in kept:
        trace.keep(tensor)
    with torch.inference_mode(), trace:
        result = run()
    held = trace.live
    del result
    return trace.peak, held

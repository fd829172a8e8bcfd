"""Whether a forward gets on: a beat at every layer.

transformers computes a prompt in one forward, which takes minutes where layers wait in main memory or the GPU
is a CPU. Who watches the engine must not take that for a hang, and must still notice one: a layer that lasts
for minutes is one.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

LOOK_S = 0.1

T = TypeVar("T")


class Pulse:
    """Counts the layers that were begun, of the decoder and of the towers."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.beats = 0
        for module in network.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(self._beat)

    def _beat(self, _module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
        self.beats += 1


class Reading(Generic[T]):
    """Something that only the engine's thread may look at, and what it was when it last did."""

    def __init__(self, read: Callable[[], T], pulse: Pulse) -> None:
        self._read = read
        self._pulse = pulse
        self._last = read()

    def now(self, ask: Callable[[Callable[[], T]], "Future[T]"]) -> T:
        """Read between two steps; what it was last, where a step lasts and gets on.

        `ask` runs something in the engine's thread.
        """
        beats, future = self._pulse.beats, ask(self._take)
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if self._pulse.beats != beats:
                    return self._last

    def _take(self) -> T:
        self._last = self._read()
        return self._last

"""Lets torchvision be imported on torch for the CPU; a .pth file of vLLM's environment imports this first.

Its wheel is built for torch with CUDA, so its operators can't be loaded, and its import fails where it
registers fakes for two of them. Their schemas are defined just before; nothing calls the operators.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
kept: list[object] = []  # a library that is dropped takes its schemas along


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Define the schemas when torchvision is asked for, once."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + SIGNATURE)
            kept.append(library)
        return None


sys.meta_path.insert(0, BeforeTorchvision())

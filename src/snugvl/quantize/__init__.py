"""Checkpoints of fewer bits, made from others: `snugvl quantize`."""

from typing import Literal

FileFormat = Literal["snugvl", "compressed-tensors"]

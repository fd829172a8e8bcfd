"""Checkpoints of fewer bits, made from others: `snugvl quantize`."""

from typing import Literal

FewBits = Literal["int4", "int5", "int6"]
FileFormat = Literal["snugvl", "compressed-tensors"]

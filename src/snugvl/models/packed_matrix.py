"""Where a checkpoint's tensors go, and which of them are one matrix of few bits."""

from dataclasses import dataclass

import torch

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a checkpoint tensor goes: rows `start … start + rows` of a parameter, maybe a `Linear`'s."""

    parameter: torch.Tensor
    start: int
    rows: int
    linear: Linear | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape the checkpoint tensor must have (patch embeddings come with more dimensions)."""
        return (self.rows, *self.parameter.shape[1:])


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one matrix.

    Attributes:
        form: how it is stored.
        shape: what compressed-tensors says of it.
        order: the group of each column, where the file has it.
        bias: one of zeros that GPTQ's files have where the network has none.
        upper: the bits above the fourth (our own format, of 5 and 6 bits).
    """

    form: PackedInt4
    words: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    shape: TensorEntry | None = None
    order: TensorEntry | None = None
    bias: TensorEntry | None = None
    upper: TensorEntry | None = None

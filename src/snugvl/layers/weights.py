"""A matrix of weights as it is stored: bf16, the checkpoint's own FP8 blocks, int8, int4 or a GGUF's blocks.

The torch functions here are the definition; `kernels/` computes the same without ever writing the wide
form to memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from snugvl.layers import ggml
from snugvl.layers.ggml import Part

Format = Literal["bf16", "fp8", "int8", "int4", "ggml"]
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "int8", "int4")  # "ggml" is read, never made
GROUP = 128  # columns that share a scale (int4 may have 64, int8 a whole row)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """`[rows, columns]` in one of the formats.

    Attributes:
        data: bf16 (or any float) `[rows, columns]`; fp8 the same in float8_e4m3fn; int8 the same; int4 int32
            `[rows, columns / 8]`, eight neighbours a word, the first in its lowest bits; ggml uint8 `[n]`.
        scale: fp8 float32 `[rows / 128, columns / 128]`, rounded up; int8, int4 `[rows, columns / group]`.
        zero: int4 only, `[rows, columns / group]`: the code that means 0, not a whole number.
        parts: ggml only, its rows by type (`layers/ggml.py`).
    """

    format: Format
    rows: int
    columns: int
    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int = GROUP
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return sum(t.nbytes for t in (self.data, self.scale, self.zero) if t is not None)

    def wide(self, dtype: torch.dtype, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows `start … end` as they are meant, `[end − start, columns]`."""
        end = self.rows if end is None else end
        if self.format == "ggml":
            return self._wide_parts(start, end).to(dtype)
        data = self.data[start:end]
        if self.format == "bf16":
            return data.to(dtype)
        assert self.scale is not None
        if self.format == "fp8":
            blocks = self.scale.float().repeat_interleave(128, 0)[start:end]
            return (data.float() * blocks.repeat_interleave(128, 1)[:, : self.columns]).to(dtype)
        scale = self.scale[start:end, :, None].float()
        if self.format == "int8":
            return (data.view(end - start, -1, self.group).float() * scale).flatten(1).to(dtype)
        assert self.zero is not None
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=data.device)
        codes = ((data[..., None] >> shifts) & 15).view(end - start, -1, self.group).float()
        return ((codes - self.zero[start:end, :, None].float()) * scale).flatten(1).to(dtype)

    def _wide_parts(self, start: int, end: int) -> torch.Tensor:
        pieces = [
            ggml.wide(self.data, part, self.columns, first, last)
            for part in self.parts
            if (first := max(start - part.start, 0)) < (last := min(end - part.start, part.rows))
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def to_int8(values: torch.Tensor, group: int = GROUP) -> Weights:
    """Round `[rows, columns]` to int8, symmetric, one scale for each group of a row's columns."""
    rows, columns = values.shape
    wide = values.float().view(rows, -1, group)
    scale = (wide.abs().amax(-1) / 127).clamp(min=1e-10).to(torch.bfloat16)
    codes = (wide / scale[..., None].float()).round().clamp(-127, 127).to(torch.int8)
    return Weights("int8", rows, columns, codes.view(rows, columns), scale, group=group)


def to_int4(values: torch.Tensor, group: int = GROUP, rounds: int = 20) -> Weights:
    """Round `[rows, columns]` to int4 by half-quadratic quantisation (HQQ), which needs no calibration data.

    The zero point is moved so that the weights' own error shrinks in the lₚ norm (p = 0.7), which forgives
    outliers: alternately the error is shrunk towards sparsity, and the zero point solved for what is left.

    Source: Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
    (https://mobiusml.github.io/hqq_blog/).
    """
    rows, columns = values.shape
    wide = values.float().view(rows, -1, group)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-8)
    # From here on as stored, so that the zero point makes up for the rounding of the scale.
    step = step.to(torch.bfloat16).float()
    zero = -low / step
    beta, best = 10.0, torch.full_like(low, torch.inf)
    kept = zero
    for _ in range(rounds):
        codes = (wide / step + zero).round().clamp(0, 15)
        error = wide - (codes - zero) * step
        loss = error.abs().pow(0.7).mean(-1, keepdim=True)
        kept, best = torch.where(loss < best, zero, kept), torch.minimum(loss, best)
        magnitude = error.abs()
        shrunk = error.sign() * (magnitude - magnitude.clamp(min=1e-9).pow(-0.3) / beta).clamp(min=0)
        zero = (codes - (wide - shrunk) / step).mean(-1, keepdim=True)
        beta *= 1.01
    zero = kept.to(torch.bfloat16)
    codes = (wide / step + zero.float()).round().clamp(0, 15).to(torch.int32).view(rows, -1, 8)
    packed = torch.zeros_like(codes[..., 0])
    for position in range(8):
        packed |= codes[..., position] << 4 * position
    return Weights("int4", rows, columns, packed, step[..., 0].to(torch.bfloat16), zero[..., 0], group)

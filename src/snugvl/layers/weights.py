"""A matrix of weights as stored: bf16, the checkpoint's own FP8 blocks, int8, few bits, a GGUF's blocks.

The torch functions here are the definition; `kernels/` computes the same without ever writing the wide
form to memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from snugvl.core.formats import FORMATS, FewBits
from snugvl.layers import ggml
from snugvl.layers.ggml import TypedRows
from snugvl.layers.replaced import by_kernels

FormatName = Literal["bf16", "fp8", "int8", FewBits, "ggml"]  # "ggml" is read, never made
GROUP = 128  # columns that share a scale (those of few bits may have 32 or 64, int8 a whole row)
LEAST_SHARE = 0.01  # of the mean, that every column counts when weights are rounded
WORDS: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
}  # of eight codes' bits in a plane


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """`[rows, columns]` in one of the formats.

    Attributes:
        data: bf16 (or any float) `[rows, columns]`; fp8 the same in float8_e4m3fn; int8 the same; few bits
            the first plane of their codes, `[rows, columns / 8]` in the type that `WORDS` has for its bits:
            eight neighbours a word, the first in its lowest bits; ggml uint8 `[n]`.
        scale: fp8 float32 `[rows / 128, columns / 128]`, rounded up; of others `[rows, columns / group]`.
        zero: of few bits `[rows, columns / group]`: the code that means 0, not a whole number.
        parts: ggml only, its rows by type (`layers/ggml.py`).
        upper: of few bits in two planes (`core/formats.py`) the second, the upper bits, in the same order.
    """

    format: FormatName
    rows: int
    columns: int
    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int = GROUP
    parts: tuple[TypedRows, ...] = ()
    upper: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return sum(t.nbytes for t in (self.data, self.scale, self.zero, self.upper) if t is not None)

    def units(self, count: int) -> list[torch.Tensor]:
        """Views of all tensors as bytes `[count, n]`: those of each of `count` equal matrices below one
        another."""
        tensors = [self.data, self.scale, self.zero, self.upper]
        if self.format == "ggml":
            (part,) = self.parts
            tensors = [*part.planes(self.data, self.columns)]
        return [each.view(count, -1).view(torch.uint8) for each in tensors if each is not None]

    def of_units(
        self, count: int, wanted: int, room: torch.Tensor, start: int, alignment: int
    ) -> tuple["Weights", int]:
        """Weights of `wanted` matrices like each of these `count`, without values, in bytes of `room`.

        They begin at byte `start`. Returns them, and the first byte after them; each tensor begins at a
        multiple of `alignment`.
        """
        made: list[torch.Tensor | None] = []
        for each in (self.data, self.scale, self.zero, self.upper):
            if each is None:
                made.append(None)
                continue
            end = start + each.nbytes // count * wanted
            view = room[start:end].view(each.dtype)
            made.append(view.view(len(each) // count * wanted, *each.shape[1:]))
            start = -(-end // alignment) * alignment
        data, *beside = made
        assert data is not None
        parts = tuple(replace(each, rows=each.rows // count * wanted) for each in self.parts)
        scale, zero, upper = beside
        rows = self.rows // count * wanted
        form = self.format, rows, self.columns
        return Weights(*form, data, scale, zero, self.group, parts, upper), start

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
        form = FORMATS[self.format]
        codes = _places(data, form.planes[0])
        if self.upper is not None:
            codes |= _places(self.upper[start:end], form.upper) << form.planes[0]
        codes = codes.view(end - start, -1, self.group)
        return ((codes.float() - self.zero[start:end, :, None].float()) * scale).flatten(1).to(dtype)

    def _wide_parts(self, start: int, end: int) -> torch.Tensor:
        pieces = [
            ggml.wide(self.data, part, self.columns, first, last)
            for part in self.parts
            if (first := max(start - part.start, 0)) < (last := min(end - part.start, part.rows))
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _places(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, n]` of eight codes each as `[rows, n, 8]` int32."""
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=packed.device)
    return (packed.int()[..., None] >> shifts) & ((1 << bits) - 1)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse."""
    packed = torch.zeros_like(codes[..., 0])
    for position in range(8):
        packed |= codes[..., position] << bits * position
    return packed


def to_int8(values: torch.Tensor, group: int = GROUP) -> Weights:
    """Round `[rows, columns]` to int8, symmetric, one scale for each group of a row's columns."""
    rows, columns = values.shape
    wide = values.float().view(rows, -1, group)
    scale = (wide.abs().amax(-1) / 127).clamp(min=1e-10).to(torch.bfloat16)
    codes = (wide / scale[..., None].float()).round().clamp(-127, 127).to(torch.int8)
    return Weights("int8", rows, columns, codes.view(rows, columns), scale, group=group)


def to_few_bits(
    values: torch.Tensor,
    kind: FormatName,
    group: int = GROUP,
    squares: torch.Tensor | None = None,
    rounds: int = 4,
) -> Weights:
    """Round `[rows, columns]` to few bits: by the scale and zero point of least square error.

    From those of the smallest and the largest weight on, in turns codes are rounded and the line through them
    is fitted, by weighted least squares. The best round counts.

    Args:
        squares: mean square of each column's input, `[columns]`: a weight's error counts as much as what it
            is multiplied with (`models/sensitivity.py`). None: all alike.
    """
    if by_kernels(values, "round_groups") and FORMATS[kind].since is not None:
        from snugvl.layers.kernels import rounding  # needs triton, which only GPUs bring

        return rounding.to_few_bits(values, kind, group, squares, rounds)
    rows, columns = values.shape
    most = (1 << FORMATS[kind].bits) - 1
    wide = values.float().view(rows, -1, group)
    share = shares_of(squares, columns, group, wide.device)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    # Always as stored, so that the zero point makes up for the rounding of the scale.
    step = ((high - low) / most).clamp(min=1e-8).to(torch.bfloat16).float()
    zero = (-low / step).to(torch.bfloat16).float()
    mean, least = (wide * share).sum(-1, keepdim=True), torch.full_like(low, torch.inf)
    kept_step, kept_zero = step, zero
    for last in range(rounds, -1, -1):
        codes = (wide / step).add_(zero).round_().clamp_(0, most)
        error = (codes - zero).mul_(step).sub_(wide).square_().mul_(share).sum(-1, keepdim=True)
        better = error < least
        kept_step, kept_zero = torch.where(better, step, kept_step), torch.where(better, zero, kept_zero)
        least = torch.minimum(error, least)
        if not last:
            break
        middle = (codes * share).sum(-1, keepdim=True)
        codes -= middle
        spread = (codes.square() * share).sum(-1, keepdim=True)
        slope = codes.mul_(wide).mul_(share).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
        step = torch.where(slope > 1e-8, slope, step).to(torch.bfloat16).float()
        zero = (middle - mean / step).to(torch.bfloat16).float()
    codes = (wide / kept_step).add_(kept_zero).round_().clamp_(0, most).to(torch.int32).view(rows, columns)
    scale, zero = kept_step[..., 0].to(torch.bfloat16), kept_zero[..., 0].to(torch.bfloat16)
    return in_few_bits(codes, kind, scale, zero)


def in_few_bits(codes: torch.Tensor, kind: FormatName, scale: torch.Tensor, zero: torch.Tensor) -> Weights:
    """Codes int32 `[rows, columns]` of few bits, packed; scales and zero points as they are."""
    rows, columns = codes.shape
    form, eights = FORMATS[kind], codes.view(rows, -1, 8)
    low, above = form.planes[0], form.upper
    upper = _packed(eights >> low, above).to(WORDS[above]) if above else None
    lower = _packed(eights & ((1 << low) - 1), low).to(WORDS[low])
    return Weights(kind, rows, columns, lower, scale, zero, columns // scale.shape[1], upper=upper)


def shares_of(squares: torch.Tensor | None, columns: int, group: int, device: torch.device) -> torch.Tensor:
    """Share of each column in its group's error, `[1, groups, group]` float32."""
    if squares is None:
        return torch.full((1, columns // group, group), 1 / group, device=device)
    floor = LEAST_SHARE * squares.mean().clamp(min=1e-20)  # another text may bring more to a column
    counts = (squares.float() + floor).to(device).view(1, -1, group)
    return counts / counts.sum(-1, keepdim=True)

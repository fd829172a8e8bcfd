"""A linear layer whose weights stay as they are stored, and what is fused into its product; RMSNorm.

    [RMSNorm] ─ x · Wᵀ ─ [+ bias] ─ [SwiGLU] ─ [+ residual]

On a GPU the kernels read the stored form; elsewhere plain torch dequantizes it, a piece at a time, and
computes the same.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear, silu

from snugvl.core.formats import FEW_BITS, FORMATS
from snugvl.layers.ggml import GgmlType, TypedRows, parts_of, sort_bytes, wide_planes
from snugvl.layers.replaced import by_kernels
from snugvl.layers.weights import GROUP, WORDS, FormatName, Weights, to_few_bits, to_int8


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + weight)` over the last dimension, in float32 (https://arxiv.org/abs/1910.07467).

    `offset` is 1 where a checkpoint stores how far the weights are from 1 (Qwen3.5), else 0.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, size]`."""
        if by_kernels(x, "rms_norm"):
            from snugvl.layers.kernels.rows import normed  # needs triton, which only GPUs bring

            return normed(x, self.weight, self.eps, self.offset)
        return plain_norm(x, self.weight, self.eps, self.offset)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """RMSNorm of `x` `[…, size]` in plain torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.float())).to(x.dtype)
    # Rounded before the weight, as transformers does: in bf16 the order decides the last bit.
    return weight * wide.to(x.dtype)


SLICE_BYTES = 16 << 20  # of dequantized weights in `Linear.wide_product`
SLICE_ROWS = 32  # its rows are a multiple of
FEW_ROWS = 16  # of input up to which bf16 weights are multiplied by kernels of ours
_WIDE_ROWS = 4096  # dequantized at a time by the plain path


class Linear(nn.Module):
    """`[columns] → [rows]`, by default with the weights as a parameter of the network's dtype."""

    def __init__(
        self, columns: int, rows: int, *, bias: bool = False, quantises: bool = True, unit: int = 0
    ) -> None:
        """A matrix without values.

        Args:
            quantises: whether its weights may take another format than the network's.
            unit: rows of each of the matrices that stand below one another in it; 0 where it is one.
        """
        super().__init__()
        self.rows, self.columns, self.quantises, self.unit = rows, columns, quantises, unit
        self.format: FormatName = "bf16"
        self.group = GROUP
        self.parts: tuple[TypedRows, ...] = ()
        self.squares: torch.Tensor | None = None  # of its input, while weights are rounded: `to_few_bits`
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self.scale: torch.Tensor | None
        self.zero: torch.Tensor | None
        self.upper: torch.Tensor | None
        for beside in ("scale", "zero", "upper"):
            self.register_buffer(beside, None)

    def store_as(self, kind: FormatName, group: int = GROUP) -> None:
        """Give the weights the shapes of a format, before they are given memory.

        Raises:
            ValueError: the columns don't divide into groups.
        """
        if kind == "bf16":
            return
        if self.columns % group or (kind == "fp8" and group != GROUP):
            raise ValueError(f"{self.columns} columns don't divide into groups of {group}")
        self.format, self.group = kind, group
        rows, columns, device = self.rows, self.columns, self.weight.device
        form, few = FORMATS[kind], kind in FEW_BITS
        width = columns // 8 if few else columns
        code = WORDS[form.planes[0]] if few else torch.int8 if kind == "int8" else torch.float8_e4m3fn
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=code, device=device), requires_grad=False)
        if kind == "fp8":
            self.scale = torch.empty(-(-rows // GROUP), columns // GROUP, device=device)
        else:
            self.scale = torch.empty(rows, columns // group, dtype=torch.bfloat16, device=device)
        if few:  # not `empty_like`, which imports sympy where there is no memory
            self.zero = torch.empty(rows, columns // group, dtype=torch.bfloat16, device=device)
        if form.upper:
            self.upper = torch.empty(rows, width, dtype=WORDS[form.upper], device=device)

    def store_blocks(self, rows: Sequence[tuple[GgmlType, int]]) -> None:
        """Give the weights the size of a GGUF's blocks: `rows` of each type, in order.

        Raises:
            ValueError: the columns don't divide into blocks.
        """
        self.format, self.parts = "ggml", parts_of(rows, self.columns)
        nbytes = sum(part.nbytes(self.columns) for part in self.parts)
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.weight.device)
        self.weight = nn.Parameter(made, requires_grad=False)

    def put_bytes(self, start: int, raw: torch.Tensor) -> None:
        """Store rows `[n, bytes]` of a GGUF, all of one type, as rows `start …`."""
        part = next(part for part in self.parts if part.start <= start < part.start + part.rows)
        first = start - part.start
        planes = zip(part.planes(self.weight, self.columns), sort_bytes(raw, part.type), strict=True)
        for plane, values in planes:
            plane[first : first + len(raw)].copy_(values)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Store `values` `[n, columns]`, of any float type, as rows `start …`, quantised if need be."""
        end = start + len(values)
        if self.format == "int8" or self.format in FEW_BITS:
            int8 = self.format == "int8"
            made = (
                to_int8(values, self.group)
                if int8
                else to_few_bits(values, self.format, self.group, self.squares)
            )
            places = (self.weight, self.scale, self.zero, self.upper)
            for place, part in zip(places, (made.data, made.scale, made.zero, made.upper), strict=True):
                if place is not None and part is not None:
                    place[start:end].copy_(part)
        else:
            assert self.format == "bf16", "FP8 blocks come with their scales: put_blocks"
            self.weight[start:end].copy_(values)

    def put_blocks(self, start: int, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Store FP8 rows and their block scales `[n / 128, columns / 128]` as they are."""
        assert self.scale is not None
        assert start % GROUP == 0
        self.weight[start : start + len(values)].copy_(values)
        self.scale[start // GROUP : start // GROUP + len(scale)].copy_(scale)

    @property
    def weights(self) -> Weights:
        """The stored form."""
        beside = self.weight, self.scale, self.zero, self.group, self.parts, self.upper
        return Weights(self.format, self.rows, self.columns, *beside)

    def first(self, rows: int) -> "Linear":
        """A layer of the first rows alone, on the same memory.

        Itself where it has no more, or where rows don't stand alone in memory: FP8's blocks span some, and
        the planes of a GGUF's types all.
        """
        if rows >= self.rows or self.format in ("fp8", "ggml"):
            return self
        with torch.device("meta"):
            part = Linear(self.columns, rows, quantises=self.quantises)
        part.format, part.group = self.format, self.group
        part.weight = nn.Parameter(self.weight[:rows], requires_grad=False)
        part.bias = None if self.bias is None else nn.Parameter(self.bias[:rows], requires_grad=False)
        beside = self.scale, self.zero, self.upper
        part.scale, part.zero, part.upper = (None if each is None else each[:rows] for each in beside)
        return part

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` `[n]`, as an embedding: `[n, columns]`."""
        if self.format == "ggml":
            return self._lookup_blocks(ids, dtype)
        if by_kernels(ids, "embed"):
            from snugvl.layers.kernels.rows import lookup  # needs triton, which only GPUs bring

            assert self.format in ("bf16", "int8"), "an embedding is bf16 or int8"
            return lookup(ids, self.weight, self.scale, self.group, dtype)
        rows = self.weight[ids]
        if self.format == "bf16":
            return rows.to(dtype)
        assert self.scale is not None
        assert self.format == "int8", "an embedding is bf16 or int8"
        scale = self.scale[ids].float()[..., None]
        return (rows.view(len(ids), -1, self.group).float() * scale).flatten(1).to(dtype)

    def _lookup_blocks(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (part,) = self.parts
        if by_kernels(ids, "dequantize_rows"):
            from snugvl.layers.kernels.products.ggml import lookup  # needs triton, which only GPUs bring

            return lookup(ids, self.weights, dtype)
        planes = [plane[ids] for plane in part.planes(self.weight, self.columns)]
        return wide_planes(planes, part.type).to(dtype)

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        swiglu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x` `[tokens, columns]` → `[tokens, rows]`, or half of the rows with `swiglu`.

        `residual` `[tokens, rows]` is added, and may be written over.
        """
        if by_kernels(x) and (self.format != "bf16" or self._few(x)):
            from snugvl.layers.kernels.products.linear import product  # needs triton, which only GPUs bring

            found = product(
                x,
                self.weights,
                bias=self.bias,
                norm=None if norm is None else norm.weight,
                eps=0.0 if norm is None else norm.eps,
                offset=0.0 if norm is None else norm.offset,
                residual=residual,
                swiglu=swiglu,
                dtype=dtype,
            )
            if found is not None:
                return found
        plain = norm is None and self.bias is None and not swiglu and dtype is None
        if residual is not None and x.is_cuda and plain and self.format == "bf16":
            return torch.addmm(residual, x, self.weight.T, out=residual)  # a launch less
        product_of = self.wide_product if x.is_cuda else self._plain  # of a GPU's memory a slice at a time
        y = product_of(x if norm is None else norm(x))  # whose input is free again before SwiGLU
        if swiglu:
            y = _swiglu(y)
        y = y if residual is None else residual + y
        return y if dtype is None else y.to(dtype)

    def _few(self, x: torch.Tensor) -> bool:
        """Whether our kernels are quicker for bf16 than the library, which also takes any width."""
        most = FEW_ROWS if x.dtype == torch.bfloat16 else 1
        return x.shape[0] <= most and self.columns % GROUP == 0

    def with_tail(
        self, x: torch.Tensor, tail: "Linear", *, norm: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`self(x)` and `tail(x)`, whose weights have few rows; in one launch where `x` has one row."""
        if len(x) == 1 and self.bias is None and tail.format == "bf16" and by_kernels(x):
            from snugvl.layers.kernels.products.linear import product_with_tail  # needs triton, as above

            weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
            found = product_with_tail(x, self.weights, tail.weight, norm=weight, eps=eps, offset=offset)
            if found is not None:
                return found
        # The small product first: weights of the large one are on their way meanwhile.
        last = tail(x, norm=norm)
        return self(x, norm=norm), last

    def wide_product(
        self, x: torch.Tensor, start: int = 0, end: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` `[tokens, columns]` times rows `start … end − 1`, and their bias: `[tokens, end − start]`.

        For a vision tower's hundreds of tokens and odd widths: the weights are dequantized a slice at a time
        and multiplied by the library, whatever their groups. `out`: where the result goes.
        """
        end = self.rows if end is None else end
        bias = None if self.bias is None else self.bias[start:end]
        if self.format == "bf16":
            return _times(x, self.weight[start:end], bias, out)
        out = x.new_empty(len(x), end - start) if out is None else out
        step = slice_rows(end - start, self.columns * x.element_size())
        slice_ = x.new_empty(step, self.columns)
        for first in range(0, end - start, step):
            last = min(first + step, end - start)
            wide = slice_[: last - first]
            self._dequantize(start + first, wide)
            _times(x, wide, None if bias is None else bias[first:last], out[:, first:last])
        return out

    def _dequantize(self, first: int, out: torch.Tensor) -> None:
        """Rows `first …` as they are meant, to `out` `[n, columns]`."""
        if self.format == "ggml" and by_kernels(out, "dequantize_rows"):
            from snugvl.layers.kernels.products.ggml import dequantize  # needs triton, which only GPUs bring

            dequantize(self.weights, first, out)
        elif self.format == "int8" and by_kernels(out, "dequantize_codes"):
            # Needs triton, which only GPUs bring.
            from snugvl.layers.kernels.products.dequantize import dequantize_int8

            dequantize_int8(self.weights, first, out)
        else:
            out.copy_(self.weights.wide(out.dtype, first, first + len(out)))

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        if self.format == "bf16":
            return linear(x, self.weight, self.bias)
        stored = self.weights
        pieces = [
            linear(x, stored.wide(x.dtype, start, min(start + _WIDE_ROWS, self.rows)))
            for start in range(0, self.rows, _WIDE_ROWS)
        ]
        y = torch.cat(pieces, dim=-1)
        return y if self.bias is None else y + self.bias


def slice_rows(rows: int, row_bytes: int) -> int:
    """Rows of a slice: all, or the fewest slices within `SLICE_BYTES`, of equal size."""
    most = max(SLICE_ROWS, SLICE_BYTES // row_bytes // SLICE_ROWS * SLICE_ROWS)
    slices = -(-rows // most)
    return min(rows, -(-rows // (slices * SLICE_ROWS)) * SLICE_ROWS)


def _times(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if out is None:
        return linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if not by_kernels(gate_up, "gated"):
        return silu(gate) * up
    from snugvl.layers.kernels.products.dequantize import swiglu  # needs triton, which only GPUs bring

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    swiglu(gate_up, out, 0)
    return out

"""Products with many rows of input: weights are widened a slice at a time, and multiplied by the library."""

import torch
from torch.nn.functional import linear

from snugvl.layers.kernels.device import native_fp8
from snugvl.layers.kernels.products import ggml
from snugvl.layers.kernels.products.epilogue import Epilogue
from snugvl.layers.kernels.products.planes import widen_planes
from snugvl.layers.kernels.products.weights import KINDS, operands, planes_of
from snugvl.layers.kernels.products.widen import swiglu as swiglu_into
from snugvl.layers.kernels.products.widen import widen
from snugvl.layers.weights import FEW_BITS, Weights

WIDE_BYTES = 32 << 20  # of a widened slice
WIDE_TILE = 32  # rows widened by one program


def multiply_widened(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    """Widen a slice of rows, multiply, go on: the workspace is that of one slice."""
    outputs, parts = out.shape[1], 2 if beside.swiglu else 1
    step = max(WIDE_TILE, WIDE_BYTES // (parts * weights.columns * x.element_size()) // WIDE_TILE * WIDE_TILE)
    slices = -(-outputs // step)
    step = -(-outputs // (slices * WIDE_TILE)) * WIDE_TILE  # of equal size
    wide = torch.empty(parts * step, weights.columns, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        _widen(weights, first, wide[: parts * count], count, outputs - count)
        bias = beside.bias
        shift = None if bias is None else bias.view(parts, -1)[:, first : first + count].flatten().to(x.dtype)
        if beside.swiglu:
            swiglu_into(linear(x, wide[: 2 * count], shift), out, first)
        elif out.dtype != x.dtype:  # which the library does not write
            out[:, first : first + count] = linear(x, wide[:count], shift)
        elif shift is None:
            torch.mm(x, wide[:count].T, out=out[:, first : first + count])
        else:
            torch.addmm(shift, x, wide[:count].T, out=out[:, first : first + count])
    if beside.residual is not None:
        out += beside.residual


def _widen(weights: Weights, first: int, out: torch.Tensor, half: int, beyond: int) -> None:
    """Rows `first …` to `out`; from its row `half` on those that stand `beyond` further on."""
    if weights.format == "ggml":
        for rows, start in ((out[:half], first), (out[half:], first + half + beyond)):
            ggml.widen(weights, start, rows)
        return
    if weights.upper is not None:
        widen_planes[(-(-out.shape[0] // WIDE_TILE), weights.columns // weights.group)](
            *planes_of(weights), out, len(out), first, half, beyond,
            K=weights.columns, BITS=FEW_BITS[weights.format], GROUP=weights.group, BN=WIDE_TILE, num_warps=4,
        )  # fmt: skip
        return
    widen[(out.shape[0] // WIDE_TILE, weights.columns // weights.group)](
        *operands(weights), out, first, half, beyond, K=weights.columns, FORMAT=KINDS[weights.format],
        GROUP=weights.group, BN=WIDE_TILE, NATIVE=native_fp8(out.device), num_warps=4,
    )  # fmt: skip

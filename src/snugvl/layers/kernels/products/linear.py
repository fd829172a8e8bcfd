"""Products with stored weights: which kernel, in which tiles."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from snugvl.core.formats import FORMATS
from snugvl.layers.device import shared
from snugvl.layers.kernels.compiler.launch import pdl
from snugvl.layers.kernels.device import (
    NATIVE_FP8,
    TENSOR_CORES,
    capability,
    hardware_of,
    native_fp8,
    tensor_cores,
)
from snugvl.layers.kernels.products import ggml
from snugvl.layers.kernels.products.dequantize import WIDE_TILE, multiply_dequantized
from snugvl.layers.kernels.products.epilogue import Epilogue
from snugvl.layers.kernels.products.gemm import gemm, sixteenth
from snugvl.layers.kernels.products.gemv import gemv
from snugvl.layers.kernels.products.lone_bf16 import lone_bf16
from snugvl.layers.kernels.products.lone_byte import TAIL_ROWS, lone_byte
from snugvl.layers.kernels.products.lone_codes import lone_codes
from snugvl.layers.kernels.products.lone_planes import lone_planes
from snugvl.layers.kernels.products.planes import skinny_planes
from snugvl.layers.kernels.products.skinny import skinny
from snugvl.layers.kernels.products.tiles import (
    SMALL,
    Fragments,
    bf16_tile,
    byte_tile,
    codes_tile,
    matrix_tile,
    planes_tile,
    skinny_tile,
    vector_tile,
    widest_codes,
)
from snugvl.layers.kernels.products.weights import STORED_AS, operands, planes_of
from snugvl.layers.kernels.rows import normed
from snugvl.layers.linear import FEW_ROWS
from snugvl.layers.replaced import usable
from snugvl.layers.weights import GROUP, FormatName, Weights

_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_NEIGHBOURS = {form: 128 // FORMATS[form].bits for form in STORED_AS}  # weights of 16 bytes
_GROUPS = (32, 64, 128)  # of columns that the skinny kernel takes
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# How the compiler lays out operands and loads. With other values results are the same, much slower.
_PAIR = 4 if _TRITON < (3, 8) else 2
_BF16_PAIR = 2
_PLANES_PAIR = {2: 2, 1: 4}  # by bits of the upper plane
_FLIP = _TRITON >= (3, 7)
SKINNY_ROWS = FEW_ROWS  # of input up to which the skinny kernel is used
PLANES_ROWS = 32  # the same with weights of 5 and 6 bits; more are multiplied by the library
SKINNY_BYTES = 24 << 20  # of weights from which it is used for one row, too
NORM_APART = False  # its input is normalised by a kernel of its own
LONE = frozenset(FORMATS)  # formats of which one row of input has a kernel of its own
LONE_OUTPUTS = 64  # of a product from which it is used: no tile has more
VECTOR_ROWS = 1  # of input up to which the vector kernel is used
WIDE_TOKENS = 192  # of input from which weights are dequantized first
WIDE_TOKENS_LOOPS = SMALL + 1  # the same without tensor cores in Triton: the library has them on Turing
_TILES = 8192  # arrival counters: more tiles than any split product has


def product(
    x: torch.Tensor,
    weights: Weights,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """`x` `[M, columns]` times `weights`, transposed: `[M, rows]`, or `[M, rows / 2]` with `swiglu`.

    None where all kernels that could are withdrawn (`layers/replaced.py`).

    Args:
        bias: added in float32, before anything is rounded.
        norm: RMSNorm weight applied to `x` first, with `offset`; of one row by the kernel that multiplies.
        residual: added to the result, in its shape.
        swiglu: the first half of the rows is the gate, the second what it multiplies.
        dtype: of the result; that of `x` by default.
    """
    beside = Epilogue(bias, norm, eps, offset, residual, swiglu)
    outputs = beside.outputs(weights.rows)
    out = torch.empty(x.shape[0], outputs, dtype=dtype or x.dtype, device=x.device)
    if not x.shape[0]:  # a step in which no sequence samples: there is nothing to read
        return out
    if weights.format == "ggml" and ggml.fits(x, weights, swiglu=swiglu):
        ggml.few(x, weights, beside, out)
        return out
    if _fits_lone(x, weights, outputs, norm):
        _lone(x, weights, beside, out)
        return out
    if weights.upper is not None:
        return out if _planes(x, weights, beside, out) else None
    if x.shape[0] <= SKINNY_ROWS and weights.format in _NEIGHBOURS and _fits_skinny(x, weights):
        if norm is not None and (NORM_APART or x.shape[0] > 1):
            x, beside = normed(x, norm, eps, offset), beside._replace(norm=None)
        _skinny(x, weights, beside, out)
        return out
    if x.shape[0] <= VECTOR_ROWS and weights.format != "ggml" and usable("gemv"):
        _vector(x, weights, beside, out)
        return out
    if norm is not None:
        x, beside = normed(x, norm, eps, offset), beside._replace(norm=None)
    most = WIDE_TOKENS if tensor_cores(x.device) else WIDE_TOKENS_LOOPS
    dequantizes = weights.format != "bf16" and outputs % WIDE_TILE == 0 and usable("dequantize", "gated")
    if weights.format == "ggml":
        dequantizes = usable("dequantize_rows", "gated")
    multiplies = weights.format != "ggml" and usable("gemm", "sixteenth")
    if dequantizes and (x.shape[0] >= most or not multiplies):
        multiply_dequantized(x, weights, beside, out)
    elif multiplies:
        _matrix(x, weights, beside, out)
    else:
        return None
    return out


def product_with_tail(
    x: torch.Tensor,
    weights: Weights,
    tail: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One row `x` `[1, columns]` times `weights` and times `tail` `[n, columns]`, in one launch.

    None where no kernel has room for both: that is two of `product`.
    """
    rows, columns = tail.shape
    if rows % TAIL_ROWS or columns % 128 or tail.dtype != x.dtype or weights.data.dtype == x.dtype:
        return None
    if not _fits_lone(x, weights, weights.rows, norm):
        return None
    out, last = (torch.empty(1, count, dtype=x.dtype, device=x.device) for count in (weights.rows, rows))
    _lone(x, weights, Epilogue(norm=norm, eps=eps, offset=offset), out, (tail, last))
    return out, last


def _fits_skinny(x: torch.Tensor, weights: Weights) -> bool:
    """bf16 from Ampere on (in the interpreter anything); of one row, what takes long enough to read."""
    if x.shape[0] == 1 and SKINNY_BYTES and (weights.format == "bf16" or weights.data.nbytes < SKINNY_BYTES):
        return False
    return weights.group in _GROUPS and (_unpacks(x) or not x.is_cuda) and usable("skinny")


def _fits_lone(x: torch.Tensor, weights: Weights, outputs: int, norm: torch.Tensor | None) -> bool:
    """One row of bf16 from Ampere on (in the interpreter anything), where it is the fastest."""
    if x.shape[0] > 1 or weights.format not in LONE or weights.group % 64 or outputs < LONE_OUTPUTS:
        return False
    if weights.format == "bf16":
        fast = weights.data.dtype == x.dtype and weights.columns % 8 == 0 and usable("lone_bf16")
    elif weights.upper is not None:
        fast = weights.group <= GROUP and usable("lone_planes")
    elif FORMATS[weights.format].zero:
        fast = weights.group <= GROUP and weights.columns <= widest_codes(weights) and usable("lone_codes")
    else:
        fast = usable("lone_byte")
    return fast and _aligned(weights.data, weights.upper, x, norm) and (_unpacks(x) or not x.is_cuda)


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """At other addresses threads would not get what `fragments.py` says that each has."""
    return not any(tensor.data_ptr() % 16 for tensor in tensors if tensor is not None)


def _lone(
    x: torch.Tensor,
    weights: Weights,
    beside: Epilogue,
    out: torch.Tensor,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`tail`: weights in the type of `x`, and where what they give goes."""
    if weights.format == "bf16":
        assert tail is None, "its kernel has none"
        _lone_bf16(x, weights, beside, out)
        return
    outputs = out.shape[1]
    wide, last = tail or (x, x)
    more = 0 if tail is None else len(wide)
    norm, bias, residual = beside.tensors(x)
    data, scale, zero = _words(weights)
    behind = (bias, residual, out, wide, last, outputs, beside.eps)
    form, units = FORMATS[weights.format], hardware_of(x.device).units
    tile_of = planes_tile if form.upper else codes_tile if form.zero else byte_tile
    tile = tile_of(outputs, weights, units, swiglu=beside.swiglu)
    programs, constants = _by_fragments(x, weights, beside, tile, outputs)
    constants |= {"WIDE": triton.next_power_of_2(weights.columns), "TAIL": more, "EACH_TAIL": TAIL_ROWS}
    grid = (programs + more // TAIL_ROWS,)
    if form.upper:
        constants |= {"BITS": form.bits, "UNIT": weights.group}
        lone_planes[grid](x, norm, data, weights.upper, scale, zero, *behind, **constants)
        return
    if form.zero:
        lone_codes[grid](x, norm, data, scale, zero, *behind, **constants, UNIT=weights.group)
        return
    blocks = 0 if len(scale) == weights.rows else 2 if outputs % beside.outputs(tile.rows) else 1
    lone_byte[grid](
        x, norm, data, scale, *behind, **constants, FORMAT=STORED_AS[weights.format], GROUP=weights.group,
        BLOCKS=blocks,
    )  # fmt: skip


def _lone_bf16(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    outputs = out.shape[1]
    tile = bf16_tile(outputs, weights, swiglu=beside.swiglu)
    programs, constants = _by_fragments(x, weights, beside, tile, outputs)
    norm, bias, residual = beside.tensors(x)
    data = weights.data.view(torch.int32) if constants["ASSEMBLY"] else weights.data
    lone_bf16[(programs,)](x, norm, data, bias, residual, out, outputs, beside.eps, **constants)


def _by_fragments(
    x: torch.Tensor, weights: Weights, beside: Epilogue, tile: Fragments, outputs: int
) -> tuple[int, dict[str, Any]]:
    """Programs, and what kernels of `fragments.py` are compiled for."""
    tiles = -(-outputs // beside.outputs(tile.rows))
    programs = min(tiles, tile.rounds * hardware_of(x.device).units or tiles)
    every = _constants(x, weights, beside, words=True)
    kept = ("K", "HAS_NORM", "OFFSET", "HAS_BIAS", "HAS_RESIDUAL", "SWIGLU", "ASSEMBLY", "FLIP")
    return programs, {name: every[name] for name in kept} | {
        "R": tile.rows, "W": tile.warps, "ROUNDS": programs < tiles, "SOON": tile.soon,
        "num_warps": tile.warps, **pdl(x.device),
    }  # fmt: skip


def _skinny(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    tokens, outputs = out.shape
    rows, warps, batch, soon = skinny_tile(tokens, outputs, weights, swiglu=beside.swiglu)
    norm, bias, residual = beside.tensors(x)
    skinny[(-(-outputs // beside.outputs(rows)),)](
        x, norm, *_words(weights), bias, residual, out, tokens, outputs, beside.eps,
        **_constants(x, weights, beside, words=True), BM=max(8, triton.next_power_of_2(tokens)), BN=rows,
        BATCH=batch, EACH=min(_NEIGHBOURS[weights.format], weights.group // 4),
        num_warps=warps, **(pdl(x.device) if soon else {"PDL": False}),
    )  # fmt: skip


def _planes(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> bool:
    """5 and 6 bits: few rows, that the matrix unit takes, by a kernel of their own, others by dequantizing.

    False where those that could are withdrawn.
    """
    tokens, outputs = out.shape
    wide = tokens > PLANES_ROWS or (x.is_cuda and not _unpacks(x)) or not usable("skinny_planes")
    if wide and not usable("dequantize_planes", "gated"):
        return False
    if beside.norm is not None and (wide or tokens > 1):
        x, beside = normed(x, beside.norm, beside.eps, beside.offset), beside._replace(norm=None)
    if wide:
        multiply_dequantized(x, weights, beside, out)
        return True
    norm, bias, residual = beside.tensors(x)
    stored = planes_of(weights)
    rows, warps, batch, soon = skinny_tile(tokens, outputs, weights, swiglu=beside.swiglu)
    skinny_planes[(-(-outputs // beside.outputs(rows)),)](
        x, norm, *stored, bias, residual, out, tokens, outputs, beside.eps,
        **_plane_constants(x, weights, beside), BM=max(8, triton.next_power_of_2(tokens)), BN=rows,
        BATCH=batch, EACH=min(32, weights.group // 4),
        num_warps=warps, **(pdl(x.device) if soon else {"PDL": False}),
    )  # fmt: skip
    return True


def _plane_constants(x: torch.Tensor, weights: Weights, beside: Epilogue) -> dict[str, Any]:
    """Constants of the kernels of two planes: some of `_constants`, and their bits."""
    every = _constants(x, weights, beside, words=True)
    kept = {name: value for name, value in every.items() if name not in ("FORMAT", "NATIVE")}
    form = FORMATS[weights.format]
    return kept | {"PAIR": _PLANES_PAIR[form.upper], "BITS": form.bits}


def _vector(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    rows, groups, warps = vector_tile(weights, out.shape[1])
    norm, bias, residual = beside.tensors(x)
    gemv[(-(-out.shape[1] // rows),)](
        x, norm, *operands(weights), bias, residual, out, out.shape[1], beside.eps,
        **_constants(x, weights, beside), BN=rows, BG=groups, num_warps=warps,
        **pdl(x.device),
    )  # fmt: skip


def _matrix(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    tokens, outputs = out.shape
    units, swiglu = hardware_of(x.device).units, beside.swiglu
    loops = not tensor_cores(x.device)
    bm, bn, split, warps, stages = matrix_tile(tokens, outputs, weights, units, swiglu=swiglu, loops=loops)
    kind = _KINDS[x.dtype]
    if tokens > SMALL and weights.format != "bf16" and x.dtype == torch.bfloat16:
        wide, x = x, torch.empty(x.shape, dtype=torch.float16, device=x.device)
        sixteenth[(-(-x.numel() // 2048),)](wide, x, x.numel(), STEP=2048)
    tiles = -(-tokens // bm) * -(-outputs // bn)
    parts, arrivals = x, x
    if split > 1:
        assert tiles <= _TILES, "more tiles than arrival counters"
        parts = torch.empty(split * tiles * bn * bm * (1 + swiglu), dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    _, bias, residual = beside.tensors(x)
    gemm[(tiles, split)](
        x, *operands(weights), bias, residual, out, parts, arrivals, tokens, outputs,
        K=weights.columns, FORMAT=STORED_AS[weights.format], GROUP=weights.group,
        BM=bm, BN=bn, SPLIT=split, BAND=8,
        HAS_BIAS=beside.bias is not None, HAS_RESIDUAL=beside.residual is not None, SWIGLU=swiglu,
        NATIVE=native_fp8(x.device), KIND=kind, num_warps=warps,
        num_stages=stages if x.element_size() == 2 else 1,  # float32 tiles would not fit into shared memory
    )  # fmt: skip


def _words(weights: Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and zero points for a launch, with codes as int32 words."""
    data, scale, zero = operands(weights)
    return (data if weights.format == "bf16" else data.view(torch.int32)), scale, zero


def _constants(x: torch.Tensor, weights: Weights, beside: Epilogue, *, words: bool = False) -> dict[str, Any]:
    """The constants that a kernel for few rows is compiled with, without its tiles. `words`: it loads weights
    as words."""
    bias, norm, _, offset, residual, swiglu = beside
    has = (norm is not None, offset, bias is not None, residual is not None, swiglu)
    stored = (weights.format, weights.columns, weights.group)
    return _constants_of(stored, has, capability(x.device), x.dtype if words else None)


@cache  # for each product anew they would take a tenth of a launch
def _constants_of(
    stored: tuple[FormatName, int, int],
    has: tuple[bool, float, bool, bool, bool],
    card: tuple[int, int],
    operands: torch.dtype | None,
) -> dict[str, Any]:
    (form, columns, group), (norm, offset, bias, residual, swiglu) = stored, has
    constants = {"K": columns, "WIDE": triton.next_power_of_2(columns), "FORMAT": STORED_AS.get(form)}
    constants |= {
        "GROUP": group,
        "HAS_NORM": norm,
        "OFFSET": offset,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": residual,
    }
    constants |= {"SWIGLU": swiglu, "NATIVE": card >= NATIVE_FP8}
    if operands is not None:
        assembly = operands == torch.bfloat16 and card >= TENSOR_CORES
        constants |= {"ASSEMBLY": assembly, "PAIR": _BF16_PAIR if form == "bf16" else _PAIR, "FLIP": _FLIP}
    return constants


def _unpacks(x: torch.Tensor) -> bool:
    """Whether weights are unpacked by assembly: bf16 from Ampere on."""
    return x.dtype == torch.bfloat16 and capability(x.device) >= TENSOR_CORES


@shared
def _arrivals(device: torch.device) -> torch.Tensor:
    return torch.zeros(_TILES, dtype=torch.int32, device=device)

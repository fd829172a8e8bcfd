"""bf16 times one row of input: fragments of the matrix unit as they are loaded (`fragments.py`).

Eight units of 32 columns are a slice; a thread's share of a unit is 16 bytes of each row, which are operands
as they stand, and of the input the same columns. Nothing is unpacked or scaled, so the instruction goes on
with the sums of the slices before.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.fragments import (
    PAIRS,
    beside,
    finish,
    four,
    gains_of,
    in_fours,
    inputs_of,
    loaded,
    mma,
    own_of,
    summed,
    takes,
)

EACH = tl.constexpr(8)  # columns of a unit that are a thread's


def _product() -> Iterator[str]:
    """`$4 … $7`, `$8 … $11`: two rows; `$12 … $15`: the input; `$16 … $19`: the sums so far."""
    for step in range(2):
        rows = ", ".join(f"${register + 2 * step}" for register in (4, 8, 5, 9))
        before = "$0, $1, $2, $3" if step else "$16, $17, $18, $19"
        yield mma(rows, (12 + 2 * step, 13 + 2 * step), before)


_PRODUCT = tl.constexpr("\n".join(_product()))
_TAKES = takes(12, 4)


@triton.jit
def _operand(v, T: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A thread's values `[T, 1, 8]`, two a register: four `[T, 1]`."""
    if not ASSEMBLY:
        return v, v, v, v
    even, odd = tl.split(tl.reshape(v, [T, 4, 2]))
    both = tl.inline_asm_elementwise(PAIRS, "=&r,=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=2)
    return four(tl.reshape(both, [T, 1, 4]), T, 1)


@triton.jit
def _rows(
    w, first, N, thread, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, SWIGLU: tl.constexpr,
    ASSEMBLY: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """A thread's share of each slice of `R` rows: words `[T, R, 4]`, or values `[T, R, 8]`."""
    slices: tl.constexpr = (K + 32 * W * EACH - 1) // (32 * W * EACH)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)[None, :]
    row = r % outputs + r // outputs * N
    wide: tl.constexpr = EACH // 2 if ASSEMBLY else EACH  # elements of `w`
    line: tl.constexpr = K // 2 if ASSEMBLY else K
    w += first.to(tl.int64) * line
    found = ()
    for s in tl.static_range(slices):
        place = s * (32 * W) + thread
        at = row[:, :, None].to(tl.int64) * line + (place * wide)[:, None, None]
        at += tl.arange(0, wide)[None, None, :]
        found = found + (loaded(w, at, place * EACH < K, (s + 1) * 32 * W * EACH > K, "evict_first", FLIP),)
    return found


@triton.jit
def _times(
    stored, inputs, odd, SLICES: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """`[T, R]`; right where a thread's unit is among those that it is given."""
    threads: tl.constexpr = 32 * W
    if not ASSEMBLY:
        total = tl.zeros([threads, R], tl.float32)
        for s in tl.static_range(SLICES):
            total += tl.sum(stored[s].to(tl.float32) * inputs[s][0].to(tl.float32), 2)
        return in_fours(total, threads, R)
    a = tl.zeros([threads, R // 2], tl.float32)
    b, c, d = a, a, a
    for s in tl.static_range(SLICES):
        one, two = tl.split(tl.permute(tl.reshape(stored[s], [threads, R // 2, 2, 4]), [0, 1, 3, 2]))
        given = four(one, threads, R // 2) + four(two, threads, R // 2) + inputs[s] + (a, b, c, d)
        a, b, c, d = tl.inline_asm_elementwise(
            _PRODUCT, _TAKES, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    return own_of(a, b, c, d, odd, threads, R // 2)


@launched
@triton.jit
def lone_bf16(
    x, norm, w, bias, residual, out, N, eps, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, ASSEMBLY: tl.constexpr, FLIP: tl.constexpr,
    SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: with ASSEMBLY as int32, two weights each. 16 divides its address and those of `x` and `norm`, and 8
            divides K.
        R, ROUNDS, FLIP, SOON, PDL: as `lone_codes` has them.
    """
    slices: tl.constexpr = (K + 32 * W * EACH - 1) // (32 * W * EACH)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    kind: tl.constexpr = x.dtype.element_ty
    threads: tl.constexpr = 32 * W
    thread = tl.arange(0, threads)
    odd = (thread // 4 % 2 == 1)[:, None]
    begin = tl.program_id(0) * outputs
    first = tl.minimum(begin, N - outputs)
    stored = _rows(w, first, N, thread, K, R, W, SWIGLU, ASSEMBLY, FLIP)
    gains = gains_of(norm, thread, K, 4 * EACH, W, HAS_NORM, FLIP)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    values = inputs_of(x, gains, thread, eps, K, 4 * EACH, W, HAS_NORM, OFFSET, FLIP)
    inputs = ()
    for s in tl.static_range(slices):
        inputs = inputs + (_operand(values[s], threads, ASSEMBLY),)
    if PDL and not SOON:
        gdc_launch_dependents()
    if ROUNDS:
        step = tl.num_programs(0) * outputs
        for at in tl.range(begin, N, step, num_stages=1):
            following = tl.minimum(tl.where(at + step < N, at + step, at), N - outputs)
            next_stored = _rows(w, following, N, thread, K, R, W, SWIGLU, ASSEMBLY, FLIP)
            first = tl.minimum(at, N - outputs)
            shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
            y = summed(_times(stored, inputs, odd, slices, R, W, ASSEMBLY), thread, threads, R, ASSEMBLY)
            finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
            stored = next_stored
    else:
        shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
        y = summed(_times(stored, inputs, odd, slices, R, W, ASSEMBLY), thread, threads, R, ASSEMBLY)
        finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)

"""One row of input on the matrix unit, fragments said thread by thread: for the kernels `lone_…`.

The matrix unit has room for 16 rows of weights and 8 of the input, and there is one. So columns take the
room: eight units of them stand as eight rows of the weights, the same eight units of the input as its 8
columns, and of the product of each with each the diagonal is what is wanted, the eight parts of an output.
The compiler is left no layout to choose, and so nothing to move in a loop: the first axis of every tensor is
the program's threads, and the instruction is assembly. Lane 4 a + b of a warp

    loads         of each row its share of unit a: a warp's load is neighbouring bytes of one row
    multiplies    two rows with unit a of the input, which it normalised before the first of them
    is given      the product of unit a with units 2 b and 2 b + 1; with itself where b is a / 2

    a program     R rows; its W warps have a slice of eight units each in turns, and their sums are added up
    in rounds     it goes on to other rows with the same input; the next ones' loads are under way meanwhile

Before any input is there all loads of the first rows are under way, as weights are never written. So a kernel
that is started SOON, before the one before it has begun to end, costs less than the time between two.

Without such assembly (interpreted, float32) plain operations compute the same.

The instruction's layout: PTX ISA, "Matrix fragments for mma.m16n8k16".
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.products.epilogue import add_residual, normalised, swiglu

_OTHER = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
# Of two registers with two values each the first of both, and the second.
PAIRS = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def mma(rows: str, inputs: tuple[int, int], before: str) -> str:
    """The instruction: registers of two rows, of the input by number, and of the sums so far."""
    return (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
        f"{{{rows}}}, {{${inputs[0]}, ${inputs[1]}}}, {{{before}}};"
    )


def takes(integers: int, floats: int = 0) -> tl.constexpr:
    """Constraints of the assembly: four sums come out, and all else goes in."""
    return tl.constexpr(",".join(["=&f"] * 4 + ["r"] * integers + ["f"] * floats))


@triton.jit
def four(v, T: tl.constexpr, R: tl.constexpr):
    """`[T, R, 4]` as four `[T, R]`."""
    even, odd = tl.split(tl.reshape(v, [T, R, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def own_of(a, b, c, d, odd, T: tl.constexpr, HALF: tl.constexpr):
    """Products of rows with unit a, where it is among them: pairs `[T, HALF]` as `[T, 2 HALF]`."""
    both = tl.join(tl.where(odd, b, a), tl.where(odd, d, c))
    return tl.reshape(both, [T, 2 * HALF])


@triton.jit
def loaded(start, at, here, MASKED: tl.constexpr, EVICTION: tl.constexpr, FLIP: tl.constexpr):
    """`start[at]` `[T, n, side by side]`: threads go along the first axis, and FLIPped along the second."""
    if FLIP:
        at = tl.permute(at, [1, 0, 2])
        here = here[None, :, None]
    else:
        here = here[:, None, None]
    if MASKED:
        v = tl.load(start + at, mask=tl.broadcast_to(here, at.shape), other=0, eviction_policy=EVICTION)
    else:
        v = tl.load(start + at, eviction_policy=EVICTION)
    if FLIP:
        v = tl.permute(v, [1, 0, 2])
    return v


@triton.jit
def beside_words(start, at, here, MASKED: tl.constexpr, FLIP: tl.constexpr):
    """`start[at]` `[T, n]`, scales or zero points of `loaded` words, by the same threads."""
    return tl.reshape(loaded(start, at[:, :, None], here, MASKED, "", FLIP), at.shape)


@triton.jit
def columns(
    start, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr
):
    """A thread's values of the input or of the norm's weight in a warp's slice, `[T, UNIT / 32, 8]`."""
    first = (s * (32 * W) + thread) * (UNIT // 4)
    at = first[:, None, None] + tl.arange(0, UNIT // 32)[None, :, None] * 8
    masked: tl.constexpr = (s + 1) * 8 * W * UNIT > K
    return loaded(start, at + tl.arange(0, 8)[None, None, :], first < K, masked, "", FLIP)


@triton.jit
def gains_of(
    norm, thread, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, HAS_NORM: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """A thread's weights of the norm, slice by slice, if there is one; they are never written."""
    gains = ()
    for s in tl.static_range((K + 8 * W * UNIT - 1) // (8 * W * UNIT) if HAS_NORM else 0):
        gains = gains + (columns(norm, thread, s, K, UNIT, W, FLIP),)
    return gains


@triton.jit
def inputs_of(
    x, gains, thread, eps, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """A thread's values of the input, slice by slice, normalised."""
    slices: tl.constexpr = (K + 8 * W * UNIT - 1) // (8 * W * UNIT)
    values = ()
    square = tl.zeros([32 * W, UNIT // 32, 8], tl.float32)
    for s in tl.static_range(slices):
        values = values + (columns(x, thread, s, K, UNIT, W, FLIP),)
        if HAS_NORM:
            wide = values[s].to(tl.float32)
            square += wide * wide
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(tl.reshape(square, [8 * W * UNIT]), 0) / K + eps)
        every = ()
        for s in tl.static_range(slices):
            every = every + (normalised(values[s], gains[s], rstd, OFFSET),)
        values = every
    return values


@triton.jit
def halved(v, thread, STEP: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """`[T, R]` as `[T, R / 2]`: of two lanes STEP apart one has the first half's sums, one the second's."""
    first, second = tl.split(tl.permute(tl.reshape(v, [T, 2, R // 2]), [0, 2, 1]))
    later = (thread // STEP % 2 == 1)[:, None]
    return tl.where(later, second, first) + other(tl.where(later, first, second), STEP)


@triton.jit
def other(v, STEP: tl.constexpr):
    """The value of the lane STEP away."""
    return tl.inline_asm_elementwise(_OTHER, "=f,f,r", [v, STEP], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def in_fours(v, T: tl.constexpr, R: tl.constexpr):
    """Sums of four threads' `[T, R]`, for each of them."""
    total = tl.sum(tl.reshape(v, [T // 4, 4, R]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [T // 4, 4, R]), [T, R])


@triton.jit
def summed(v, thread, T: tl.constexpr, R: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Sums of all threads' own products, `[T, R]` as `[R]`.

    A lane gives half of its rows away while it has several; so its lowest bit is the highest of its row.
    """
    v = tl.where((thread % 4 == thread // 8 % 4)[:, None], v, 0.0)
    if not ASSEMBLY:
        y = tl.sum(v, 0)
    elif R == 2:
        v = halved(v, thread, 1, T, 2)
        for bit in tl.static_range(1, 5):
            v += other(v, 1 << bit)
        y = tl.sum(tl.reshape(v, [T // 2, 2]), 0) * 0.0625
    elif R == 4:
        v = halved(halved(v, thread, 1, T, 4), thread, 2, T, 2)
        for bit in tl.static_range(2, 5):
            v += other(v, 1 << bit)
        turned = tl.permute(tl.reshape(v, [T // 4, 2, 2]), [0, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 4, 4]), 0) * 0.125
    elif R == 8:
        v = halved(halved(halved(v, thread, 1, T, 8), thread, 2, T, 4), thread, 4, T, 2)
        for bit in tl.static_range(3, 5):
            v += other(v, 1 << bit)
        turned = tl.permute(tl.reshape(v, [T // 8, 2, 2, 2]), [0, 3, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 8, 8]), 0) * 0.25
    else:
        v = halved(halved(v, thread, 1, T, 16), thread, 2, T, 8)
        v = halved(halved(v, thread, 4, T, 4), thread, 8, T, 2)
        v += other(v, 16)
        turned = tl.permute(tl.reshape(v, [T // 16, 2, 2, 2, 2]), [0, 4, 3, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 16, 16]), 0) * 0.5
    return y


@triton.jit
def beside(
    bias, residual, first, N, R: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """Terms added to the rows' products `[R]`, and to the outputs from `first` on; asked for early."""
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)
    shift = tl.load(bias + first + r % outputs + r // outputs * N).to(tl.float32) if HAS_BIAS else 0.0
    added = tl.load(residual + first + tl.arange(0, outputs)) if HAS_RESIDUAL else 0.0
    return shift, added


@triton.jit
def finish(
    y, shift, added, out, first, kind: tl.constexpr, R: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Write what comes after the product `y` `[R]` to `out` from `first` on."""
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    if HAS_BIAS:
        y += shift
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, R // 2]), [1, 0]))
        y = swiglu(gate, up, kind)
    if HAS_RESIDUAL:
        y = add_residual(y, added, kind)
    tl.store(out + first + tl.arange(0, outputs), y.to(out.dtype.element_ty))

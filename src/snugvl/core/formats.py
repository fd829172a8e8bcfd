"""Formats of weights, one row each: everything about a format but its kernels.

"int4" alone would be four things, so two words are kept apart:

    Precision   what people wish for and plans report: how exact weights are, on any engine
    Format      what our own engine holds for it: bits, planes, columns that share a scale, zero points

Other engines make other bytes of the same precision: bitsandbytes' are in `BITSANDBYTES`. AWQ, GPTQ and
compressed-tensors checkpoints have the precisions in `PREQUANTIZED`, and become our format of that name when
loaded (`checkpoint/quantized.py` says how they are stored). `layers/weights.py` has each row in torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

FewBits = Literal["int4", "int5", "int6"]
IntegerPrecision = Literal[FewBits, "int8"]
StoredPrecision = Literal[IntegerPrecision, "fp8"]
Precision = Literal[StoredPrecision, "bf16", "fp32"]
Floor = Literal["any", StoredPrecision, "bf16"]
"""Coarsest precision that is acceptable, coarsest first."""
WeightsName = Literal["auto", "bf16", "fp8", "int8", "int6", "int5", "int4"]
"""Precisions that can be asked for, finest first."""

SCALE_BITS: Final = 16  # of a scale, and of a zero point


@dataclass(frozen=True, slots=True)
class Format:
    """How our engine holds a matrix of one precision.

    Attributes:
        planes: bits of a code, lowest first, in each tensor that holds a part of it. Codes with zero points
            are packed, eight neighbours a word. bf16's one plane is its 16 bits: no codes, no scale.
        group: columns of a row that share a scale, unless others are asked for.
        zero: whether a group also has a zero point: the code that means 0, not a whole number.
        since: compute capability of the oldest GPUs whose kernels read it; (0, 0): of all that our engine
            runs on; None: there are no kernels, and it is for CPUs alone.
        instructions: instructions of a GPU thread that a weight costs in a decode step, fitted to measured
            steps of our engine (`tests/planner/planned_speed.py --fit`).
        measured: KL to float32 in nats a token, by model. Where nothing was measured, the format is for
            those who ask for it: no plan takes it by itself.
        differ: the same in words: how answers differ from those of the original weights.
        written: what `snugvl quantize --with` makes of it instead: mean bits; KL of answers that calibrated
            nothing, of what is rounded while loading, and of that (docs/quantize.md).
    """

    planes: tuple[int, ...]
    group: int = 128
    zero: bool = False
    since: tuple[int, int] | None = (0, 0)
    instructions: float = 0.0
    measured: Mapping[str, float] = field(default_factory=dict)
    differ: str = ""
    written: tuple[float, float, float] | None = None

    @property
    def bits(self) -> int:
        """Number of bits of a code, all planes together."""
        return sum(self.planes)

    @property
    def offered(self) -> bool:
        """Whether a plan may choose it without a wish: its cost was measured, or it is 16-bit."""
        return bool(self.measured) or self.bits >= 16

    @property
    def upper(self) -> int:
        """Number of bits of a code beyond the first plane; 0 where there is one plane."""
        return sum(self.planes[1:])

    def held_bits(self, group: int) -> float:
        """Bits a weight, with its share of the scale and the zero point of `group` columns."""
        return self.bits + SCALE_BITS * (1 + self.zero) / group


# The finest first. docs/plan.md has the tables, of `training/format_cost.py` and
# `training/pocket/format_error.py`. SmolLM2's matrices don't divide into groups of 128: its int4 is in groups
# of 64, and what it loses in int8 and FP8 can't be said. With int4 it takes another likeliest word at about
# every fourth place, the release of 1.5B at every eleventh.
CODER, SMOLLM2 = "Qwen2.5-Coder-1.5B", "SmolLM2-135M"
FORMATS: Final[Mapping[str, Format]] = {
    "bf16": Format((16,)),
    "fp8": Format((8,), instructions=3.7, measured={"pocket": 0.00031, CODER: 0.00294}),
    "int8": Format((8,), instructions=4.3, measured={"pocket": 0.00008, CODER: 0.00056}),
    "int6": Format(
        (4, 2),
        group=64,
        zero=True,
        since=(8, 0),
        instructions=6.9,
        measured={"pocket": 0.00028, CODER: 0.00194, SMOLLM2: 0.011},
        differ="hardly differ",
    ),
    "int5": Format(
        (4, 1),
        group=64,
        zero=True,
        since=(8, 0),
        instructions=7.1,
        measured={"pocket": 0.00111, CODER: 0.00658, SMOLLM2: 0.0337},
        differ="differ little",
        written=(5.5, 0.0335, 0.0195),
    ),
    "int4": Format(
        (4,),
        zero=True,
        instructions=3.3,
        measured={"pocket": 0.00352, CODER: 0.0374, SMOLLM2: 0.141},
        differ="differ noticeably (small models more, large ones less)",
        written=(4.75, 0.131, 0.0509),
    ),
}
GROUPS: Final = (32, 64, 128)  # columns that may share a scale: the kernels' own
INTEGERS: Final[tuple[IntegerPrecision, ...]] = get_args(IntegerPrecision)
FEW_BITS: Final[tuple[FewBits, ...]] = get_args(FewBits)[::-1]
LOW_BIT: Final[tuple[StoredPrecision, ...]] = ("fp8", "int8", *FEW_BITS)
QUALITY: Final[Mapping[Floor | Precision, int]] = {
    "fp32": len(get_args(Floor)) - 1,
    **{name: rank for rank, name in enumerate(get_args(Floor))},
}
PREQUANTIZED: Final[Mapping[int, IntegerPrecision]] = {4: "int4", 8: "int8"}


@dataclass(frozen=True, slots=True)
class Bitsandbytes:
    """A format that bitsandbytes makes of a matrix.

    Attributes:
        name: bitsandbytes' name of the format.
        bits: bits of a value.
        block: number of values that share a float32 scale; None: a row shares one.
    """

    name: str
    bits: int
    block: int | None = None


BITSANDBYTES: Final[Mapping[str, Bitsandbytes]] = {
    "int8": Bitsandbytes("int8", 8),
    "int4": Bitsandbytes("nf4", 4, 64),
}


def integer_of(bits: int) -> IntegerPrecision:
    """The precision whose integers have `bits` bits, such as "int4"."""
    return next(name for name in INTEGERS if FORMATS[name].bits == bits)

"""The kernels' assembly, lane by lane as the PTX ISA has it: without a GPU nothing else runs it."""

import re
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from snugvl.layers.kernels.products import lone_bf16, lone_byte, lone_codes, lone_planes
from tests.layers.kernels.test_unpack import execute
from tests.layers.kernels.test_unpack import halves as bf16_halves
from tests.layers.kernels.test_unpack import run as registers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
LANES = 32


def packed(low: float, high: float) -> int:
    """Two numbers that bfloat16 has."""
    halves = [struct.unpack("<I", struct.pack("<f", value))[0] for value in (low, high)]
    assert not any(half & 0xFFFF for half in halves), "rounded"
    return halves[0] >> 16 | halves[1]


def half_floats(registers: list[int]) -> list[float]:
    """Two float16 of each register."""
    return [float(each) for each in np.array(registers, np.uint32).view(np.float16)]


def multiplied(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]], c: Floats, kind: str) -> Floats:
    """`mma.m16n8k16`: registers of every lane; PTX ISA, "Matrix fragments for mma.m16n8k16"."""
    halves = {"bf16": bf16_halves, "f16": half_floats}[kind]
    left, right, out = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane in range(LANES):
        row, column = lane // 4, 2 * (lane % 4)
        for register in range(4):
            down, across = 8 * (register % 2), 8 * (register // 2)
            left[row + down, column + across : column + across + 2] = halves([a[lane][register]])
        for register in range(2):
            out[row + 8 * register, column : column + 2] = c[lane, 2 * register : 2 * register + 2]
            right[column + 8 * register : column + 8 * register + 2, row] = halves([b[lane][register]])
    out += left @ right
    found = np.zeros((LANES, 4))
    for lane in range(LANES):
        row, column = lane // 4, 2 * (lane % 4)
        found[lane] = [*out[row, column : column + 2], *out[row + 8, column : column + 2]]
    return found


def run(assembly: str, inputs: list[list[int]], sums: Floats | None = None) -> Floats:
    """What every lane has in `$0 … $3`, given `$4 …`, and `sums` after them."""
    lanes: list[dict[str, int]] = [{f"${4 + i}": value for i, value in enumerate(given)} for given in inputs]
    results = np.zeros((LANES, 4))
    for line in filter(None, (line.strip() for line in assembly.splitlines())):
        if line[0] in "{}." or line.startswith("mov.f32 z"):
            continue
        if line.startswith("mma"):
            sets = [group.split(", ") for group in re.findall(r"\{([^}]*)\}", line)]
            assert sets[0] == ["$0", "$1", "$2", "$3"]
            if sets[3] == sets[0]:
                before = results
            elif sets[3] == ["z"] * 4:
                before = np.zeros((LANES, 4))
            else:
                given = 4 + len(inputs[0])
                assert sets[3] == [f"${given + i}" for i in range(4)]
                assert sums is not None
                before = sums
            a = [[lane[name] for name in sets[1]] for lane in lanes]
            b = [[lane[name] for name in sets[2]] for lane in lanes]
            results = multiplied(a, b, before, line.split(".")[-3])
            continue
        operation, rest = line.rstrip(";").split(" ", 1)
        target, *arguments = rest.split(", ")
        for lane in lanes:
            values = [lane[name] if name in lane else int(name, 0) for name in arguments]
            lane[target] = execute(operation, *values)
    return results


def multiplied_bytes(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]], c: Integers) -> Integers:
    """`mma.m16n8k32` of bytes: registers of every lane; PTX ISA, "Matrix fragments for mma.m16n8k32"."""
    left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for lane in range(LANES):
        row, column = lane // 4, 4 * (lane % 4)
        for register in range(4):
            down, across = 8 * (register % 2), column + 16 * (register // 2)
            codes = np.array([a[lane][register]], np.uint32).view(np.uint8)
            left[row + down, across : across + 4] = codes
        for register in range(2):
            across = column + 16 * register
            right[across : across + 4, row] = np.array([b[lane][register]], np.uint32).view(np.int8)
    out = left @ right
    found = c.copy()
    for lane in range(LANES):
        row, column = lane // 4, 2 * (lane % 4)
        found[lane] += [*out[row, column : column + 2], *out[row + 8, column : column + 2]]
    return found


def run_integers(assembly: str, inputs: list[list[int]]) -> Integers:
    """What every lane has in `$0 … $3`, given `$4 …`."""
    lanes: list[dict[str, int]] = [{f"${4 + i}": value for i, value in enumerate(given)} for given in inputs]
    results = np.zeros((LANES, 4), np.int64)
    for line in filter(None, (line.strip() for line in assembly.splitlines())):
        if line[0] in "{}.":
            continue
        if line.startswith("mma"):
            sets = [group.split(", ") for group in re.findall(r"\{([^}]*)\}", line)]
            assert sets[0] == ["$0", "$1", "$2", "$3"]
            assert sets[3] == sets[0] or sets[3] == ["z"] * 4
            first = np.array([[lane["z"]] * 4 for lane in lanes])
            a = [[lane[name] for name in sets[1]] for lane in lanes]
            b = [[lane[name] for name in sets[2]] for lane in lanes]
            results = multiplied_bytes(a, b, first if sets[3][0] == "z" else results)
            continue
        operation, rest = line.rstrip(";").split(" ", 1)
        target, *arguments = rest.split(", ")
        for lane in lanes:
            lane[target] = execute(operation, *(lane[x] if x in lane else int(x, 0) for x in arguments))
    return results


@pytest.mark.parametrize("words", [2, 4])
def test_sixteen_rows_of_int4_times_a_slice(words: int) -> None:
    """Upper and lower bytes of four units, each with the weights of one: the lanes of that unit have both."""
    random = np.random.default_rng(words)
    unit = 32 * words
    codes = random.integers(0, 16, (4, 16, unit))  # of each unit of a slice
    codes[:, :, :2] = 0, 15
    x = random.integers(-128, 128, (4, 2, unit))  # a unit's upper and lower bytes
    x[:, :, 0] = -128

    def packed_input(quarter: NDArray[np.int64]) -> list[int]:
        """Four bytes a register: those beside the even codes of a word, then the odd ones."""
        quarter = np.concatenate([[word[::2], word[1::2]] for word in quarter.reshape(-1, 8)])
        return [int(each) for each in quarter.astype(np.int8).reshape(-1, 4).view(np.uint32).flatten()]

    text = {2: lone_codes._PRODUCT_2, 4: lone_codes._PRODUCT_4}[words]
    for number in range(4):
        inputs = []
        for lane in range(LANES):
            a, mine = lane // 4, slice(unit // 4 * (lane % 4), unit // 4 * (lane % 4 + 1))
            stored = [
                sum(int(code) << 4 * place for place, code in enumerate(word))
                for row in (a, a + 8)
                for word in codes[number, row, mine].reshape(-1, 8)
            ]
            inputs.append(stored + packed_input(x[a // 2, a % 2, mine]))
        found = run_integers(text.value, inputs) - 0x4B400000
        for lane in filter(lambda lane: lane % 4 == number, range(LANES)):
            own = codes[number, [lane // 4, lane // 4 + 8]] @ x[number].T
            assert found[lane].tolist() == own.flatten().tolist()


def test_four_integers_of_an_input_become_four_upper_bytes_or_four_lower_ones() -> None:
    """1.5 · 2²³ was added to all, and half of an upper byte's step where those are wanted."""
    values = [-16384, -129, -1, 16320]
    for byte, more in ((0x51, 128), (0x40, 0)):
        floats = np.array(values, np.float32) + np.float32(0x00C00000 + more)
        (packed,) = registers(lone_codes._BYTES.value, 1, *floats.view(np.uint32).tolist(), byte)
        found = np.array([packed], np.uint32).view(np.int8).astype(int)
        upper = [(value + 128) // 256 for value in values]
        expected = upper if more else [value - 256 * high for value, high in zip(values, upper, strict=True)]
        assert found.tolist() == expected


def test_sums_stay_within_what_a_float_counts_by_one() -> None:
    """The largest codes and bytes of a unit, from 1.5 · 2²³ on, in both directions."""
    assert 15 * 2**7 * 128 < 2**22


@pytest.mark.parametrize("bits", [5, 6])
@pytest.mark.parametrize("words", [2, 4])
def test_two_rows_of_two_planes_times_eight_units(words: int, bits: int) -> None:
    random = np.random.default_rng(words)
    unit = 32 * words
    codes = random.integers(0, 2**bits, (2, 8, unit))
    x = random.integers(-8, 9, (8, unit)).astype(float)
    inputs, ones = [], []

    def plane(a: int, mine: slice, first: int, wide: int) -> list[int]:
        """`wide` bits of each code from `first` on, eight neighbours an element."""
        return [
            sum((int(code) >> first & 2**wide - 1) << wide * place for place, code in enumerate(word))
            for row in codes
            for word in row[a, mine].reshape(-1, 8)
        ]

    for lane in range(LANES):
        a, b = lane // 4, lane % 4
        mine = slice(8 * words * b, 8 * words * (b + 1))
        stored = plane(a, mine, 0, 4)
        # Elements of 16 bits have a sign.
        stored += [part | (0xFFFF0000 if part >> 15 else 0) for part in plane(a, mine, 4, bits - 4)]
        share = x[a, mine].reshape(-1, 8)
        pairs = [packed(word[place], word[place + 4]) for word in share for place in range(4)]
        inputs.append(stored + pairs)
        ones.append(pairs)
    products = {
        (2, 5): lone_planes._INT5_2, (4, 5): lone_planes._INT5_4, (2, 6): lone_planes._INT6_2,
        (4, 6): lone_planes._INT6_4,
    }  # fmt: skip
    total = {2: lone_planes._SUM_2, 4: lone_planes._SUM_4}[words]
    found, sums = run(products[words, bits].value, inputs), run(total.value, ones)
    for lane in range(LANES):
        a, b = lane // 4, lane % 4
        if b != a // 2:
            continue
        own = [found[lane, a % 2], found[lane, 2 + a % 2]]
        assert own == [float((codes[row, a] + 128) @ x[a]) for row in range(2)]
        assert sums[lane, a % 2] == x[a].sum()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_two_rows_of_bytes_times_eight_units(kind: str) -> None:
    """Every value that a byte can be, at every place of a word."""
    random = np.random.default_rng(1)
    rows = np.stack([random.permutation(512) % 256 for _ in range(2)]).reshape(2, 8, 64).astype(np.uint8)
    x = random.integers(-8, 9, (8, 64)).astype(np.float32)
    if kind == "fp8":
        rows[rows & 127 == 127] = 1  # NaN
        values = torch.from_numpy(rows).view(torch.float8_e4m3fn).double().numpy() * 2.0**-120
        product, both = lone_byte._FP8_PRODUCT, packed
    else:
        values = rows.view(np.int8).astype(float) + 1152
        product, both = lone_byte._INT8_PRODUCT, half_packed
    inputs, ones = [], []
    for lane in range(LANES):
        mine = slice(16 * (lane % 4), 16 * (lane % 4) + 16)
        words = rows[:, lane // 4, mine].reshape(-1).view(np.uint32).tolist()
        share = x[lane // 4, mine].reshape(4, 4)
        pairs = [both(word[place], word[place + 2]) for word in share for place in range(2)]
        inputs.append(words + pairs)
        ones.append(pairs)
    found = run(product.value, inputs)
    sums = run(lone_byte._INT8_SUM.value, ones) if kind == "int8" else None
    for lane in range(LANES):
        a, b = lane // 4, lane % 4
        if b == a // 2:
            own = [found[lane, a % 2], found[lane, 2 + a % 2]]
            assert own == [float(row[a] @ x[a].astype(float)) for row in values]
            assert sums is None or sums[lane, a % 2] == x[a].sum()


def half_packed(low: float, high: float) -> int:
    """Two numbers that float16 has."""
    return int(np.array([low, high], np.float16).view(np.uint32)[0])


def test_two_rows_of_bf16_on_top_of_other_sums() -> None:
    random = np.random.default_rng(3)
    rows, x = (random.integers(-8, 9, shape).astype(float) for shape in ((2, 8, 32), (8, 32)))
    inputs = []
    for lane in range(LANES):
        mine = slice(8 * (lane % 4), 8 * (lane % 4) + 8)
        shares = (rows[0, lane // 4, mine], rows[1, lane // 4, mine], x[lane // 4, mine])
        inputs.append([packed(*pair) for share in shares for pair in share.reshape(4, 2)])
    found = run(lone_bf16._PRODUCT.value, inputs, np.full((LANES, 4), 7.0))
    for lane in range(LANES):
        a, b = lane // 4, lane % 4
        if b == a // 2:
            own = [found[lane, a % 2], found[lane, 2 + a % 2]]
            assert own == [7 + float(row[a] @ x[a]) for row in rows]

"""The assembly that unpacks weights, instruction by instruction as the PTX ISA defines it.

Without a GPU nothing else runs it: Triton's interpreter takes the plain path.
"""

import re
import struct

import pytest
import torch

from snugvl.layers.kernels.products import unpack


def bf16(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def fma(a: int, b: int, c: int) -> int:
    """`fma.rn.bf16x2`, where nothing is rounded."""
    halves = []
    for shift in (0, 16):
        value = bf16(a >> shift & 0xFFFF) * bf16(b >> shift & 0xFFFF) + bf16(c >> shift & 0xFFFF)
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        assert not bits & 0xFFFF, "rounded"
        halves.append(bits >> 16)
    return halves[0] | halves[1] << 16


def prmt(a: int, b: int, selector: int) -> int:
    """Bytes that the selector's digits name; with 8 added, eight copies of their highest bit."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    pool += bytes(255 * (byte >> 7) for byte in pool)
    return int.from_bytes(bytes(pool[selector >> 4 * i & 15] for i in range(4)), "little")


def execute(operation: str, *a: int) -> int:
    if operation == "lop3.b32":
        assert a[3] == 0xEA, "(a & b) | c is the only table known here"
    return {
        "mov.b32": lambda: a[0],
        "and.b32": lambda: a[0] & a[1],
        "xor.b32": lambda: a[0] ^ a[1],
        "shr.u32": lambda: a[0] >> a[1],
        "shl.b32": lambda: a[0] << a[1] & 0xFFFFFFFF,
        "mad.lo.u32": lambda: a[0] * a[1] + a[2] & 0xFFFFFFFF,
        "prmt.b32": lambda: prmt(*a),
        "fma.rn.bf16x2": lambda: fma(*a),
        "lop3.b32": lambda: a[0] & a[1] | a[2],
    }[operation]()


def run(assembly: str, outputs: int, *inputs: int) -> list[int]:
    """The registers `$0 …` after the instructions."""
    values = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in filter(None, (line.strip() for line in assembly.splitlines())):
        if line[0] in "{}.":
            continue
        found = re.fullmatch(r"([\w.]+) (.*);", line)
        assert found, line
        target, *arguments = found[2].split(", ")
        a = [values[x] if x in values else int(x, 0) for x in arguments]
        values[target] = execute(found[1], *a)
    return [values[f"${i}"] for i in range(outputs)]


def halves(registers: list[int]) -> list[float]:
    return [bf16(r >> shift & 0xFFFF) for r in registers for shift in (0, 16)]


@pytest.mark.parametrize("seed", range(4))
def test_int4_of_two_words(seed: int) -> None:
    words = torch.randint(0, 2**32, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = halves(run(unpack._INT4_BF16.value, 8, *words))
    assert found == [(word >> 4 * position & 15) - 8 for position in range(8) for word in words]


def words_of(codes: list[int]) -> tuple[int, int]:
    """Bytes as two words."""
    low, high = (
        int.from_bytes(bytes(code & 255 for code in part), "little") for part in (codes[:4], codes[4:])
    )
    return low, high


def test_every_e4m3_number() -> None:
    for first in range(0, 256, 8):
        codes = torch.arange(first, first + 8, dtype=torch.uint8)
        found = halves(run(unpack._E4M3_BF16.value, 4, *words_of(codes.tolist())))
        expected = codes.view(torch.float8_e4m3fn).float().view(2, 4).T.flatten().tolist()
        for value, number in zip(found, expected, strict=True):
            if number == number:  # the two that are not are not stored
                assert value * 2.0**120 == number


def test_every_int8_code() -> None:
    for first in range(-128, 128, 8):
        codes = list(range(first, first + 8))
        found = halves(run(unpack._INT8_BF16.value, 4, *words_of(codes)))
        assert found == [codes[4 * word + place] for place in range(4) for word in range(2)]

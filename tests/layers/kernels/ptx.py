"""Inline assembly of kernels in Triton's interpreter: the few instructions of PTX that they use, by numpy.

    with assembled(): …   kernels that are interpreted meanwhile may have assembly, of 32 threads a warp

Source: PTX ISA, "Data Movement and Conversion Instructions", "Logic and Shift Instructions", and "Matrix
fragments for mma.m16n8k16".
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Register = np.ndarray  # uint32 of each thread, or float32
_LINE = re.compile(r"(?P<name>[\w.]+)\s+(?P<given>.+)")


def _number(text: str) -> int:
    return int(text[2:], 16) if text.startswith("0f") else int(text, 0)


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    made = np.zeros_like(a)
    for byte in range(4):
        place = selector.astype(np.uint64) >> np.uint64(4 * byte) & np.uint64(7)
        made |= ((both >> (np.uint64(8) * place)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * byte)
    return made


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    made, rows = np.zeros_like(a), int(table.flat[0])
    for row in range(8):
        if rows >> row & 1:
            made |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return made


def _pair(register: Register) -> np.ndarray:
    """Two bf16 of each thread, `[threads, 2]` float32."""
    bits = np.stack((register << np.uint32(16), register & np.uint32(0xFFFF0000)), -1)
    return bits.astype(np.uint32).view(np.float32)


def _mma(rows: list[Register], columns: list[Register], before: list[np.ndarray]) -> list[np.ndarray]:
    """m16n8k16 of bf16: registers of each thread, the threads of a warp beside each other."""
    lane, warps = np.arange(32), len(rows[0]) // 32
    group, within = lane // 4, lane % 4 * 2
    a, b, c = (np.zeros((warps, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
    left, right = ([_pair(each).reshape(warps, 32, 2) for each in some] for some in (rows, columns))
    for half in range(2):
        for place in range(2):
            k = within + 8 * half + place
            a[:, group, k] = left[2 * half][..., place]
            a[:, group + 8, k] = left[2 * half + 1][..., place]
            b[:, k, group] = right[half][..., place]
            c[:, group + 8 * half, within + place] = before[2 * half + place].reshape(warps, 32)
    c += a @ b
    places = ((group + 8 * (index // 2), within + index % 2) for index in range(4))
    return [c[:, row, column].reshape(-1).astype(np.float32) for row, column in places]


_PLAIN: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
}


@cache
def _instructions(text: str) -> list[tuple[str, list[list[str]]]]:
    """Name and operands of each; those of a matrix product are groups of registers."""
    found = []
    for line in text.replace("{\n", "").replace("\n}", "").split(";"):
        match = _LINE.match(line.strip())
        if match is None or match["name"].startswith(".reg"):
            continue
        groups = re.findall(r"{([^}]*)}", line) if match["name"].startswith("mma") else [match["given"]]
        found.append((match["name"], [[name.strip() for name in each.split(",")] for each in groups]))
    return found


def run(text: str, outputs: int, given: list[np.ndarray]) -> list[np.ndarray]:
    """Registers `$0 …` after the instructions; `given`: those behind them, uint32 or float32."""
    count = len(given[0])
    held: dict[str, np.ndarray] = {f"${outputs + index}": value for index, value in enumerate(given)}

    def value(name: str) -> np.ndarray:
        if name not in held:  # a number, which no register is called
            held[name] = np.full(count, _number(name), np.uint32)
        return held[name]

    for name, operands in _instructions(text):
        if name.startswith("mma"):
            into, rows, columns, before = operands
            sums = [value(each).view(np.float32) for each in before]
            held |= zip(into, _mma([value(n) for n in rows], [value(n) for n in columns], sums), strict=True)
            continue
        register, *names = operands[0]
        held[register] = _PLAIN[name](*map(value, names))
    return [held[f"${index}"] for index in range(outputs)]


def _elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: int, **_: Any
) -> Any:
    text, kinds = getattr(asm, "value", asm), getattr(constraints, "value", constraints)
    several = not isinstance(dtype, tl.dtype)
    dtypes = list(dtype) if several else [dtype]
    shape = args[0].handle.data.shape
    registers = []
    for each in args:
        assert each.handle.data.shape == shape
        registers.append(np.ascontiguousarray(each.handle.data).reshape(-1).view(np.uint32))
    outputs = kinds.count("=")
    made = run(text, outputs, registers)
    # Packed ones stand one after the other.
    results = [np.stack(made, -1).reshape(-1)] if pack == 2 else made
    found = []
    for result, kind in zip(results, dtypes, strict=True):
        wanted = np.float32 if kind == tl.float32 else np.int32
        data = result.view(wanted).reshape(shape)
        found.append(tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape))))
    return tl.tuple(found) if several else found[0]


@contextmanager
def assembled() -> Iterator[None]:
    """Interpreted kernels may have assembly."""
    with mock.patch.object(tl, "inline_asm_elementwise", _elementwise):
        yield

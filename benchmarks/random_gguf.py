"""A GGUF of a model of the catalogue and its mmproj, of exact shape, with random weights.

    python -m benchmarks.random_gguf Qwen/Qwen3-VL-4B-Instruct TOKENIZER OUT.gguf --type Q4_K_M

TOKENIZER is a folder of a model of the same kind with its tokenizer and chat template. Memory and speed don't
depend on the values, but on their being there: of a mixture whose router says the same everywhere a token
reads the same experts as the last. Blocks are random bytes with scales such that activations keep their
size, the same 32 MiB over and over, so that a file is written as fast as the disk takes it.
"""

import argparse
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from training.gguf_export import FILE_TYPES, export

PIECE_BYTES = 32 << 20
Kind = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]
# Where a block has its half-precision scales, and the deviation of its weights where these are 1. Random
# bytes elsewhere: scales of 6 or 8 bits, and the values. The second scale of Q4_K and Q5_K is of their
# offsets, whose mean is that of the values if it is 7.5 or 15.5 times the first.
SCALES: dict[Kind, tuple[int, float]] = {
    Kind.Q8_0: (0, 74.0), Kind.Q5_0: (0, 9.2), Kind.Q4_K: (0, 240.0), Kind.Q5_K: (0, 480.0),
    Kind.Q6_K: (208, 1370.0),
}  # fmt: skip
OFFSETS = {Kind.Q4_K: (2, 7.5), Kind.Q5_K: (2, 15.5)}
PLAIN: dict[Kind, type] = {Kind.F32: np.float32, Kind.F16: np.float16}


def fill(name: str, shape: tuple[int, ...], kind: Kind) -> Iterator[Array]:
    """Random content of one tensor, piece by piece."""
    count, columns = math.prod(shape), shape[-1]
    if kind in PLAIN:
        spread, middle = _spread(name, shape)
        yield from _pieces(_normal(kind, spread, middle), count * np.dtype(PLAIN[kind]).itemsize)
        return
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    deviation = 0.03 if name == "token_embd.weight" else 1 / math.sqrt(columns)
    yield from _pieces(_blocks(kind, deviation), count // block * nbytes)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Deviation and mean of a tensor without blocks."""
    if name.endswith("ssm_a"):
        return 0.1, -0.5  # the state forgets half in a token or two, and never explodes
    if len(shape) == 1:
        return 0.05, 0.0 if name.endswith("bias") else 1.0
    return 1 / math.sqrt(math.prod(shape[1:])), 0.0


@lru_cache(maxsize=8)
def _normal(kind: Kind, spread: float, middle: float) -> Array:
    made = np.random.default_rng(0).standard_normal(PIECE_BYTES // 4, dtype=np.float32)
    return (made * spread + middle).astype(PLAIN[kind]).view(np.uint8)


@lru_cache(maxsize=8)
def _blocks(kind: Kind, deviation: float) -> Array:
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.frombuffer(bytearray(np.random.default_rng(0).bytes(PIECE_BYTES // nbytes * nbytes)), np.uint8)
    rows = rows.reshape(-1, nbytes)
    at, unit = SCALES[kind]
    rows[:, at : at + 2] = np.frombuffer(np.float16(deviation / unit).tobytes(), np.uint8)
    if kind in OFFSETS:
        at, times = OFFSETS[kind]
        rows[:, at : at + 2] = np.frombuffer(np.float16(deviation / unit * times).tobytes(), np.uint8)
    return rows.reshape(-1)


def _pieces(made: Array, nbytes: int) -> Iterator[Array]:
    while nbytes > 0:
        yield made[:nbytes]
        nbytes -= len(made)


def main() -> None:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", help="of the catalogue")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_K_M")
    given = parser.parse_args()
    beside = export(given.model, given.out, given.type, tokenizer=given.tokenizer, fill=fill)
    for path in (given.out, beside):
        if path is not None:
            print(f"{path}: {path.stat().st_size / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()

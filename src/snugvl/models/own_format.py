"""Checkpoints in our own format: every tensor as our engine holds it, so that loading only moves bytes.

    X.weight_codes   the first plane of the codes (`core/formats.py`), eight neighbours a word, the first in
                     the lowest bits: of 4 bits int32, of 2 int16 [rows, columns / 8]; of 8 bits int8
                     [rows, columns]
    X.weight_upper   the second plane, if there is one, in the same order: of 1 bit uint8, of 2 int16
    X.weight_scale   bf16 [rows, columns / group]
    X.weight_zero    bf16 [rows, columns / group]: the code that means 0, not a whole number; not of 8 bits

(`layers/weights.py` says what they mean.) So dtypes and shapes say of each matrix how many bits it has, and
which columns share a scale. All other tensors are those of any checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.quantized import OWN, OWN_CODES, OWN_UPPER, own_planes, own_precision
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.core.formats import FEW_BITS, FORMATS, GROUPS
from snugvl.errors import CheckpointError
from snugvl.layers.linear import Linear
from snugvl.layers.weights import Weights
from snugvl.models.tensor_files import PackedMatrix, TensorFiles

_SCALE, _ZERO = "weight_scale", "weight_zero"


def tensors_of(parts: Iterable[tuple[str, int]], weights: Weights) -> dict[str, torch.Tensor]:
    """The stored planes of a matrix, on the host; `parts`: names (`….weight`) of its rows, and how many."""
    held = {OWN_CODES: weights.data, OWN_UPPER: weights.upper, _SCALE: weights.scale, _ZERO: weights.zero}
    stored, start = {}, 0
    for name, rows in parts:
        base, end = name.removesuffix("weight"), start + rows
        for key, each in held.items():
            if each is not None:
                stored[base + key] = each[start:end].cpu().contiguous()
        start = end
    return stored


def collect(
    tensors: Mapping[str, TensorEntry], form: PackedInt4, folder: Path, known: Mapping[str, int]
) -> tuple[dict[str, TensorEntry], dict[str, PackedMatrix]]:
    """The other tensors, and the matrices by the names they have when they are plain.

    `known`: names of the network's own tensors, and how many columns each has.

    Raises:
        CheckpointError: a tensor is missing beside another, or there is nothing of few bits in `folder`, or
            nothing of what config.json says of it.
    """
    others, found = dict(tensors), {}
    for name, codes in tensors.items():
        if not name.endswith(f".{OWN_CODES}"):
            continue
        base = name.removesuffix(OWN_CODES)
        del others[name]
        scale, upper, zero = (others.pop(base + ending, None) for ending in (_SCALE, OWN_UPPER, _ZERO))
        above = None if upper is None else upper.dtype
        # `check` refuses what is of no such types.
        kind = own_precision(codes.dtype, above) or own_precision(codes.dtype) or form.weights
        if scale is None or (zero is None) == FORMATS[kind].zero:
            missing = _SCALE if scale is None else _ZERO
            has = "has no" if missing == _SCALE or zero is None else "is of 8 bits, but has a"
            raise CheckpointError(f"{codes.file}: tensor {codes.name!r} {has} {missing} beside it")
        group = known.get(f"{base}weight", 0) // max(scale.shape[-1] if scale.shape else 1, 1)
        mine = replace(form, bits=FORMATS[kind].bits, group=group)
        found[f"{base}weight"] = PackedMatrix(mine, codes, scale, zero, upper=upper)
    least = min((matrix.form.bits for matrix in found.values()), default=None)
    if least != form.bits:
        has = "no matrices of few bits" if least is None else f"narrowest matrices of {least} bits"
        raise CheckpointError(f"{folder} has {has}, but its config.json says {form.weights} ({OWN!r})")
    return others, found


def check(matrix: PackedMatrix, rows: int, columns: int) -> None:
    """Compare the stored tensors with a matrix `[rows, columns]`.

    Raises:
        CheckpointError: a shape or a type that the format doesn't have.
    """
    kind, group = matrix.form.weights, matrix.form.group
    words = (rows, columns // 8)
    scales = rows, (matrix.scales.shape or (1,))[-1]
    codes, upper = (*own_planes(kind), "")[:2]
    expected = (
        (matrix.words, words if kind in FEW_BITS else (rows, columns), codes),
        (matrix.upper, words, upper),
        (matrix.scales, scales, "BF16"),
        (matrix.zeros, scales, "BF16"),
    )
    for entry, shape, dtype in expected:
        if entry is not None and (entry.shape != shape or entry.dtype != dtype):
            wanted = f"{dtype} {list(shape)}" if dtype else "none"
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is {entry.dtype} {list(entry.shape)}, expected "
                f"{wanted} for {rows} x {columns} weights in {kind}"
            )
    if group not in GROUPS or group * scales[1] != columns:
        raise CheckpointError(
            f"{matrix.scales.file}: tensor {matrix.scales.name!r} has {scales[1]} scales for {columns} "
            f"columns; {', '.join(map(str, GROUPS))} columns share one"
        )


def fill(matrix: PackedMatrix, linear: Linear, start: int, files: TensorFiles) -> None:
    """Read a matrix to rows `start …` of a linear, a piece at a time."""
    parts = (
        (matrix.words, linear.weight),
        (matrix.upper, linear.upper),
        (matrix.scales, linear.scale),
        (matrix.zeros, linear.zero),
    )
    for entry, place in parts:
        if entry is None:
            continue
        assert place is not None
        for piece in files.pieces(entry):
            first = start + piece.start
            place[first : first + len(piece.values)].copy_(piece.values)

"""Ready-made 4-bit weights from a checkpoint's tensors to ours: every code as it is stored, only moved.

AWQ: `qweight` `[columns, rows / 8]`, `qzeros` `[groups, rows / 8]`, `scales` `[groups, rows]`. A word holds
eight neighbouring rows, in the order 0 2 4 6 1 3 5 7 from its lowest bits. A weight is (code − zero) · scale.

Ours (`layers/weights.py`) has eight neighbouring columns in a word. Scales keep their 16-bit type: AWQ's are
float16, which bfloat16 would round.

Sources: AutoAWQ, `awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py` (MIT).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.configs.ready_made import INSTEAD
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.linear import Linear
from snugvl.models.tensor_files import DTYPES, TensorFiles

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the code of each of eight rows is
_SCALES = ("F16", "BF16")


class Rows(Protocol):
    """Where a matrix goes: `loader.Target`."""

    @property
    def start(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def linear(self) -> Linear | None: ...


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one matrix."""

    words: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry


def collect(
    tensors: Mapping[str, TensorEntry], form: PackedInt4, folder: Path
) -> tuple[dict[str, TensorEntry], dict[str, PackedMatrix]]:
    """The other tensors, and the 4-bit matrices by the names they have when they are plain.

    Raises:
        CheckpointError: scales or zero points are missing, or there is nothing 4-bit in `folder`.
    """
    others, found = dict(tensors), {}
    for name, words in tensors.items():
        if not name.endswith(".qweight"):
            continue
        base = name.removesuffix(".qweight")
        del others[name]
        beside = []
        for part in ("scales", "qzeros"):
            entry = others.pop(f"{base}.{part}", None)
            if entry is None:
                raise CheckpointError(f"{words.file}: 4-bit tensor {words.name!r} has no {part} beside it")
            beside.append(entry)
        found[f"{base}.weight"] = PackedMatrix(words, *beside)
    if not found:
        raise CheckpointError(f"{folder} has no 4-bit tensor, but its config.json names {form.method!r}")
    return others, found


def check_matrix(matrix: PackedMatrix, target: Rows, form: PackedInt4) -> None:
    """Compare the stored tensors with the place they go to.

    Raises:
        CheckpointError: a shape or a type that the layout doesn't have.
        UnsupportedModel: a tensor that can't be 4-bit here.
    """
    words, linear = matrix.words, target.linear
    if linear is None:
        raise UnsupportedModel(f"{words.file}: {words.name!r} is 4-bit; our engine keeps it wide: {INSTEAD}")
    rows, columns = target.rows, linear.columns
    if rows % 8 or columns % form.group:
        raise UnsupportedModel(
            f"{words.file}: {words.name!r} is of {rows} x {columns} weights, which don't divide into eights "
            f"of rows and groups of {form.group}: {INSTEAD}"
        )
    groups = columns // form.group
    for entry, shape, dtypes in (
        (words, (columns, rows // 8), ("I32",)),
        (matrix.zeros, (groups, rows // 8), ("I32",)),
        (matrix.scales, (groups, rows), _SCALES),
    ):
        if entry.shape != shape or entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is {entry.dtype} {list(entry.shape)}, expected "
                f"{' or '.join(dtypes)} {list(shape)} for {rows} x {columns} in groups of {form.group}"
            )


def store(
    targets: Mapping[str, Rows],
    matrices: Mapping[str, PackedMatrix],
    form: PackedInt4,
    inside: Collection[int],
) -> None:
    """Give the linears that `matrices` fill their format, before there is memory.

    Args:
        inside: ids of the modules that may be 4-bit: those of the decoder's layers.

    Raises:
        UnsupportedModel: a linear outside, or one of which only a part is 4-bit.
    """
    parts: dict[int, list[str]] = defaultdict(list)
    for name, target in targets.items():
        parts[id(target.linear)].append(name)
    for name in matrices:
        linear, words = targets[name].linear, matrices[name].words
        assert linear is not None
        if id(linear) not in inside:
            raise UnsupportedModel(
                f"{words.file}: {words.name!r} is 4-bit outside of the decoder's layers: {INSTEAD}"
            )
        for other in parts[id(linear)]:
            scales = matrices[other].scales.dtype if other in matrices else "none"
            if scales != matrices[name].scales.dtype:
                raise UnsupportedModel(
                    f"{words.file}: {words.name!r} has 4 bits and {matrices[name].scales.dtype} scales, but "
                    f"{other!r} {scales}; our engine has them in one matrix: {INSTEAD}"
                )
        if linear.format == "bf16":
            linear.store_as("int4", form.group)
            assert linear.scale is not None
            linear.scale = torch.empty_like(linear.scale, dtype=DTYPES[matrices[name].scales.dtype])
            linear.zero = torch.empty_like(linear.scale)


def fill(matrix: PackedMatrix, target: Rows, files: TensorFiles) -> None:
    """Read a matrix into its rows of a linear, a piece at a time."""
    linear = target.linear
    assert linear is not None
    assert linear.scale is not None
    assert linear.zero is not None
    rows = slice(target.start, target.start + target.rows)
    linear.scale[rows].copy_(files.whole(matrix.scales).T)
    linear.zero[rows].copy_(awq_codes(files.whole(matrix.zeros)).T)
    words = linear.weight[rows]
    for piece in files.pieces(matrix.words, multiple=8):
        first = piece.start // 8
        move_awq(piece.values, words[:, first : first + len(piece.values) // 8])


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """`[n, rows / 8]` int32 in AWQ's order as `[n, rows]` codes."""
    shifts = torch.tensor([4 * nibble for nibble in AWQ_NIBBLES], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1)


def move_awq(words: torch.Tensor, out: torch.Tensor) -> None:
    """`[n, rows / 8]` int32 in AWQ's order to `out` `[rows, n / 8]` in ours.

    A code of each word at a time: the codes of a whole piece are eight times as large.
    """
    out.zero_()
    eights = out.view(-1, 8, out.shape[1])
    for column in range(8):
        some = words[column::8]
        for row, nibble in enumerate(AWQ_NIBBLES):
            codes = (some >> 4 * nibble) & 15
            eights[:, row].bitwise_or_((codes << 4 * column).T)

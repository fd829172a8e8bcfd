"""Pre-quantized 4-bit weights from a checkpoint's tensors to ours: every code as it is stored, only moved.

Checkpoints in our own format are `own_format.py`'s. Others:

| | codes | zero points | scales |
|---|---|---|---|
| AWQ | qweight `[columns, rows / 8]` | qzeros `[groups, rows / 8]` | scales `[groups, rows]` |
| GPTQ | qweight `[columns / 8, rows]` | qzeros `[groups, rows / 8]` | scales `[groups, rows]` |
| compressed-tensors | weight_packed `[rows, columns / 8]` | weight_zero_point `[rows / 8, groups]` |
weight_scale `[rows, groups]` |

A word holds eight neighbours of the dimension that is divided, the first in its lowest bits; AWQ's in the
order 0 2 4 6 1 3 5 7. A weight is (code − zero) · scale; without zero points, code 8 is 0; GPTQ's
first format stores zero points less one. g_idx says which group a column is of: those of a group stand
together, else the checkpoint is refused, by its configuration (desc_act, actorder "group") or here.

Ours (`layers/weights.py`) has eight neighbouring columns in a word, as compressed-tensors and, transposed,
GPTQ. Scales keep their 16-bit type: most are float16, which bfloat16 would round.

Sources: AutoAWQ, `awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py` (MIT); compressed-tensors,
`compressors/pack_quantized` (Apache-2.0); GPTQModel, `gptqmodel/nn_modules/qlinear` (Apache-2.0).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.gguf_network import INSTEAD as INSTEAD_OF_BLOCKS
from snugvl.checkpoint.quantized import INSTEAD
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.ggml import ggml_type
from snugvl.models import own_format
from snugvl.models.tensor_files import DTYPES, LoadTarget, PackedMatrix, TensorFiles

PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)  # where in a word the code of each of eight neighbours is
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def codes_of(words: torch.Tensor, nibbles: tuple[int, ...]) -> torch.Tensor:
    """`[n, m / 8]` int32 as `[n, m]` codes."""
    shifts = torch.tensor([4 * nibble for nibble in nibbles], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1)


def move_awq(words: torch.Tensor, out: torch.Tensor) -> None:
    """`[n, rows / 8]` int32 in AWQ's order to `out` `[rows, n / 8]` in ours.

    A code of each word at a time: the codes of a whole piece are eight times as large.
    """
    out.zero_()
    eights = out.view(-1, 8, out.shape[1])
    for column in range(8):
        some = words[column::8]
        for row, nibble in enumerate(AWQ):
            codes = (some >> 4 * nibble) & 15
            eights[:, row].bitwise_or_((codes << 4 * column).T.to(out.device))  # which may be the host


_SCALES = ("F16", "BF16")
_ENDINGS = {  # of codes, scales, zero points
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point"),
}


def collect(
    tensors: Mapping[str, TensorEntry], form: PackedInt4, folder: Path, known: Mapping[str, int]
) -> tuple[dict[str, TensorEntry], dict[str, PackedMatrix]]:
    """The other tensors, and the matrices of few bits by the names they have when they are plain.

    `known`: names of the network's own tensors, and how many columns each has.

    Raises:
        CheckpointError: scales or zero points are missing, or there is nothing 4-bit in `folder`.
    """
    if form.method == "snugvl":
        return own_format.collect(tensors, form, folder, known)
    others, found = dict(tensors), {}
    codes, scales, zeros = _ENDINGS[form.method]
    for name, words in tensors.items():
        if not name.endswith(f".{codes}"):
            continue
        base = name.removesuffix(codes)
        del others[name]
        mine = _form_of(
            (words, others.get(base + scales)),
            form,
            known.get(f"{base}weight", 0),
            zeros=base + zeros in others,
        )
        gptq = form.method == "gptq"
        order = "g_idx" if gptq else "weight_g_idx"
        matrix = PackedMatrix(
            mine,
            words,
            _beside(words, others, base, scales),
            others.pop(base + zeros, None) if mine.symmetric else _beside(words, others, base, zeros),
            others.pop(f"{base}weight_shape", None) if form.method == "compressed-tensors" else None,
            others.pop(base + order, None),
            others.pop(f"{base}bias", None) if gptq and f"{base}bias" not in known else None,
        )
        found[f"{base}weight"] = matrix
    if not found:
        raise CheckpointError(f"{folder} has no 4-bit tensor, but its config.json names {form.method!r}")
    return others, found


def _form_of(
    stored: tuple[TensorEntry, TensorEntry | None], form: PackedInt4, columns: int, *, zeros: bool
) -> PackedInt4:
    """Which of the checkpoint's forms a matrix has, by its rows of codes and scales, and its zero points."""
    words, scales = stored
    groups = 0 if scales is None else scales.shape[-1]
    fits = (
        each
        for each in (form, *form.others)
        if words.shape[-1] * 32 == columns * each.bits
        and groups * each.group == columns
        and each.symmetric != zeros
    )
    return next(fits, form)


def _beside(words: TensorEntry, tensors: dict[str, TensorEntry], base: str, part: str) -> TensorEntry:
    if base + part not in tensors:
        raise CheckpointError(f"{words.file}: 4-bit tensor {words.name!r} has no {part} beside it")
    return tensors.pop(base + part)


def check_matrix(matrix: PackedMatrix, target: LoadTarget) -> None:
    """Compare the stored tensors with the place they go to.

    Raises:
        CheckpointError: a shape or a type that the layout doesn't have.
        UnsupportedModel: a tensor that can't be 4-bit here.
    """
    words, linear, form = matrix.words, target.linear, matrix.form
    if linear is None:
        raise UnsupportedModel(f"{words.file}: {words.name!r} is 4-bit; our engine keeps it wide: {INSTEAD}")
    if form.method == "snugvl":
        own_format.check(matrix, target.rows, linear.columns)
        return
    rows, columns = target.rows, linear.columns
    if rows % 8 or columns % form.group:
        raise UnsupportedModel(
            f"{words.file}: {words.name!r} has {rows} x {columns} weights; our engine needs a multiple of 8 "
            f"rows and of {form.group} columns: {INSTEAD}"
        )
    shapes = _shapes(rows, columns, columns // form.group, form.bits)[form.method]
    for entry, shape, dtypes in (
        (words, shapes[0], ("I32",)),
        (matrix.zeros, shapes[1], ("I32",)),
        (matrix.scales, shapes[2], _SCALES),
        (matrix.shape, (2,), ("I64", "I32")),
        (matrix.order, (columns,), ("I32",)),
        (matrix.bias, (rows,), tuple(DTYPES)),
    ):
        if entry is None:
            continue
        if entry.shape != shape or entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is {entry.dtype} {list(entry.shape)}, expected "
                f"{' or '.join(dtypes)} {list(shape)} for {rows} x {columns} in groups of {form.group}"
            )


def _shapes(rows: int, columns: int, groups: int, bits: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Shapes of codes, zero points and scales, by the format of the checkpoint."""
    return {
        "awq": ((columns, rows // 8), (groups, rows // 8), (groups, rows)),
        "gptq": ((columns // 8, rows), (groups, rows // 8), (groups, rows)),
        "compressed-tensors": ((rows, columns * bits // 32), (rows // 8, groups), (rows, groups)),
    }


def store(
    targets: Mapping[str, LoadTarget], matrices: Mapping[str, PackedMatrix], inside: Collection[int]
) -> None:
    """Give the linears that `matrices` fill their format, before there is memory. `inside`: ids of the
    modules that may be 4-bit: those of the decoder's layers.

    Raises:
        UnsupportedModel: a linear outside, or one of which only a part is 4-bit.
    """
    parts: dict[int, list[str]] = defaultdict(list)
    for name, target in targets.items():
        parts[id(target.linear)].append(name)
    for name in matrices:
        linear, words, form = targets[name].linear, matrices[name].words, matrices[name].form
        assert linear is not None
        if id(linear) not in inside:
            raise UnsupportedModel(
                f"{words.file}: {words.name!r} is 4-bit outside of the decoder's layers: {INSTEAD}"
            )
        for other in parts[id(linear)]:
            if (theirs := _held(matrices.get(other))) != (ours := _held(matrices[name])):
                raise UnsupportedModel(
                    f"{words.file}: {words.name!r} has {ours}, but {other!r} {theirs}; our engine has them "
                    f"in one matrix: {INSTEAD}"
                )
        if linear.format == "bf16":
            linear.store_as(form.weights, form.group)
            assert linear.scale is not None
            # Not `empty_like`, which imports sympy where there is no memory.
            shape, kind = linear.scale.shape, DTYPES[matrices[name].scales.dtype]
            linear.scale, zero = (
                torch.empty(shape, dtype=kind, device=linear.scale.device) for _ in range(2)
            )
            linear.zero = None if linear.zero is None else zero


def _held(matrix: PackedMatrix | None) -> str:
    """The properties that all parts of one matrix must share."""
    if matrix is None:
        return "none"
    form = matrix.form
    return f"{form.bits} bits in groups of {form.group} and {matrix.scales.dtype} scales"


def store_blocks(targets: Mapping[str, LoadTarget], tensors: Mapping[str, TensorEntry]) -> None:
    """Give what is quantised in a GGUF its own blocks, before there is memory.

    Raises:
        UnsupportedModel: a tensor that can't be, or a matrix of which only a part is.
    """
    parts: dict[int | str, list[tuple[TensorEntry, LoadTarget]]] = defaultdict(list)
    for name, target in targets.items():
        if name in tensors:  # pre-quantized 4-bit matrices are none of a GGUF's
            parts[id(target.linear) if target.linear is not None else name].append((tensors[name], target))
    for each in parts.values():
        quantised = [entry for entry, target in each if ggml_type(entry.dtype)]
        if not quantised:
            continue
        first, linear = quantised[0], each[0][1].linear
        kinds = [(kind, target.rows) for entry, target in each if (kind := ggml_type(entry.dtype))]
        if linear is None or len(kinds) < len(each):
            raise UnsupportedModel(
                f"{first.file}: tensor {first.name!r} is {first.dtype}, but not what our engine has in one "
                f"matrix with it: {INSTEAD_OF_BLOCKS}"
            )
        linear.store_blocks(kinds)


def fill(matrix: PackedMatrix, target: LoadTarget, files: TensorFiles) -> None:
    """Read a matrix into its rows of a linear, a piece at a time.

    Raises:
        CheckpointError: the file says another shape than its tensors have, or has a bias that the network
            hasn't.
        UnsupportedModel: the columns' groups aren't in order.
    """
    linear, form = target.linear, matrix.form
    assert linear is not None
    assert linear.scale is not None
    if form.method == "snugvl":
        own_format.fill(matrix, linear, target.start, files)
        return
    rows = slice(target.start, target.start + target.rows)
    by_row = form.method == "compressed-tensors"
    _check_values(matrix, target.rows, linear.columns, files, form)
    scales = files.whole(matrix.scales)
    linear.scale[rows].copy_(scales if by_row else scales.T)
    if form.bits == 8:
        _fill_bytes(matrix, linear.weight[rows], files)
        return
    assert linear.zero is not None
    if matrix.zeros is None:
        linear.zero[rows].fill_(8)
    else:
        zeros = files.whole(matrix.zeros)
        codes = codes_of(zeros.T if by_row else zeros, AWQ if form.method == "awq" else PLAIN)
        linear.zero[rows].copy_(codes.T + form.offset)
    words = linear.weight[rows]
    for piece in files.pieces(matrix.words, multiple=8 if form.method == "awq" else 1):
        start, count = piece.start, len(piece.values)
        if form.method == "awq":
            move_awq(piece.values, words[:, start // 8 : (start + count) // 8])
        elif by_row:
            words[start : start + count].copy_(piece.values)
        else:
            words[:, start : start + count].copy_(piece.values.T)


def _fill_bytes(matrix: PackedMatrix, place: torch.Tensor, files: TensorFiles) -> None:
    """Codes of 8 bits, four in a word, of which 128 means 0, to int8 `place` `[rows, columns]`."""
    for piece in files.pieces(matrix.words):
        rows = place[piece.start : piece.start + len(piece.values)]
        rows.copy_(piece.values.view(torch.int8))
        rows.bitwise_xor_(-128)  # less 128


def _check_values(
    matrix: PackedMatrix, rows: int, columns: int, files: TensorFiles, form: PackedInt4
) -> None:
    """Refuse a tensor beside a matrix that says anything but what is known of it already."""
    if matrix.shape is not None and files.whole(matrix.shape).tolist() != [rows, columns]:
        raise CheckpointError(
            f"{matrix.shape.file}: {matrix.shape.name!r} says {files.whole(matrix.shape).tolist()}, "
            f"but its matrix is of {[rows, columns]}"
        )
    if matrix.order is not None:
        groups = files.whole(matrix.order)
        if not torch.equal(
            groups, torch.arange(columns, device=groups.device, dtype=groups.dtype) // form.group
        ):
            raise UnsupportedModel(
                f"{matrix.order.file}: {matrix.order.name!r} has columns in the order of activations, not of "
                f"their groups: {INSTEAD}"
            )
    if matrix.bias is not None and files.whole(matrix.bias).count_nonzero():
        raise CheckpointError(
            f"{matrix.bias.file}: {matrix.bias.name!r} isn't zero, but this network has no such bias"
        )

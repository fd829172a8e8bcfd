"""Stored forms of quantised weights: which tensors stand for one matrix, and how many bits its elements have.

form                            the matrix                  beside it
FP8 blocks (Qwen)               X.weight                    X.weight_scale_inv
compressed-tensors, packed      X.weight_packed             X.weight_scale, _zero_point, _shape, _g_idx
compressed-tensors, int, float  X.weight                    X.weight_scale, _zero_point, X.input_scale
AWQ, GPTQ                       X.qweight (int32)           X.qzeros, X.scales, X.g_idx
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snugvl.checkpoint.section import Section, plain, shown
from snugvl.errors import CheckpointError, UnsupportedModel

Kind = Literal["fp8", "int8", "int4"]
_INTEGERS: Mapping[int, Kind] = {4: "int4", 8: "int8"}
_PACKED = (".qweight", ".weight_packed")
_BESIDE = re.compile(
    r"(\.(qzeros|scales|g_idx|weight_(scale|scale_inv|zero_point|shape|g_idx|global_scale)"
    r"|(input|output|k|v|q|activation)_(scale|zero_point|global_scale|scale_inv))|_scale_inv)$"
)
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True)
class Packing:
    """How the quantised matrices of a checkpoint are stored. `method` as its quant_method says."""

    kind: Kind
    method: str
    bits: int


@dataclass(frozen=True, slots=True)
class Place:
    """What a stored tensor is to the network: (part of) the tensor `of`, or a "scale" beside it."""

    of: str
    part: Literal["plain", "packed", "scale"]


def read_packing(root: Section) -> Packing | None:
    """The checkpoint's `quantization_config`, or None for plain weights.

    Raises:
        CheckpointError: a field is missing.
        UnsupportedModel: a method, or a number of bits, whose tensors we can't read.
    """
    values = root.values.get("quantization_config") or root.values.get("compression_config")
    if not values:
        return None
    section = Section(root.get("quantization_config", dict, values), f"{root.where}: quantization_config")
    method = section.get("quant_method", str)
    if method == "fp8":
        return Packing("fp8", method, 8)
    if method in ("awq", "gptq"):
        return _integers(section.count("bits"), method, section.where)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(section)
    raise UnsupportedModel(
        f"{section.where} is {shown(method)}; fp8, compressed-tensors, awq and gptq can be read from headers"
    )


def _integers(bits: int, method: str, where: str) -> Packing:
    kind = _INTEGERS.get(bits)
    if kind is None:
        raise UnsupportedModel(f"{where} has {bits}-bit integers ({method}); 4 and 8 bits can be read")
    return Packing(kind, method, bits)


def _compressed(section: Section) -> Packing:
    """compressed-tensors: groups of layers, each with its own weights; all must be of one kind."""
    groups = section.get("config_groups", dict)
    found = set()
    for name, group in groups.items():
        weights = Section(group if isinstance(group, dict) else {}, f"{section.where}: {name}").section(
            "weights"
        )
        bits, number = weights.count("num_bits"), weights.get("type", str, "int")
        if (number, bits) == ("float", 8):
            found.add(Packing("fp8", "compressed-tensors", 8))
        elif number == "int":
            found.add(_integers(bits, "compressed-tensors", weights.where))
        else:
            raise UnsupportedModel(
                f"{weights.where} has {bits}-bit {plain(number)} weights; int 4, int 8, float 8 can be read"
            )
    if len(found) != 1:
        kinds = sorted(packing.kind for packing in found)
        raise UnsupportedModel(f"{section.where} mixes weights of {kinds or 'no kind'}; one kind can be read")
    return found.pop()


def place(name: str) -> Place:
    """Where a stored tensor belongs, from its name."""
    for ending in _PACKED:
        if name.endswith(ending):
            return Place(_whole(name.removesuffix(ending) + ".weight"), "packed")
    beside = _BESIDE.search(name)
    if beside:
        base = name[: beside.start()]
        # "experts.down_proj_scale_inv" belongs to "experts.down_proj", which has no ".weight".
        return Place(base if beside[0].startswith("_") else _whole(f"{base}.weight"), "scale")
    return Place(_whole(name), "plain")


def _whole(name: str) -> str:
    """One expert's matrix is part of the tensor that holds all of them."""
    expert = _EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert[1]}.down_proj" if expert[2] == "down" else f"{expert[1]}.gate_up_proj"


def elements(numel: int, nbytes: int, part: str, packing: Packing | None) -> int:
    """Elements of the matrix that a stored tensor of `numel` elements and `nbytes` bytes holds."""
    if part == "packed" and packing is not None:
        return nbytes * 8 // packing.bits
    return numel


def check_whole(name: str, held: int, shape: tuple[int, ...], wanted: int, where: str) -> None:
    """Refuse a matrix of fewer or more elements than its shape has; packing may pad each row to a word.

    Raises:
        CheckpointError: names the tensor and both numbers.
    """
    padding = 8 * max(shape, default=1) if held != wanted else 0
    if not wanted <= held <= wanted + padding:
        raise CheckpointError(
            f"{where}: {name} has {held:,} elements, but config.json asks for {list(shape)} = {wanted:,}"
        )


def stored_fp8(values: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block in a `quantization_config`."""
    rows, columns = values["weight_block_size"]
    return int(rows), int(columns)

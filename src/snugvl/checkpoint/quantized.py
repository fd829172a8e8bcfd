"""Stored forms of quantised weights: which tensors stand for one matrix, and how many bits its elements have.

form                            the matrix                  beside it
FP8 blocks (Qwen)               X.weight                    X.weight_scale_inv
compressed-tensors, packed      X.weight_packed             X.weight_scale, _zero_point, _shape, _g_idx
compressed-tensors, int         X.weight                    X.weight_scale, _zero_point, X.input_scale
compressed-tensors, float       X.weight                    X.weight_scale, X.input_scale
AWQ, GPTQ, AutoRound            X.qweight (int32)           X.qzeros, X.scales, X.g_idx
our own (`snugvl quantize`)     X.weight_codes              X.weight_upper, _scale, _zero

`quantization_config` says which it is: `read_packing` for the plan of any engine, `read_layout` for ours.
Sources: AutoAWQ, `awq/models/_config.py` (MIT); compressed-tensors, `quantization/quant_config.py` and
`quant_args.py` (Apache-2.0); GPTQModel, `gptqmodel/quantization/config.py` (Apache-2.0); AutoRound,
`auto_round/export/export_to_autoround/export.py` and `auto_round_extension/torch/qlinear_torch_zp.py`
(Apache-2.0).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NoReturn

from snugvl.checkpoint.architecture import WHOLE_ROW, Fp8Blocks, PackedInt4
from snugvl.checkpoint.facts import ModelFacts, Stored
from snugvl.checkpoint.section import Section, plain, shown
from snugvl.core.formats import FORMATS, GROUPS, INTEGERS, PREQUANTIZED, IntegerPrecision, StoredPrecision
from snugvl.errors import CheckpointError, UnsupportedModel

OWN: Final = "snugvl"  # our own format, which our engine alone reads
OWN_VERSION = 1
OWN_CODES: Final = "weight_codes"  # how names of its codes end
OWN_UPPER: Final = "weight_upper"  # how names of their upper bits end, where they are in two planes
_WORDS: Final = {1: "U8", 2: "I16", 4: "I32"}  # of eight codes' bits in a plane
OWN_INSTEAD = "use our own engine (--backend native), or the checkpoint that it was made of"
_METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "auto-round", OWN)
_AUTO_ROUND: Final = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}  # as packing_format
_GROUPS = "32, 64 or 128"
INSTEAD = f"use the 16-bit checkpoint with --weights {PREQUANTIZED[4]}, or --backend transformers or vllm"
_PACKED = (".qweight", ".weight_packed", ".weight_codes")
_BESIDE = re.compile(
    r"(\.(qzeros|scales|g_idx|weight_(scale|scale_inv|zero|zero_point|upper|shape|g_idx|global_scale)"
    r"|(input|output|k|v|q|activation)_(scale|zero_point|global_scale|scale_inv))|_scale_inv)$"
)
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True)
class Packing:
    """How the quantised matrices of a checkpoint are stored: each element in `bits`.

    `mixed`: some elements have 8 bits, as shapes tell. `own`: our own format, whose codes' first plane is
    packed, with the bits above it in a tensor of their own.
    """

    kind: StoredPrecision
    bits: int
    mixed: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A stored tensor's place in the network: (part of) the tensor `of`, or a "scale" beside it."""

    of: str
    part: Literal["plain", "packed", "scale"]


def read_packing(root: Section) -> Packing | None:
    """How the checkpoint's matrices are stored, for the plan of any engine; None for plain weights.

    Raises:
        CheckpointError: a field is missing.
        UnsupportedModel: a method, or a number of bits, whose tensors snugvl can't read.
    """
    section = _settings(root)
    if section is None:
        return None
    match _method(section):
        case "fp8":
            return Packing("fp8", 8)
        case "compressed-tensors":
            return _compressed_packing(section)
        case "snugvl":
            kind = _own_weights(section)
            return Packing(kind, FORMATS[kind].planes[0], mixed=True, own=True)
        case "auto-round":
            return _auto_round_packing(section)
        case method:
            return _integers(section.count("bits"), method, section.where)


def read_layout(root: Section) -> Fp8Blocks | PackedInt4 | None:
    """The layout in which our own engine reads the checkpoint's matrices; None for plain weights.

    Raises:
        CheckpointError: a field is missing.
        UnsupportedModel: a layout that other engines may run, but not ours.
    """
    section = _settings(root)
    if section is None:
        return None
    match _method(section):
        case "fp8":
            return _blocks(section)
        case "awq":
            return _awq(section)
        case "gptq":
            return _gptq(section)
        case "auto-round":
            return _auto_round_layout(section)
        case "snugvl":
            return PackedInt4(OWN, max(GROUPS), bits=FORMATS[_own_weights(section)].bits)
        case _:
            return _compressed_layout(section)


def _settings(root: Section) -> Section | None:
    values = root.values.get("quantization_config") or root.values.get("compression_config")
    if not values:
        return None
    return Section(root.get("quantization_config", dict, values), f"{root.where}: quantization_config")


def _method(section: Section) -> str:
    """The quantisation's method, one of `_METHODS`."""
    method = str(section.get("quant_method", str)).replace("_", "-")
    if method not in _METHODS:
        known = f"{', '.join(_METHODS[:-1])} and {_METHODS[-1]}"
        raise UnsupportedModel(f"{section.where} is {shown(method)}; {known} can be read")
    return method


def own_settings(weights: StoredPrecision) -> dict[str, Any]:
    """`quantization_config` of our own format; `weights`: settings of its narrowest matrices."""
    return {"quant_method": OWN, "version": OWN_VERSION, "weights": weights}


def _own_weights(section: Section) -> IntegerPrecision:
    version = section.values.get("version")
    if version != OWN_VERSION:
        raise UnsupportedModel(
            f"{section.where} is of version {shown(version)} of our own format, and this snugvl reads "
            f"{OWN_VERSION}; use the snugvl that wrote it, or quantise the original again"
        )
    weights = section.values.get("weights")
    for kind in INTEGERS:
        if weights == kind:
            return kind
    raise CheckpointError(f"{section.where}: weights is {shown(weights)}; it is one of {', '.join(INTEGERS)}")


def own_planes(kind: IntegerPrecision) -> tuple[str, ...]:
    """Types, as safetensors calls them, of the tensors that hold a matrix' codes in our own format."""
    form = FORMATS[kind]
    return tuple(_WORDS[bits] for bits in form.planes) if form.zero else ("I8",)


def own_precision(codes: str, upper: str | None = None) -> IntegerPrecision | None:
    """The precision of a matrix in our own format by the types of its codes and their upper bits, or None."""
    held = (codes,) if upper is None else (codes, upper)
    return next((kind for kind in INTEGERS if own_planes(kind) == held), None)


def own_precisions(facts: ModelFacts) -> list[IntegerPrecision]:
    """The precisions in a checkpoint of our own format, each once; empty for other checkpoints."""
    types = {tensor.name: tensor.dtype for tensor in facts.tensors} if facts.own else {}
    found = (
        own_precision(dtype, types.get(name.removesuffix(OWN_CODES) + OWN_UPPER))
        for name, dtype in types.items()
        if name.endswith(f".{OWN_CODES}")
    )
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def _integers(bits: int, method: str, where: str) -> Packing:
    kind = PREQUANTIZED.get(bits)
    if kind is None:
        raise UnsupportedModel(f"{where} has {bits}-bit integers ({method}); 4 and 8 bits can be read")
    return Packing(kind, bits)


def _schemes(section: Section) -> dict[str, tuple[Section, Section]]:
    """compressed-tensors' groups of layers: (the group's section, its weights' section) by name."""
    groups = section.get("config_groups", dict)
    schemes = {
        name: Section(group if isinstance(group, dict) else {}, f"{section.where}: {name}")
        for name, group in groups.items()
    }
    return {name: (scheme, scheme.section("weights")) for name, scheme in schemes.items()}


def _compressed_packing(section: Section) -> Packing:
    """compressed-tensors' packing. All groups must be of one kind, or integers of 4 and of 8 bits."""
    found = set()
    for _, weights in _schemes(section).values():
        bits, number = weights.count("num_bits"), weights.get("type", str, "int")
        if (number, bits) == ("float", 8):
            found.add(Packing("fp8", 8))
        elif number == "int":
            found.add(_integers(bits, "compressed-tensors", weights.where))
        else:
            raise UnsupportedModel(
                f"{weights.where} has {bits}-bit {plain(number)} weights; int 4, int 8, float 8 can be read"
            )
    if found == {Packing(kind, bits) for bits, kind in PREQUANTIZED.items()}:
        return Packing(PREQUANTIZED[4], 4, mixed=True)
    if len(found) != 1:
        kinds = sorted(packing.kind for packing in found)
        what = f"mixes weights of {kinds}" if kinds else "names no kind of weights"
        raise UnsupportedModel(f"{section.where} {what}; one kind can be read")
    return found.pop()


def _blocks(section: Section) -> Fp8Blocks:
    """Read the official FP8 layout."""
    block = section.values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(side, int) for side in block):
        _refuse(section, "fp8", {"weight_block_size": block}, "the official checkpoints, [128, 128]")
    return Fp8Blocks(rows=block[0], columns=block[1])


def _awq(section: Section) -> PackedInt4:
    """Read AWQ in AutoAWQ's "gemm" layout, the one on the Hub."""
    values = section.values
    found = {
        "bits": values.get("bits"),
        "group_size": values.get("group_size"),
        "version": str(values.get("version") or values.get("checkpoint_format") or "gemm").lower(),
    }
    if found["bits"] != 4 or found["group_size"] not in GROUPS or found["version"] != "gemm":
        _refuse(section, "awq", found, f"4 bits in groups of {_GROUPS} in version 'gemm'")
    return PackedInt4("awq", values["group_size"])


def _gptq(section: Section) -> PackedInt4:
    """Read GPTQ of AutoGPTQ and GPTQModel; the older format stores zero points less one."""
    values = section.values
    found = {
        "bits": values.get("bits"),
        "group_size": values.get("group_size"),
        "checkpoint_format": values.get("checkpoint_format") or "gptq",
        "dynamic": _other_settings(values.get("dynamic")),
        "desc_act": bool(values.get("desc_act")),  # a group's columns stand anywhere
    }
    known = (
        found["bits"] == 4
        and found["group_size"] in GROUPS
        and found["checkpoint_format"] in ("gptq", "gptq_v2")
        and found["dynamic"] is None
        and not found["desc_act"]
    )
    if not known:
        wanted = f"4 bits in groups of {_GROUPS} without desc_act and without other settings in dynamic"
        _refuse(section, "gptq", found, wanted)
    offset = int(found["checkpoint_format"] == "gptq")
    return PackedInt4("gptq", values["group_size"], offset=offset)


def _auto_round_packing(section: Section) -> Packing:
    """AutoRound's packing, which is GPTQ's or AWQ's. Modules of their own may have 8 bits beside 4, or 16."""
    if (form := _auto_round_form(section)) not in _AUTO_ROUND:
        known = " and ".join(_AUTO_ROUND)
        raise UnsupportedModel(f"{section.where} has packing_format {shown(form)}; {known} can be read")
    packing = _integers(section.count("bits"), "auto-round", section.where)
    others = {str(each["bits"]) for each in _auto_round_others(section).values()} - {str(packing.bits)}
    if others - {"8"} or (others and packing.bits != 4):
        found = f"modules of {', '.join(sorted(others))} bits beside {packing.bits}"
        raise UnsupportedModel(f"{section.where} has {found}; 8 beside 4 can be read")
    return replace(packing, mixed=bool(others))


def _auto_round_layout(section: Section) -> PackedInt4:
    """Read AutoRound's layout: GPTQ's or AWQ's, without modules in other bits."""
    _auto_round_packing(section)
    found = {
        "data_type": section.values.get("data_type", "int"),
        "act_bits": section.values.get("act_bits", 16),
        "extra_config": _auto_round_others(section) or None,
    }
    if tuple(found.values()) != ("int", 16, None):
        _refuse(section, "auto-round", found, "int weights of one number of bits, activations left alone")
    return _gptq(section) if _AUTO_ROUND[_auto_round_form(section)] == "gptq" else _awq(section)


def _auto_round_form(section: Section) -> str:
    return str(section.values.get("packing_format", next(iter(_AUTO_ROUND))))


def _auto_round_others(section: Section) -> dict[str, dict[str, Any]]:
    """Modules that AutoRound rounds to bits, or in groups, of their own; others that it names stay wide."""
    extra = section.values.get("extra_config")
    known = {key: section.values.get(key) for key in ("bits", "group_size", "sym")}
    said = (extra if isinstance(extra, dict) else {}).items()
    rounded = {name: known | each for name, each in said if isinstance(each, dict)}
    rounded = {name: each for name, each in rounded.items() if each["bits"] not in (16, 32)}
    return {name: each for name, each in rounded.items() if any(each[key] != known[key] for key in known)}


def _other_settings(dynamic: object) -> object:
    """Settings of GPTQ's that some modules have instead of the others', or None.

    Modules that aren't quantised ("-:", a pattern) are those whose tensors say so.
    """
    if not isinstance(dynamic, dict):
        return dynamic or None
    return {key: each for key, each in dynamic.items() if each and not str(key).startswith("-:")} or None


def _compressed_layout(section: Section) -> Fp8Blocks | PackedInt4:
    """Read compressed-tensors' FP8, or "pack-quantized": 4-bit groups, symmetric or not, activations not
    quantised.

    Symmetric 8-bit groups may be beside them.
    """
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if section.values.get(key):
            _refuse(
                section,
                "compressed-tensors",
                {key: section.values[key]},
                "neither this nor others of its kind",
            )
    schemes = _schemes(section)
    if schemes and all(weights.values.get("type") == "float" for _, weights in schemes.values()):
        return _compressed_fp8(section, schemes)
    found = {_packed(section, scheme, weights.values) for scheme, weights in schemes.values()}
    order = sorted(found, key=lambda each: (each.bits, each.group, each.symmetric))
    if not order or order[0].bits != 4:
        known = "schemes of 4 bits, and beside them others of 8 bits"
        _refuse(section, "compressed-tensors", {"config_groups": sorted(schemes)}, known)
    return replace(order[0], others=tuple(order[1:]))


def _compressed_fp8(section: Section, schemes: Mapping[str, tuple[Section, Section]]) -> Fp8Blocks:
    """Read compressed-tensors' FP8 with a scale for each row or each block; inputs stay as they are, which is
    finer than FP8 that is made of them for each step."""
    found = set()
    for scheme, weights in schemes.values():
        values, inputs = weights.values, scheme.values.get("input_activations")
        made = isinstance(inputs, dict) and inputs.get("dynamic") is True  # by the engine, for each step
        has = {
            "format": scheme.values.get("format") or section.values.get("format"),
            "num_bits": values.get("num_bits"),
            "strategy": values.get("strategy"),
            "block_structure": values.get("block_structure"),
            "symmetric": values.get("symmetric", True),
            "input_activations": None if made else inputs,
            "output_activations": scheme.values.get("output_activations"),
        }
        sides = has["block_structure"] if has["strategy"] == "block" else [1, WHOLE_ROW]
        known = (
            has["format"] in ("float-quantized", "naive-quantized")
            and has["num_bits"] == 8
            and has["strategy"] in ("channel", "block")
            and isinstance(sides, list)
            and len(sides) == 2
            and all(isinstance(side, int) and side > 0 for side in sides)
            and has["symmetric"] is True
            and not (has["input_activations"] or has["output_activations"])
        )
        if not known:
            wanted = "float-quantized weights with a scale for each row or block, activations none or dynamic"
            _refuse(scheme, "compressed-tensors", has, wanted)
        found.add(Fp8Blocks(*sides))
    if len(found) != 1:
        _refuse(section, "compressed-tensors", {"config_groups": sorted(schemes)}, "scales of one kind")
    return found.pop()


def _packed(section: Section, scheme: Section, weights: Mapping[str, Any]) -> PackedInt4:
    found = {
        "format": scheme.values.get("format") or section.values.get("format"),
        "num_bits": weights.get("num_bits"),
        "type": weights.get("type", "int"),
        "strategy": weights.get("strategy"),
        "group_size": weights.get("group_size"),
        "actorder": weights.get("actorder"),
        "input_activations": scheme.values.get("input_activations"),
        "output_activations": scheme.values.get("output_activations"),
    }
    known = (
        found["format"] == "pack-quantized"
        and found["num_bits"] in (4, 8)
        and (found["type"], found["strategy"]) == ("int", "group")
        and found["group_size"] in GROUPS
        and found["actorder"] in (None, "static", "weight")  # of "group" a group's columns stand anywhere
        and not (found["input_activations"] or found["output_activations"])
    )
    symmetric = bool(weights.get("symmetric", True))
    bits = found["num_bits"]
    if not known or (bits == 8 and not symmetric):
        found["symmetric"] = symmetric
        wanted = (
            f"pack-quantized weights of 4-bit int in groups of {_GROUPS}, beside them symmetric ones of 8 "
            "bits, columns of a group together, activations left alone"
        )
        _refuse(scheme, "compressed-tensors", found, wanted)
    return PackedInt4("compressed-tensors", weights["group_size"], symmetric, bits=bits)


def _refuse(section: Section, method: str, found: dict[str, Any], known: str) -> NoReturn:
    has = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
    raise UnsupportedModel(f"{section.where} is {method!r} with {has}; our engine reads {known}: {INSTEAD}")


def place(name: str) -> Place:
    """The place of a stored tensor, by its name."""
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
    """The name of the tensor that holds all experts, for one expert's matrix; other names as they are."""
    expert = _EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert[1]}.down_proj" if expert[2] == "down" else f"{expert[1]}.gate_up_proj"


def bits_of(tensor: Stored, part: str, packing: Packing | None, wanted: int) -> int:
    """Bits of an element of a packed tensor, whose matrix has `wanted` elements; else 0."""
    if part != "packed" or packing is None:
        return 0
    if packing.own:
        planes = {own_planes(kind)[0]: FORMATS[kind].planes[0] for kind in INTEGERS}
        return planes.get(tensor.dtype, packing.bits)
    return 8 if packing.mixed and tensor.nbytes >= wanted else packing.bits


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

"""The `quantization_config` of ready-made 4-bit checkpoints, as far as our engine reads them.

Sources: AutoAWQ, `awq/models/_config.py` (MIT); compressed-tensors, `quantization/quant_config.py` and
`quant_args.py` (Apache-2.0); GPTQModel, `gptqmodel/quantization/config.py` (Apache-2.0).
"""

from typing import Any, NoReturn

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.section import Section, shown
from snugvl.errors import UnsupportedModel

GROUPS = (32, 64, 128)  # columns that may share a scale: the kernels' own
INSTEAD = "use the 16-bit checkpoint with --weights int4, or --backend transformers or vllm"


def read_awq(section: Section) -> PackedInt4:
    """AWQ as AutoAWQ's "gemm" layout stores it, which is what the Hub has.

    Raises:
        UnsupportedModel: another layout, number of bits or group.
    """
    values = section.values
    found = {
        "bits": values.get("bits"),
        "group_size": values.get("group_size"),
        "version": str(values.get("version") or values.get("checkpoint_format") or "gemm").lower(),
    }
    if found["bits"] != 4 or found["group_size"] not in GROUPS or found["version"] != "gemm":
        _refuse(section, "awq", found, f"4 bits in groups of {_groups()} in version 'gemm'")
    return PackedInt4("awq", values["group_size"])


def read_gptq(section: Section) -> PackedInt4:
    """GPTQ as AutoGPTQ and GPTQModel store it; the older format has its zero points less one.

    Raises:
        UnsupportedModel: another layout, number of bits or group, or columns in the order of activations.
    """
    values = section.values
    found = {
        "bits": values.get("bits"),
        "group_size": values.get("group_size"),
        "desc_act": bool(values.get("desc_act")),
        "checkpoint_format": values.get("checkpoint_format") or "gptq",
        "dynamic": values.get("dynamic") or None,  # other settings for some modules
    }
    known = (
        found["bits"] == 4
        and found["group_size"] in GROUPS
        and not found["desc_act"]
        and found["checkpoint_format"] in ("gptq", "gptq_v2")
        and found["dynamic"] is None
    )
    if not known:
        _refuse(section, "gptq", found, f"4 bits in groups of {_groups()} without desc_act or dynamic")
    return PackedInt4("gptq", values["group_size"], offset=int(found["checkpoint_format"] == "gptq"))


def read_compressed(section: Section) -> PackedInt4:
    """compressed-tensors' "pack-quantized": 4-bit groups, symmetric or not, activations as they are.

    Raises:
        CheckpointError: there is no scheme.
        UnsupportedModel: another format, or a scheme that changes more than weights.
    """
    values = section.values
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if values.get(key):
            _refuse(section, "compressed-tensors", {key: values[key]}, "neither this nor others of its kind")
    schemes = section.get("config_groups", dict)
    found = {
        _scheme(section, Section(scheme, f"{section.where}: {name}")) for name, scheme in schemes.items()
    }
    if len(found) != 1:
        _refuse(section, "compressed-tensors", {"config_groups": sorted(schemes)}, "one scheme for all")
    return found.pop()


def _scheme(root: Section, scheme: Section) -> PackedInt4:
    weights = scheme.section("weights").values
    found = {
        "format": scheme.values.get("format") or root.values.get("format"),
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
        and (found["num_bits"], found["type"], found["strategy"]) == (4, "int", "group")
        and found["group_size"] in GROUPS
        and found["actorder"] in (None, "static", "weight")  # "group" would mix the columns of groups
        and not (found["input_activations"] or found["output_activations"])
    )
    if not known:
        wanted = f"pack-quantized weights of 4-bit int in groups of {_groups()}, activations left alone"
        _refuse(scheme, "compressed-tensors", found, wanted)
    return PackedInt4("compressed-tensors", weights["group_size"], bool(weights.get("symmetric", True)))


def _refuse(section: Section, method: str, found: dict[str, Any], known: str) -> NoReturn:
    has = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
    raise UnsupportedModel(f"{section.where} is {method!r} with {has}; our engine reads {known}: {INSTEAD}")


def _groups() -> str:
    return f"{', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}"

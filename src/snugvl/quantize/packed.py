"""Rounded matrices as compressed-tensors' "pack-quantized" checkpoints have them, and their configuration.

    X.weight_packed         int32 [rows, columns · bits / 32], the first code in the lowest bits
    X.weight_scale          bf16 [rows, groups]
    X.weight_zero_point     int32 [rows / 8, groups], eight rows a word; of 4 bits alone
    X.weight_shape          int64 [2]

Source: compressed-tensors 0.20, `compressors/pack_quantized` and `quantization/quant_config.py` (Apache-2.0).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from snugvl.quantize.rounding import Rounded

# What no group is meant for, whatever its name is like.
IGNORED = ("lm_head", "re:.*lm_head$", "re:.*visual.*", "re:.*vision.*", "re:.*mtp.*")
Scheme = tuple[int, int]
"""Bits and columns of a group."""


def tensors_of(parts: Iterable[tuple[str, int]], whole: Rounded) -> dict[str, torch.Tensor]:
    """What is stored of a matrix, on the host; `parts`: names (`….weight`) of its rows, and how many."""
    stored: dict[str, torch.Tensor] = {}
    start = 0
    for name, rows in parts:
        base, made = name.removesuffix("weight"), whole.rows(start, start + rows)
        stored |= {
            f"{base}weight_packed": words(made.codes, made.bits),
            f"{base}weight_scale": made.scale,
            f"{base}weight_shape": torch.tensor([rows, made.codes.shape[1]]),
        }
        if made.bits == 4:
            stored[f"{base}weight_zero_point"] = words(made.zero.T.to(torch.uint8), 4).T
        start += rows
    return {each: tensor.contiguous().cpu() for each, tensor in stored.items()}


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Neighbours of the last dimension in int32, the first in the lowest bits."""
    if bits == 4:
        pairs = codes.reshape(*codes.shape[:-1], -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return codes.contiguous().view(torch.int32)  # little-endian, as the files are


def configuration(schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """`quantization_config`, by the names of matrices (`….weight`).

    Targets are patterns that begin anywhere: engines have prefixes of their own before `layers`.
    """
    found: dict[Scheme, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, scheme in schemes.items():
        number, module = re.split(r"\blayers\.(\d+)\.", name.removesuffix(".weight"))[-2:]
        found[scheme][module].append(number)
    groups = {}
    for number, ((bits, group), modules) in enumerate(sorted(found.items())):
        targets = [
            rf"re:.*layers\.({'|'.join(layers)})\.{re.escape(module)}$" for module, layers in modules.items()
        ]
        groups[f"group_{number}"] = _group(bits, group, targets)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(IGNORED),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(bits: int, group: int, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group", "group_size": group,
        "block_structure": None, "dynamic": False, "actorder": None, "observer": "mse", "observer_kwargs": {},
    }  # fmt: skip
    return {
        "format": "pack-quantized",
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }

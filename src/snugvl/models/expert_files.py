"""Experts as checkpoints store them, and as `layers/experts.py` has them: all below one another.

| a file has | of |
|---|---|
| `experts.7.gate_proj.weight`, `.up_proj`, `.down_proj` | each expert, as most quantised checkpoints |
| `experts.gate_up_proj` `[experts, 2 · width, hidden]`, `.down_proj` `[experts, hidden, width]` | all |
| the same with the last two dimensions exchanged | all, as Qwen3-VL's |
| `experts.gate_proj.weight` `[experts, width, hidden]`, `.up_proj`, `.down_proj` | all, of a GGUF |

FP8 has `…_scale_inv` beside each, of the same form.
Source: transformers, `conversion_mapping.py` (Apache-2.0).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.layers.experts import Experts
from snugvl.models.tensor_files import SCALE_SUFFIX


def stacked(model: nn.Module, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors by the names that `model` has for them once its experts know how they are stored."""
    made = dict(tensors)
    for name, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        if f"{name}.gate_up_proj" in made:
            _whole(name, experts, made)
        for part in ("gate_proj", "up_proj", "down_proj"):
            entry = made.get(f"{name}.{part}.weight")
            if entry is None or len(entry.shape) != 3 or entry.shape[0] != experts.count:
                continue
            if not experts.packed:  # beside gate and up that are one tensor
                made[f"{name}.{part}.weight"] = _flat(entry)
            else:
                del made[f"{name}.{part}.weight"]
                made |= {f"{name}.{n}.{part}.weight": each for n, each in enumerate(_each(entry))}
    return made


def _whole(name: str, experts: Experts, made: dict[str, TensorEntry]) -> None:
    """All experts' matrices in one tensor: as it is, or where it is turned expert by expert."""
    width, hidden, count = experts.width, experts.hidden, experts.count
    shapes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    parts = [part for part in shapes if f"{name}.{part}" in made]
    if all(made[f"{name}.{part}"].shape == (count, *shapes[part]) for part in parts):
        experts.packed = {}
        for part in parts:
            for suffix in ("", SCALE_SUFFIX):
                if (entry := made.pop(f"{name}.{part}{suffix}", None)) is not None:
                    made[f"{name}.{part}.weight{suffix}"] = _flat(entry)
        return
    if any(made[f"{name}.{part}"].shape != (count, *shapes[part][::-1]) for part in parts):
        return  # of another size than config.json says: `check_names` tells it
    experts.store_apart(halves=False)
    for part in parts:
        for suffix in ("", SCALE_SUFFIX):
            if (entry := made.pop(f"{name}.{part}{suffix}", None)) is not None:
                for number, each in enumerate(_each(entry, suffix)):
                    turned = replace(each, shape=(each.shape[1], each.shape[0]), turned=True)
                    made[f"{name}.{number}.{part}.weight{suffix}"] = turned


def _flat(entry: TensorEntry) -> TensorEntry:
    return replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))


def _each(entry: TensorEntry, suffix: str = "") -> Iterator[TensorEntry]:
    """One entry an expert, named by the tensor and its number in it; `suffix` ends its name all the same."""
    size = entry.nbytes // entry.shape[0]
    stem = entry.name.removesuffix(suffix)
    for number in range(entry.shape[0]):
        yield replace(
            entry,
            name=f"{stem}[{number}]{suffix}",
            shape=entry.shape[1:],
            offset=entry.offset + number * size,
            nbytes=size,
        )

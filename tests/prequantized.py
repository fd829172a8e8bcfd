"""Pre-quantized 4-bit checkpoints, packed here from the formats' definitions, and what they mean in float32.

Codes, scales and zero points are drawn, so that nothing depends on how a library would round.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import LINEARS

State = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours each nibble of a word holds, lowest first
PLAIN_ORDER = tuple(range(8))


@dataclass(frozen=True)
class Form:
    """How a library writes a matrix: `pack(codes [rows, columns], zeros, scales [rows, groups])`."""

    config: dict[str, Any]
    pack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], State]
    scales: torch.dtype = torch.float16
    symmetric: bool = False
    biases: bool = False  # of zeros, where the network has none


def words(codes: torch.Tensor, order: tuple[int, ...] = PLAIN_ORDER) -> torch.Tensor:
    """Eight neighbours of the last dimension in one int32."""
    eights = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, 8)
    word = sum(eights[..., neighbour] << 4 * nibble for nibble, neighbour in enumerate(order))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _awq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> State:
    return {"qweight": words(codes.T, AWQ_ORDER), "qzeros": words(zeros.T, AWQ_ORDER), "scales": scales.T}


def awq(group: int) -> Form:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Form(config | {"modules_to_not_convert": ["visual"]}, _awq)


def _compressed(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> State:
    return {
        "weight_packed": words(codes),
        "weight_zero_point": words(zeros.T).T,
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }


def _symmetric(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> State:
    state = _compressed(codes, zeros, scales)
    del state["weight_zero_point"]
    return state


def compressed(group: int, *, symmetric: bool) -> Form:
    weights = {
        "actorder": None, "dynamic": False, "group_size": group, "num_bits": 4,
        "observer": "minmax", "strategy": "group", "symmetric": symmetric, "type": "int",
    }  # fmt: skip
    scheme = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip
    pack = _symmetric if symmetric else _compressed
    return Form(config, pack, torch.bfloat16, symmetric)


def gptq(group: int, *, version: int) -> Form:
    """GPTQModel's formats: the first stores zero points less one."""

    def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> State:
        return {
            "qweight": words(codes).T,
            "qzeros": words(zeros.T - int(version == 1)),
            "scales": scales.T,
            "g_idx": (torch.arange(codes.shape[1]) // group).to(torch.int32),
        }

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Form(config, pack, biases=True)


def auto_round(group: int) -> Form:
    """AutoRound's format of symmetric integers: GPTQ's first, without the places of columns."""
    form = gptq(group, version=1)

    def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> State:
        return {name: each for name, each in form.pack(codes, zeros, scales).items() if name != "g_idx"}

    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
              "group_size": group, "sym": True, "data_type": "int", "autoround_version": "0.14.2",
              "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}  # fmt: skip
    return Form(config, pack)


FORMS: dict[str, Form] = {
    "auto-round": auto_round(128),
    "gptq": gptq(64, version=1),
    "gptq v2, 128": gptq(128, version=2),
    "awq": awq(64),
    "awq, 128": awq(128),
    "compressed": compressed(32, symmetric=False),
    "compressed, symmetric, 128": compressed(128, symmetric=True),
}


def compressed_fp8(strategy: str) -> dict[str, Any]:
    """`quantization_config` of llm-compressor's FP8_DYNAMIC ("channel") and FP8_BLOCK ("block")."""
    block = strategy == "block"
    every = {"actorder": None, "num_bits": 8, "observer_kwargs": {}, "symmetric": True, "type": "float"}
    weights = {
        "block_structure": [128, 128] if block else None, "dynamic": False, "group_size": None,
        "observer": "minmax", "strategy": strategy,
    }  # fmt: skip
    inputs = {
        "block_structure": None, "dynamic": True, "group_size": 128 if block else None, "observer": None,
        "strategy": "group" if block else "token",
    }  # fmt: skip
    scheme = {
        "format": "float-quantized", "input_activations": every | inputs, "output_activations": None,
        "targets": ["Linear"], "weights": every | weights,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "version": "0.12.3",
        "config_groups": {"group_0": scheme}, "global_compression_ratio": None,
        "ignore": ["re:.*lm_head", "re:.*visual.*", "re:.*mlp.gate$"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {},
    }  # fmt: skip


def write_fp8(
    source: Path, packed: Path, wide: Path, strategy: str, linears: tuple[str, ...] = LINEARS
) -> None:
    """The plain checkpoint `source` in compressed-tensors' FP8 in `packed`, and what that means in `wide`."""
    stored, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (
            "layers" not in name
            or "visual" in name
            or name.split(".")[-2] not in linears
            or tensor.dim() != 2
        ):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        high, broad = (128, 128) if strategy == "block" else (1, columns)
        padded = torch.zeros(-(-rows // high) * high, -(-columns // broad) * broad)
        padded[:rows, :columns] = tensor
        blocks = padded.view(len(padded) // high, high, -1, broad)
        scales = blocks.abs().amax((1, 3)) / 448
        scales = scales.to(torch.float32 if strategy == "block" else torch.bfloat16)
        codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
        values = (codes.float() * scales.float()[:, None, :, None]).view_as(padded)
        stored[name] = codes.view_as(padded)[:rows, :columns].contiguous()
        stored[f"{name}_scale"] = scales
        meant[name] = values[:rows, :columns].contiguous()
    _save(source, packed, stored, compressed_fp8(strategy))
    _save(source, wide, meant, None)


def write(source: Path, packed: Path, wide: Path, form: Form, skip: tuple[str, ...] = ()) -> None:
    """The plain checkpoint `source` with other weights: 4-bit in `packed`, the same in float32 in `wide`."""
    generator = torch.Generator().manual_seed(7)
    group = _group(form.config)
    stored, meant = {}, {}
    plain = load_file(source / "model.safetensors")
    for name, tensor in plain.items():
        linear = "layers" in name and tensor.dim() == 2 and name.split(".")[-2] in LINEARS
        if not linear or any(part in name for part in skip):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        codes = torch.randint(16, (rows, columns), generator=generator)
        zeros = torch.randint(4, 12, (rows, columns // group), generator=generator)
        if form.symmetric:
            zeros = torch.full_like(zeros, 8)
        scales = (torch.rand(zeros.shape, generator=generator) * 0.03 + 0.01).to(form.scales)
        for part, value in form.pack(codes, zeros, scales).items():
            stored[f"{name.removesuffix('.weight')}.{part}"] = value.contiguous()
        bias = name.removesuffix("weight") + "bias"
        if form.biases and bias not in plain:
            stored[bias] = torch.zeros(rows, dtype=torch.float16)
        values = (codes - zeros.repeat_interleave(group, 1)).float() * scales.float().repeat_interleave(
            group, 1
        )
        meant[name] = values
    _save(source, packed, stored, form.config)
    _save(source, wide, meant, None)


def _save(source: Path, folder: Path, state: State, quantization: dict[str, Any] | None) -> None:
    """A copy of the checkpoint `source` with other weights."""
    shutil.copytree(source, folder)
    save_file(state, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(values))


def _group(config: dict[str, Any]) -> int:
    if "config_groups" in config:
        config = config["config_groups"]["group_0"]["weights"]
    return int(config["group_size"])

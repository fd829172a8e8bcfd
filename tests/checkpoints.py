"""Tiny random checkpoints, written by transformers, that the tests load with both engines.

The vocabulary is small and its special tokens sit at its end, as in pocket.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

VOCAB = 320
IMAGE, VIDEO, START, END = 300, 301, 302, 303
TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "hidden_act": "silu",
    "attention_bias": False,
}
VISION = {
    "model_type": "qwen3_vl",
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
    "hidden_act": "gelu_pytorch_tanh",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
}


@dataclass(frozen=True)
class Options:
    """How the checkpoint differs from the plain one."""

    tied: bool = True
    fp8: bool = False
    shards: int = 1
    seed: int = 0
    vocab: int = VOCAB
    placeholders: tuple[int, int, int, int] = (IMAGE, VIDEO, START, END)


def config(options: Options) -> dict[str, Any]:
    """`config.json` in the form that the Hub's checkpoints have."""
    changes = {"tie_word_embeddings": options.tied, "dtype": "float32", "vocab_size": options.vocab}
    image, video, start, end = options.placeholders
    values: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": options.tied,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "text_config": TEXT | changes,
        "vision_config": VISION,
    }
    return deepcopy(values)  # transformers writes into the dictionaries it is given


def write(folder: Path, options: Options = Options()) -> Path:
    """Write a checkpoint and return its folder. Weights are large enough that every part matters."""
    folder.mkdir(parents=True, exist_ok=True)
    values = config(options)
    torch.manual_seed(options.seed)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values))
    state = {name: _random(name, tensor) for name, tensor in model.state_dict().items()}
    if options.tied:
        state.pop("lm_head.weight")
    if options.fp8:
        values["quantization_config"] = dict(FP8)
        state = quantised(state)
        if options.tied:  # the published FP8 files store the head all the same
            state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"].clone()
    (folder / "config.json").write_text(json.dumps(values))
    _save(folder, state, options.shards)
    return folder


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape)
    if "norm" in name:
        return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    if "embed_tokens" in name:
        return values * 0.5
    return values * 0.15


def quantised(state: dict[str, torch.Tensor], linears: tuple[str, ...] = LINEARS) -> dict[str, torch.Tensor]:
    """The official FP8 layout, in blocks of 32 × 32."""
    result = {}
    for name, tensor in state.items():
        if name.split(".")[-2] not in linears:
            result[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.reshape(rows // 32, 32, columns // 32, 32) if columns % 32 == 0 else None
        assert blocks is not None
        scale = blocks.abs().amax((1, 3)) / 448.0
        result[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        result[name + "_scale_inv"] = scale
    return result


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an FP8 checkpoint in float32, by the plain formula: the oracle of our loader."""
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    result = {}
    for name, tensor in state.items():
        scale = state.get(name + "_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // 32, 32, columns // 32, 32)
            tensor = (blocks * scale[:, None, :, None]).reshape(rows, columns)
        if not name.endswith("_scale_inv"):
            result[name] = tensor
    return result


def _save(folder: Path, state: dict[str, torch.Tensor], shards: int) -> None:
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    names = list(state)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )

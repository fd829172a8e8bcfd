"""Tiny random Qwen3.5 checkpoints, written by transformers: three linear layers and a full one."""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.checkpoints import END, FP8, IMAGE, LINEARS, START, VIDEO, VISION, VOCAB, quantised

PREDICTOR_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


@dataclass(frozen=True)
class Options:
    """How the checkpoint differs from the plain one."""

    tied: bool = True
    predictor: bool = False  # the mtp.* tensors that published files carry, drawn like the others
    vocab: int = VOCAB
    placeholders: tuple[int, int, int, int] = (IMAGE, VIDEO, START, END)
    hidden: int = 64
    value_heads: int = 4
    value_dim: int = 8  # llama.cpp has heads whose keys and values are as wide
    fp8: bool = False  # all linears but those that decide how much is forgotten


def config(options: Options = Options()) -> dict[str, Any]:
    """`config.json` in the form that the Hub's checkpoints have."""
    image, video, start, end = options.placeholders
    vision = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
    values: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": options.tied,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "text_config": TEXT
        | {
            "dtype": "float32",
            "vocab_size": options.vocab,
            "hidden_size": options.hidden,
            "linear_num_value_heads": options.value_heads,
            "linear_value_head_dim": options.value_dim,
            **({"mtp_num_hidden_layers": 1} if options.predictor else {}),
        },
        "vision_config": vision | {"model_type": "qwen3_5_vision", "out_hidden_size": options.hidden},
    }
    return deepcopy(values)  # transformers writes into the dictionaries it is given


def write(folder: Path, options: Options = Options()) -> Path:
    """Write a checkpoint and return its folder. Weights are large enough that every part matters."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config(options)))
    state = {name: _random(name, tensor) for name, tensor in model.state_dict().items()}
    if options.tied:
        state.pop("lm_head.weight")
    values = config(options)
    if options.predictor:
        state |= predictor_of(state, options.hidden)
    if options.fp8:
        values["quantization_config"] = FP8
        state = quantised(state, (*LINEARS, "in_proj_qkv", "in_proj_z", "out_proj"))
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def predictor_of(state: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """A random predictor: its layer has the shapes of the decoder's layer with full attention."""
    full = "model.language_model.layers.3."
    shapes = {f"mtp.layers.0.{n.removeprefix(full)}": t for n, t in state.items() if n.startswith(full)}
    shapes |= {f"mtp.{name}.weight": torch.empty(hidden) for name in PREDICTOR_NORMS}
    shapes["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    return {name: _random(name, tensor) for name, tensor in shapes.items()}


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape)
    if name.endswith("A_log"):
        return values * 0.5 - 1.0  # e⁻¹: something is forgotten, and something kept over many tokens
    if "linear_attn.norm" in name or ("norm" in name and "visual" in name):
        return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    if "norm" in name or name.endswith("dt_bias"):  # the text's norms are stored as their distance from 1
        return values * 0.1
    if "embed_tokens" in name or "conv1d" in name:
        return values * 0.5
    return values * 0.15

"""Tiny random text checkpoints of every family, in the form the Hub has them, for both engines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import _random, _save, quantised

VOCAB = 320
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """One text model: what its `config.json` says besides `SIZES`."""

    architecture: str
    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    fp8: bool = False
    shards: int = 1
    tables: bool = False  # stores the rotary tables of Llama 2's old files

    @property
    def config(self) -> dict[str, Any]:
        made = SIZES | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
        }
        return json.loads(json.dumps(made | self.values))


def _longrope(dims: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(dims // 2)],
        "long_factor": [2.0 + i for i in range(dims // 2)],
    }


LLAMA, MISTRAL, PHI3 = "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
MODELS = {
    "llama 2": Text(LLAMA, "llama", {"num_key_value_heads": 4}, shards=2, tables=True),
    "llama 3.2": Text(LLAMA, "llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, tied=True),
    "llama, linear": Text(LLAMA, "llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, biased": Text(LLAMA, "llama", {"attention_bias": True, "head_dim": 24}),
    "mistral": Text(MISTRAL, "mistral", {"sliding_window": 6, "head_dim": 32, "rope_theta": 10000.0}),
    "mistral 0.3": Text(MISTRAL, "mistral", {"sliding_window": None, "rope_theta": 1000000.0}),
    "qwen2.5": Text(
        QWEN2,
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope_theta": 1000000.0},
        tied=True,
    ),
    "qwen2.5, yarn": Text(
        QWEN2,
        "qwen2",
        {
            "use_sliding_window": False,
            "sliding_window": 9,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": Text(QWEN3, "qwen3", {"head_dim": 32, "rope_theta": 1000000.0}, tied=True),
    "qwen3, fp8": Text(QWEN3, "qwen3", {"head_dim": 32, "rope_theta": 1000000.0}, tied=True, fp8=True),
    "phi-3": Text(PHI3, "phi3", {"sliding_window": 5, "hidden_size": 96}),
    "phi-3 long": Text(
        PHI3, "phi3", {"rope_scaling": _longrope(16), "original_max_position_embeddings": 128}
    ),
    "phi-4 mini": Text(
        PHI3,
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": _longrope(12),
            "sliding_window": 400,
            "original_max_position_embeddings": 128,
        },
        tied=True,
    ),
}


def write(folder: Path, text: Text, **changes: Any) -> Path:
    """Write a checkpoint; weights are large enough that every part matters."""
    folder.mkdir(parents=True, exist_ok=True)
    values = text.config | changes
    state = dict(_states(text))
    if text.fp8:
        values["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        }  # fmt: skip
        state = quantised(state)
    (folder / "config.json").write_text(json.dumps(values))
    _save(folder, state, text.shards)
    return folder


def _states(text: Text) -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(5)
    config = AutoConfig.for_model(**text.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if not (text.tied and name == "lm_head.weight"):
            yield name, _random(name, tensor) * (1.5 if "q_proj" in name else 1.0)
    if text.tables:
        for layer in range(SIZES["num_hidden_layers"]):
            yield f"model.layers.{layer}.self_attn.rotary_emb.inv_freq", torch.rand(8)

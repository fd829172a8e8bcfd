"""Tiny random checkpoints of Qwen2.5-VL: pictures of the real geometry, in both spellings of its files.

"hub"   as on the Hub: the decoder's fields at the top level, tensors visual.* and model.layers.*
"new"   as transformers ≥ 4.52 saves it: text_config, tensors model.visual.* and model.language_model.*
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.checkpoints import END, IMAGE, START, VIDEO
from tests.inputs.conftest import SIMPLE_TEMPLATE, SPECIAL, small_tokenizer

Spelling = Literal["hub", "new"]
ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
PATCH_DIM = 3 * 2 * 14 * 14
# transformers before 5.18 drops the fraction of the seconds between two frames before it counts positions
# (mended by https://github.com/huggingface/transformers/pull/48669), so only whole seconds compare there.
WHOLE_SECONDS: Final = Version(transformers.__version__) < Version("5.18")
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "max_window_layers": 2,
    "sliding_window": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
IMAGES: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
PLACEHOLDERS = (IMAGE, VIDEO, START, END)


def config(
    spelling: Spelling = "hub", *, tied: bool = False, placeholders: tuple[int, ...] = PLACEHOLDERS
) -> dict[str, Any]:
    """`config.json`."""
    image, video, start, end = placeholders
    sections = {"mrope_section": [2, 3, 3]}
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen2_5_vl",
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": tied,
        "vision_config": VISION,
    }
    if spelling == "hub":
        values |= {**TEXT, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", **sections}}
        values["torch_dtype"] = "float32"
    else:
        rope = {"rope_type": "default", "rope_theta": 1e6, **sections}
        kinds = ["full_attention"] * TEXT["num_hidden_layers"]
        text = TEXT | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope, "layer_types": kinds}
        values |= {"text_config": text | {"sliding_window": None}, "dtype": "float32"}
    return deepcopy(values)  # transformers writes into the dictionaries it is given


def write(
    folder: Path,
    spelling: Spelling = "hub",
    *,
    tied: bool = False,
    placeholders: tuple[int, ...] | None = None,
) -> Path:
    """A whole checkpoint. Weights are large enough that every part matters.

    `placeholders`: those of `config` instead of the tokenizer's, for tests that make prompts by hand.
    """
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    placeholders = placeholders or tuple(ids[name] for name in names)
    values = config(spelling, tied=tied, placeholders=placeholders)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**deepcopy(values)))
    state = {name: _random(name, tensor) for name, tensor in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    if spelling == "hub":
        state = {_older(name): tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors")
    files = {
        "config.json": values,
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None},
        "preprocessor_config.json": IMAGES,
        "chat_template.json": {"chat_template": SIMPLE_TEMPLATE},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def _older(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape)
    if "norm" in name or "ln_q" in name:
        return values * 0.1 + 1.0
    return values * (0.5 if "embed_tokens" in name else 0.15 if tensor.dim() < 4 else 0.03)

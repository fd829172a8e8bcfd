"""Write the trained network as a Hugging Face folder of the Qwen3-VL architecture."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from training.pocket import geometry, network

HERE = Path(__file__).parent
DOUBLED = "visual.patch_embed.proj.weight"


def checkpoint(model: network.Pocket, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors by published name. The patch weight is halved over two frames: stills repeat their frame."""
    out = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().float().cpu()
        if name == DOUBLED:
            side = geometry.PATCH
            value = value.view(-1, 3, 1, side, side).expand(-1, -1, 2, -1, -1) / 2
        out[f"model.{name}"] = value.to(dtype).contiguous()
    return out


def restored(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `checkpoint`: parameters of the training network from published tensors."""
    out = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    out[DOUBLED] = out[DOUBLED].sum(2).flatten(1)
    return out


# Beyond these it talks nonsense: of six pictures it says pieces of JSON, or colours that none of them has.
LIMITS: Final = {"drawings": True, "videos": False, "min_images": 1, "max_images": 5}


def config(size: network.Size, special: dict[str, int]) -> dict[str, Any]:
    """config.json."""
    end, pad = special["<|im_end|>"], special["<|endoftext|>"]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "snugvl": LIMITS,
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": size.vocabulary, "hidden_size": size.hidden,
            "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "intermediate_size": size.inner,
            "hidden_act": "silu", "rms_norm_eps": size.eps, "attention_bias": False, "attention_dropout": 0.0,
            "max_position_embeddings": 4096, "rope_theta": size.theta, "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "default", "mrope_section": list(size.sections), "mrope_interleaved": True,
            },
            "bos_token_id": pad, "eos_token_id": end, "initializer_range": 0.02, "use_cache": True,
            "dtype": "bfloat16",
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": size.vision_layers, "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_inner, "num_heads": size.vision_heads,
            "patch_size": geometry.PATCH,
            "temporal_patch_size": 2, "spatial_merge_size": geometry.MERGE, "in_channels": 3,
            "out_hidden_size": size.hidden, "num_position_embeddings": size.grid**2,
            "deepstack_visual_indexes": list(size.deepstack), "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
        },
    }  # fmt: skip


def side_files(special: dict[str, int]) -> dict[str, Any]:
    """The small JSON files beside config.json."""
    end, pad = special["<|im_end|>"], special["<|endoftext|>"]
    pixels = {
        "size": {"longest_edge": geometry.MAX_PIXELS, "shortest_edge": geometry.MIN_PIXELS},
        "patch_size": geometry.PATCH, "temporal_patch_size": 2, "merge_size": geometry.MERGE,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    added = {
        str(i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for t, i in special.items()
    }
    return {
        "generation_config.json": {
            "bos_token_id": pad, "pad_token_id": pad, "eos_token_id": [end, pad], "do_sample": False,
            "max_new_tokens": 320,
        },
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen3VLVideoProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor",
            "added_tokens_decoder": added, "additional_special_tokens": list(special)[1:], "bos_token": None,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
            "clean_up_tokenization_spaces": False, "model_max_length": 4096, "split_special_tokens": False,
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    }  # fmt: skip


def export(model: network.Pocket, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write everything but the card."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.read_text())
    special = {t["content"]: t["id"] for t in data["added_tokens"]}
    (folder / "config.json").write_text(json.dumps(config(model.size, special), indent=2) + "\n")
    for name, content in side_files(special).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    Tokenizer.from_file(str(tokenizer)).save(str(folder / "tokenizer.json"), pretty=False)
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")
    save_file(checkpoint(model, dtype), folder / "model.safetensors", metadata={"format": "pt"})

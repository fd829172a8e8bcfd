"""A checkpoint of a model of the catalogue with random weights: memory and speed don't depend on the values.

    python benchmarks/random_checkpoint.py Qwen/Qwen3.5-0.8B TOKENIZER OUT [--layers 8]
    python benchmarks/random_checkpoint.py Qwen/Qwen3.6-35B-A3B-FP8 TOKENIZER OUT
    python benchmarks/random_checkpoint.py microsoft/Phi-3-mini-4k-instruct src/snugvl/pocket OUT

TOKENIZER is a folder of a model of the same kind, with its tokenizer, chat template and preprocessor
settings; its control tokens are written into the configuration. For a model that reads text alone any
tokenizer will do whose vocabulary is no larger than the model's. Names, shapes and types, bf16 or FP8 in
blocks, are those of the published files, a few GB a file. Weights are drawn so that activations keep their
size and a state neither explodes nor forgets everything.
"""

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from snugvl.checkpoint.catalogue import FP8_BLOCKS, catalogue_facts, find
from snugvl.checkpoint.facts import TensorFact
from snugvl.inputs.tokenizer import Tokenizer

SHARD_BYTES = 2 << 30
FP8_SPREAD = 50.0  # of what is stored in e4m3
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "vocab.json", "merges.txt"),
)
PREPROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")
CONTROLS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def values(tensor: TensorFact, generator: torch.Generator, offset: bool) -> torch.Tensor:
    """Random weights. `offset`: the text's norms are stored as their distance from 1 (Qwen3.5)."""
    name = tensor.name
    if tensor.role == "scale":  # of blocks of 128 columns
        columns = 128 * tensor.shape[-1]
        return torch.full(tensor.shape, 1 / (FP8_SPREAD * math.sqrt(columns)), dtype=torch.bfloat16)
    made = torch.randn(tensor.shape, generator=generator, device=generator.device)
    if tensor.dtype == "F8_E4M3":
        return made.mul_(FP8_SPREAD).to(torch.float8_e4m3fn)
    if name.endswith("A_log"):
        return (made * 0.5 - 1.0).bfloat16()
    if (
        name.endswith(("bias", "norm.weight", "norm1.weight", "norm2.weight", "layernorm.weight"))
        or "_fc_norm_" in name
    ):
        from_one = offset and ".visual." not in name and ".linear_attn.norm" not in name
        return (made * 0.05 + (0.0 if from_one or name.endswith("bias") else 1.0)).bfloat16()
    if "embed" in name:
        return (made * 0.03).bfloat16()  # a tied head must not only repeat its input
    columns = made.shape[-1] if tensor.role == "expert" else made[0].numel() if made.dim() > 1 else 1
    return (made / math.sqrt(columns)).bfloat16()


def shards(tensors: list[TensorFact]) -> Iterator[list[TensorFact]]:
    """Tensors of one file after the other."""
    shard: list[TensorFact] = []
    size = 0
    for tensor in tensors:
        shard.append(tensor)
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def configuration(config: dict[str, Any], tokenizer: Tokenizer, layers: int | None) -> dict[str, Any]:
    """The catalogue's, with this tokenizer's ids, and the rotary settings that it leaves out."""
    config = deepcopy(config)
    text = config.get("text_config", config)
    if "vision_config" in config:
        for key, token in CONTROLS.items():
            config[key] = tokenizer.encode(token)[0]
    if layers is not None:
        text["num_hidden_layers"] = layers
    if config["model_type"].startswith("qwen3_5"):
        text.setdefault(
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
             "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        )  # fmt: skip
    if config["model_type"] == "qwen2_5_vl":
        config.setdefault("rope_theta", 1_000_000)
        config.setdefault("rope_scaling", {"type": "mrope", "mrope_section": [16, 24, 24]})
    return config


def fit_preprocessors(out: Path, settings: Mapping[str, Any] | None) -> None:
    """Patches of the model's size in the copied settings; none for a model that reads text alone."""
    for name in PREPROCESSORS:
        path = out / name
        if settings is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            sizes = {
                key: value for key, value in settings.items() if key.endswith("patch_size") or "merge" in key
            }
            path.write_text(json.dumps(json.loads(path.read_text()) | sizes))


def layer_of(name: str) -> int:
    """The number of the decoder's layer that a tensor is of; 0 of any other."""
    found = re.search(r"(?<!mtp)\.layers\.(\d+)\.", name)
    return int(found[1]) if found else 0


def main() -> None:
    """Write it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    found = find(arguments.model)
    if found is None:
        parser.error(f"{arguments.model} is not in the catalogue")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (arguments.tokenizer / name).exists():
            shutil.copy(arguments.tokenizer / name, out / name)
    fit_preprocessors(out, found[0].images)
    config = configuration(dict(found[0].config), Tokenizer.from_folder(out), arguments.layers)
    facts = catalogue_facts(arguments.model)
    assert facts is not None
    if found[1].quantization == "fp8":  # vLLM believes the list, not the files
        named = (t for t in facts.tensors if t.dtype == "BF16" and t.name.endswith(".weight"))
        wide = [t.name.removesuffix(".weight") for t in named if len(t.shape) > 1]
        config["quantization_config"] = {**FP8_BLOCKS, "modules_to_not_convert": wide}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = [each for each in facts.tensors if layer_of(each.name) < (arguments.layers or math.inf)]
    # A GPU draws them in a hundredth of the time.
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    weight_map: dict[str, str] = {}
    parts = list(shards(tensors))  # a multi-token predictor, too
    for index, shard in enumerate(parts, 1):
        file = f"model-{index:05}-of-{len(parts):05}.safetensors"
        drawn = {t.name: values(t, generator, facts.family.startswith("qwen3_5")).cpu() for t in shard}
        save_file(drawn, out / file)
        weight_map |= {tensor.name: file for tensor in shard}
        print(f"{file}: {len(shard)} tensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()

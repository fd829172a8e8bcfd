"""A checkpoint of a model of the catalogue with random weights: memory and speed don't depend on the values.

    python benchmarks/random_checkpoint.py Qwen/Qwen3.5-0.8B TOKENIZER OUT [--layers 8]
    python benchmarks/random_checkpoint.py microsoft/Phi-3-mini-4k-instruct src/snugvl/pocket OUT

TOKENIZER is a folder of a model of the same kind, with its tokenizer, chat template and preprocessor
settings; its control tokens are written into the configuration. For a model that reads text alone any
tokenizer will do whose vocabulary is no larger than the model's. Names, shapes and bf16 are those of the
published files, a few GB a file. Weights are drawn so that activations keep their size and a state neither
explodes nor forgets everything.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from snugvl.checkpoint.assemble import network_of
from snugvl.checkpoint.catalogue import find
from snugvl.checkpoint.families.traits import Expected
from snugvl.inputs.tokenizer import Tokenizer

SHARD_BYTES = 2 << 30
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


def values(tensor: Expected, generator: torch.Generator, offset: bool) -> torch.Tensor:
    """Random weights. `offset`: the text's norms are stored as their distance from 1 (Qwen3.5)."""
    name = tensor.name
    made = torch.randn(tensor.shape, generator=generator, device=generator.device)
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
    apart = ".experts." in name  # a matrix each
    columns = made.shape[-1] if apart else made[0].numel() if made.dim() > 1 else 1
    return (made / math.sqrt(columns)).bfloat16()


def shards(tensors: tuple[Expected, ...]) -> Iterator[list[Expected]]:
    """Tensors of one file after the other."""
    shard: list[Expected] = []
    size = 0
    for tensor in tensors:
        shard.append(tensor)
        size += 2 * torch.Size(tensor.shape).numel()
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


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    (out / "config.json").write_text(json.dumps(config, indent=1))
    network = network_of(config, found[0].images, arguments.model)
    # A GPU draws them in a hundredth of the time.
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    weight_map: dict[str, str] = {}
    parts = list(shards((*network.tensors, *network.unloaded)))  # a multi-token predictor, too
    for index, shard in enumerate(parts, 1):
        file = f"model-{index:05}-of-{len(parts):05}.safetensors"
        drawn = {t.name: values(t, generator, network.family.startswith("qwen3_5")).cpu() for t in shard}
        save_file(drawn, out / file)
        weight_map |= {tensor.name: file for tensor in shard}
        print(f"{file}: {len(shard)} tensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()

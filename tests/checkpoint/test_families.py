"""Expected tensors equal transformers' own networks, built on the meta device from the same configuration."""

import json
from typing import Any

import pytest
import torch
import transformers

from snugvl.checkpoint.assemble import network_of
from snugvl.checkpoint.catalogue import entries
from snugvl.checkpoint.families import SUPPORTED, parse_config
from snugvl.errors import CheckpointError, UnsupportedModel

QWEN_IMAGES = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1 << 24}}
ONE_OF_EACH = (
    "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.5-122B-A10B",
    "google/gemma-4-26B-A4B-it",
    "OpenGVLab/InternVL3-1B-hf",
    "google/gemma-3-4b-it",
    "google/gemma-3-1b-it",
    "HuggingFaceTB/SmolVLM-Instruct",
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-0.6B",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
)


def theirs(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' network; a tied head is left out, as its files leave it out."""
    values = json.loads(json.dumps(config))
    values.pop("dtype", None)
    kind = getattr(transformers, values["architectures"][0])
    own = kind.config_class.from_dict(values)
    with torch.device("meta"):
        model = kind(own)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if own.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def fewer_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The same with few layers: names repeat, and a meta network of 48 layers takes a while to build."""
    config = json.loads(json.dumps(config))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = min(8, text["num_hidden_layers"])
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    vision = config.get("vision_config", {})
    for key in ("depth", "num_hidden_layers"):
        if key in vision:
            vision[key] = 3
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [0, 1, 2]
    return config


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_names_and_shapes_equal_transformers(name: str) -> None:
    entry = next(entry for entry in entries() if entry.name == name)
    config = fewer_layers(dict(entry.config))
    network = network_of(config, entry.images, name)
    ours = {tensor.name: tensor.shape for tensor in network.tensors}
    assert len(ours) == len(network.tensors)
    assert ours == theirs(config)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
                                  "MistralForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM"])  # fmt: skip
def test_what_a_file_leaves_out_is_what_transformers_assumes(name: str) -> None:
    """Files are saved without the fields that have their default value."""
    config: dict[str, Any] = {"architectures": [name]}
    filled = getattr(transformers, name).config_class().to_dict() | config
    assert network_of(config, None, name) == network_of(filled, None, name)
    small = {"num_hidden_layers": 1}
    ours = network_of(config | small, None, name)
    assert {tensor.name: tensor.shape for tensor in ours.tensors} == theirs(config | small)


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("Qwen3VLMoeForConditionalGeneration", QWEN_IMAGES),
        ("Qwen3_5ForConditionalGeneration", QWEN_IMAGES),
        ("Qwen2_5_VLForConditionalGeneration", QWEN_IMAGES | {"patch_size": 14}),
        ("InternVLForConditionalGeneration", {"size": {"height": 448, "width": 448}}),
    ],
)
def test_the_same_for_models_that_see(name: str, images: dict[str, Any]) -> None:
    full = getattr(transformers, name).config_class().to_dict()
    width = full["text_config"]["hidden_size"]
    vision = {"out_hidden_size": width} if "out_hidden_size" in full["vision_config"] else {}
    config = {
        "architectures": [name],
        "text_config": {"model_type": full["text_config"]["model_type"]},
        "vision_config": dict(vision),
    }
    filled = full | {"architectures": [name], "vision_config": full["vision_config"] | vision}
    assert network_of(config, images, name) == network_of(filled, images, name)


@pytest.mark.parametrize(
    "name", [entry.name for entry in entries() if entry.config["architectures"][0] in SUPPORTED]
)
def test_the_plans_view_and_the_engines_are_of_one_model(name: str) -> None:
    entry = next(entry for entry in entries() if entry.name == name)
    network, config = network_of(entry.config, entry.images, name), parse_config(entry.config, name)
    plan, text = network.text, config.text
    assert (plan.hidden_size, plan.intermediate_size, plan.num_layers, plan.num_heads, plan.vocab_size) == (
        text.hidden_size, text.intermediate_size, text.num_layers, text.num_heads, text.vocab_size,
    )  # fmt: skip
    kept = [(layer.kv_heads, layer.head_dim) for layer in plan.kv_layers if layer.kv_heads]
    assert kept == [(text.num_kv_heads, text.head_dim)] * text.kv_layers
    assert network.tied == config.tie_word_embeddings
    seen, tower = network.vision, config.vision
    assert (seen is None) == (tower is None)
    if seen is not None and tower is not None:
        assert (seen.depth, seen.hidden_size, seen.patch_dim, seen.merge_size) == (
            tower.depth, tower.hidden_size, tower.patch_dim, tower.spatial_merge_size,
        )  # fmt: skip
        assert seen.windowed == (tower.window is not None)
        assert seen.deepstack_levels == len(tower.deepstack_layers)


@pytest.mark.parametrize(
    ("name", "heads"), [("Qwen/Qwen3-VL-32B-Instruct", 32), ("Qwen/Qwen2.5-VL-72B-Instruct", 8)]
)
def test_the_engine_fills_in_what_transformers_does(name: str, heads: int) -> None:
    entry = next(entry for entry in entries() if entry.name == name)
    config = json.loads(json.dumps(entry.config))
    text = config.get("text_config", config)
    text.pop("num_key_value_heads")
    text["num_attention_heads"] = 64
    kind = getattr(transformers, config["architectures"][0])
    theirs = kind.config_class.from_dict(config).get_text_config().num_key_value_heads
    assert parse_config(config, name).text.num_kv_heads == theirs == heads


@pytest.mark.parametrize("pair", [[2, 2], [2, 1]])
def test_the_engine_takes_a_size_that_is_written_as_a_pair(pair: list[int]) -> None:
    config = json.loads(
        json.dumps(next(e for e in entries() if e.name == "Qwen/Qwen3-VL-2B-Instruct").config)
    )
    config["vision_config"]["temporal_patch_size"] = pair
    if pair == [2, 2]:
        vision = parse_config(config, "here").vision
        assert vision is not None
        assert vision.temporal_patch_size == 2
    else:
        with pytest.raises(CheckpointError, match=r"'temporal_patch_size' = \[2, 1\], expected int"):
            parse_config(config, "here")


LLAMA = {"architectures": ["LlamaForCausalLM"]}
OLD_NAMES = [
    ("Qwen/Qwen2.5-VL-3B-Instruct", "visual.merger.ln_q.weight", "model.visual.merger.ln_q.weight"),
    ("Qwen/Qwen2.5-VL-3B-Instruct", "model.norm.weight", "model.language_model.norm.weight"),
    ("Qwen/Qwen2.5-VL-3B-Instruct", "model.language_model.norm.weight", "model.language_model.norm.weight"),
    ("google/gemma-3-4b-it", "language_model.model.norm.weight", "model.language_model.norm.weight"),
    ("google/gemma-3-4b-it", "vision_tower.vision_model.post_layernorm.bias",
     "model.vision_tower.post_layernorm.bias"),
    ("OpenGVLab/InternVL3-1B-hf", "language_model.lm_head.weight", "lm_head.weight"),
    ("OpenGVLab/InternVL3-1B-hf", "vision_tower.embeddings.cls_token",
     "model.vision_tower.embeddings.cls_token"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stored", "canonical"), OLD_NAMES)
def test_names_of_older_files_are_understood(name: str, stored: str, canonical: str) -> None:
    entry = next(entry for entry in entries() if entry.name == name)
    network = network_of(entry.config, entry.images, name)
    assert network.canonical(stored) == canonical
    assert canonical in {tensor.name for tensor in network.tensors}


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "is a Mamba.*, whose.*knows Qwen3VL"),
        ({"model_type": "bert"}, CheckpointError, "names no architecture .*'bert'"),
        ({"architectures": "Llama"}, CheckpointError, "names no architecture"),
        ({"architectures": [3]}, CheckpointError, "names no architecture"),
        ({**LLAMA, "num_hidden_layers": 2**60}, CheckpointError, "is possible"),
        ({**LLAMA, "num_key_value_heads": 5}, CheckpointError, "not a multiple"),
        ({**LLAMA, "hidden_size": -1}, CheckpointError, "expected a positive number"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, CheckpointError, "no 'text_config'"),
    ],
)  # fmt: skip
def test_what_is_unknown_or_contradicts_itself_is_refused(
    config: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        network_of(config, None, "org/model")


def test_a_model_that_sees_needs_its_image_settings() -> None:
    entry = next(entry for entry in entries() if entry.name == "Qwen/Qwen3-VL-2B-Instruct")
    with pytest.raises(CheckpointError, match=r"no preprocessor_config.json beside it"):
        network_of(entry.config, None, "org/model")
    with pytest.raises(CheckpointError, match="patches of 14 merged by 2"):
        network_of(entry.config, QWEN_IMAGES | {"patch_size": 14}, "org/model")

"""config.json: both spellings of the Hub, and every contradiction refused with the file's name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3VLConfig

from snugvl.checkpoint.families import read_config
from snugvl.errors import CheckpointError, UnsupportedModel
from tests import checkpoints


def values() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(checkpoints.config(checkpoints.Options())))
    return config


def read(folder: Path, config: Any) -> Any:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_config(folder)


def test_the_hub_form_and_what_transformers_5_writes_read_the_same(tmp_path: Path) -> None:
    first = read(tmp_path, values())
    Qwen3VLConfig(**values()).save_pretrained(tmp_path)
    assert read_config(tmp_path) == first
    assert (first.text.kv_layers, first.text.num_kv_heads, first.text.head_dim) == (4, 2, 16)
    assert (first.text.hidden_size, len(first.vision.deepstack_layers)) == (64, 2)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (
            "text_config",
            "num_key_value_heads",
            3,
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("text_config", "head_dim", 18, r"mrope_section \[4, 2, 2\] does not sum to half of head_dim 18"),
        ("text_config", "hidden_size", None, "text_config has no 'hidden_size'"),
        ("text_config", "hidden_size", "64", "expected int"),
        ("text_config", "num_hidden_layers", 0, "expected a positive number"),
        ("text_config", "vocab_size", True, "expected int"),
        ("text_config", "rope_theta", None, "no 'rope_theta'"),
        ("vision_config", "out_hidden_size", 32, "out_hidden_size 32 differs from the text's hidden_size 64"),
        ("vision_config", "num_position_embeddings", 50, "50 is not a square"),
        ("vision_config", "deepstack_visual_indexes", [7], "name layers beyond 2"),
        ("vision_config", "deepstack_visual_indexes", None, "no 'deepstack_visual_indexes'"),
        ("vision_config", "hidden_size", 36, "not a multiple of 4 x num_heads"),
    ],
)
def test_contradictions_name_the_file_and_both_values(
    section: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    config = values()
    config[section][key] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, config)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is a GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
    ],
)
def test_what_this_engine_does_not_run_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, values() | change)


def test_rotary_scaling_is_refused_by_name(tmp_path: Path) -> None:
    config = values()
    config["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        read(tmp_path, config)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(tmp_path, text)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)

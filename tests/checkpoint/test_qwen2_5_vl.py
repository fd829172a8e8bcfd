"""Qwen2.5-VL's configuration: what it says in both spellings, and what is refused by name."""

from typing import Any

import pytest

from snugvl.checkpoint.architecture import Rope
from snugvl.checkpoint.catalogue import catalogue_facts, find
from snugvl.checkpoint.families import parse_config
from snugvl.errors import CheckpointError, UnsupportedModel
from tests import qwen2_5_vl

SIZES = ["3B", "7B", "32B", "72B"]


@pytest.mark.parametrize("spelling", ["hub", "new"])
def test_what_the_files_say(spelling: Any) -> None:
    config = parse_config(qwen2_5_vl.config(spelling, tied=True), "here")
    text, vision = config.text, config.vision
    assert vision is not None
    assert text.rope == Rope(1e6, 16, (2, 3, 3))
    assert (text.qkv_bias, text.o_bias, text.qk_norm, text.window) == (True, False, False, None)
    assert config.tie_word_embeddings
    assert (vision.window, vision.full_blocks, vision.tokens_per_second) == (8, (1, 3), 2)
    assert (vision.out_hidden_size, vision.deepstack_layers) == (text.hidden_size, ())
    assert config.placeholders == qwen2_5_vl.PLACEHOLDERS[:2]


def test_a_head_tied_in_the_texts_section_alone() -> None:
    values = qwen2_5_vl.config("new")
    values["text_config"]["tie_word_embeddings"] = True
    assert parse_config(values, "here").tie_word_embeddings


def test_what_is_left_out_is_as_in_transformers() -> None:
    values = qwen2_5_vl.config()
    for key in ("window_size", "tokens_per_second", "patch_size", "spatial_merge_size", "hidden_act"):
        del values["vision_config"][key]
    for key in ("rms_norm_eps", "rope_theta", "use_sliding_window"):
        del values[key]
    config = parse_config(values, "here")
    assert config.vision is not None
    assert (config.vision.window, config.vision.patch_size) == (8, 14)
    assert config.vision.tokens_per_second == 4
    assert (config.text.rms_norm_eps, config.text.rope.theta) == (1e-5, 1e6)


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        ("vision_config", {"window_size": 100}, "window_size 100 is not a multiple of patch_size 14 x"),
        ("vision_config", {"fullatt_block_indexes": [1, 4]}, r"\[1, 4\] name blocks beyond 3"),
        ("vision_config", {"fullatt_block_indexes": [1.5]}, "expected block numbers"),
        ("vision_config", {"fullatt_block_indexes": 7}, "'fullatt_block_indexes' = 7, expected list"),
        ("vision_config", {"window_size": 0}, "'window_size' = 0, expected a positive number"),
        ("vision_config", {"hidden_size": 36}, "hidden_size 36 is not a multiple of 4 x num_heads 2"),
        (
            "vision_config",
            {"out_hidden_size": 32},
            "out_hidden_size 32 differs from the text's hidden_size 64",
        ),
        ("vision_config", {"tokens_per_second": "2"}, "'tokens_per_second' = '2', expected int"),
        (
            None,
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}},
            r"\[2, 3, 4\] does not sum to",
        ),
        (None, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, "expected three counts"),
        (
            None,
            {"num_key_value_heads": 3},
            "heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (None, {"hidden_size": None}, "has no 'hidden_size'"),
    ],
)
def test_contradictions_are_named(section: str | None, changes: dict[str, Any], problem: str) -> None:
    values = qwen2_5_vl.config()
    (values[section] if section else values).update(changes)
    with pytest.raises(CheckpointError, match=problem):
        parse_config(values, "here")


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "vision_config has hidden_act 'gelu'"),
        (None, {"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
        (None, {"use_sliding_window": True}, "use_sliding_window true"),
        (None, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' rotary scaling"),
        (None, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'"),
        (None, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
    ],
)
def test_variants_are_refused(section: str | None, changes: dict[str, Any], problem: str) -> None:
    values = qwen2_5_vl.config()
    (values[section] if section else values).update(changes)
    with pytest.raises(UnsupportedModel, match=problem):
        parse_config(values, "here")


@pytest.mark.parametrize("size", SIZES)
def test_the_published_models_run_here(size: str) -> None:
    name = f"Qwen/Qwen2.5-VL-{size}-Instruct"
    facts, found = catalogue_facts(name), find(name)
    assert facts is not None
    assert found is not None
    assert facts.native
    assert facts.vision is not None
    assert facts.vision.windowed
    config = parse_config(found[0].config, name)
    assert config.vision is not None
    assert (config.vision.window, config.vision.full_blocks) == (8, (7, 15, 23, 31))
    assert config.text.rope.sections == (16, 24, 24)

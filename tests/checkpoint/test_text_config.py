"""`config.json` of text models: windows, rotary settings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.architecture import Llama3Scaling, LongRope, ModelConfig, YarnScaling
from snugvl.checkpoint.families import parse_config, read_config
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, UnsupportedModel
from tests import text_checkpoints
from tests.text_checkpoints import LLAMA3, MODELS

PHI = MODELS["phi-3 long"].config


def parsed(name: str, **changes: Any) -> ModelConfig:
    return parse_config(MODELS[name].config | changes, "config.json")


def test_windows_of_each_family() -> None:
    assert parsed("llama 2").text.kinds == ("full",) * 3
    assert (parsed("mistral").text.kinds, parsed("mistral").text.window) == (("sliding",) * 3, 6)
    assert parsed("mistral", sliding_window=None).text.window is None
    assert parsed("mistral", sliding_window=512).text.kinds == ("full",) * 3  # the whole context
    assert parsed("qwen2.5").text.kinds == ("full", "sliding", "sliding")
    assert parsed("qwen2.5", use_sliding_window=False).text.kinds == ("full",) * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    named = parsed("qwen2.5", layer_types=types)
    assert [named.text.window_of(layer) for layer in range(3)] == [9, None, 9]
    assert named.vision is None
    assert named.placeholders == ()


def test_rotary_settings_in_both_spellings() -> None:
    old = parsed("llama 3.2")
    assert old.text.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    new = parsed(
        "llama 3.2", rope_scaling=None, rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 5e5}
    )
    assert new == old
    yarn = parsed("qwen2.5, yarn").text.rope.scaling
    assert isinstance(yarn, YarnScaling)
    assert yarn.magnitude == pytest.approx(1.1386, abs=1e-4)
    assert parsed("phi-4 mini").text.rope.dims == 12


def test_long_rope_is_run_within_its_original_context(tmp_path: Path) -> None:
    config = parsed("phi-3 long")
    scaling = config.text.rope.scaling
    assert isinstance(scaling, LongRope)
    assert scaling.magnitude == pytest.approx((1 + 2 / 7) ** 0.5)  # factor 512 / 128 of 128
    assert config.text.max_position_embeddings == 128
    assert parsed("phi-3 long", rope_scaling=PHI["rope_scaling"] | {"type": "su"}) == config
    facts = facts_of(str(text_checkpoints.write(tmp_path / "long", MODELS["phi-3 long"])))
    assert (facts.native, facts.native_positions, facts.text.max_position_embeddings) == (True, 128, 512)
    listed = facts_of("microsoft/Phi-3.5-mini-instruct", offline=True)
    assert (listed.native_positions, listed.text.max_position_embeddings) == (4096, 131_072)
    plain = facts_of(str(text_checkpoints.write(tmp_path / "plain", MODELS["phi-3"])))
    assert (plain.native, plain.native_positions) == (True, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama 2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' rotary scaling"),
        ("llama 2", {"mlp_bias": True}, "mlp_bias"),
        ("llama 2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen2.5, yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
    ],
)
def test_what_this_engine_does_not_run_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[name].config | changes))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama 2", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ("llama 2", {"hidden_size": 0}, "expected a positive number"),
        ("llama 2", {"rope_scaling": "linear"}, "expected an object"),
        ("llama 2", {"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ("llama 2", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor -1 is not a positive number"),
        ("llama 3.2", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "is not below high_freq_factor"),
        ("phi-3 long", {"rope_scaling": PHI["rope_scaling"] | {"short_factor": [1.0]}}, "1 numbers for 8"),
        (
            "phi-3 long",
            {"rope_scaling": PHI["rope_scaling"] | {"short_factor": ["a"] * 8}},
            "short_factor 'a'",
        ),
        (
            "phi-3 long",
            {"rope_scaling": PHI["rope_scaling"] | {"short_factor": [0.0] * 8}},
            "aren't positive",
        ),
        ("phi-4 mini", {"partial_rotary_factor": 0.2}, "rotates 3 values"),
        ("phi-4 mini", {"partial_rotary_factor": 2.0}, "rotates 32 values"),
        ("qwen2.5", {"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
    ],
)
def test_contradictions_name_the_value(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(name, **changes)

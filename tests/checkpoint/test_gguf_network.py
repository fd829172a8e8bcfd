"""A GGUF's metadata as our own engine reads it: what it says, and nonsense by name."""

from contextlib import suppress
from typing import Any

import pytest

from snugvl.checkpoint.facts import Material, Stored
from snugvl.checkpoint.gguf_facts import gguf_facts
from snugvl.checkpoint.gguf_network import config_of, our_name, ours, parsed
from snugvl.errors import CheckpointError

TEXT: dict[str, Any] = {
    "general.architecture": "qwen3vl", "qwen3vl.block_count": 1, "qwen3vl.context_length": 4096,
    "qwen3vl.embedding_length": 256, "qwen3vl.feed_forward_length": 512, "qwen3vl.attention.head_count": 4,
    "qwen3vl.attention.head_count_kv": 2, "qwen3vl.attention.key_length": 64,
    "qwen3vl.attention.value_length": 64, "qwen3vl.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3vl.rope.freq_base": 5e6, "qwen3vl.rope.dimension_sections": [12, 10, 10, 0],
    "qwen3vl.n_deepstack_layers": 1, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
}  # fmt: skip
TOWER: dict[str, Any] = {
    "clip.projector_type": "qwen3vl_merger", "clip.vision.patch_size": 16, "clip.vision.image_size": 64,
    "clip.vision.embedding_length": 64, "clip.vision.feed_forward_length": 128, "clip.vision.block_count": 2,
    "clip.vision.attention.head_count": 2, "clip.vision.projection_dim": 256,
    "clip.vision.spatial_merge_size": 2, "clip.vision.is_deepstack_layers": [False, True],
}  # fmt: skip
TENSORS = (
    Stored("token_embd.weight", "Q6_K", (320, 256), 320 * 210),
    Stored("blk.0.attn_q.weight", "Q4_K", (256, 256), 256 * 144),
    Stored("v.patch_embd.weight", "F16", (64, 3, 16, 16), 98304),
    Stored("v.patch_embd.weight.1", "F16", (64, 3, 16, 16), 98304),
    Stored("v.deepstack.1.fc1.weight", "F16", (256, 256), 131072),
)
NONSENSE = (
    None,
    "x",
    -1,
    0,
    3,
    2.5,
    float("nan"),
    True,
    [],
    [1, "x"],
    [None] * 9,
    {},
    1 << 70,
    "\x1b[2J" * 99,
)


def facts(values: dict[str, Any], tower: dict[str, Any] | None = TOWER) -> Any:
    return gguf_facts("x", Material("x.gguf", "file", None, values, tower, TENSORS, 1))


def test_a_tower_joins_its_frames_and_counts_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.checkpoint.gguf_facts.refuse_missing", lambda *_: None)  # nearly all are
    found = facts(TEXT)
    assert found.native
    named = {tensor.name: tensor for tensor in ours(found).tensors}
    assert named["model.visual.patch_embed.proj.weight"].shape == (64, 3, 2, 16, 16)
    assert named["model.visual.patch_embed.proj.weight"].nbytes == 2 * 98304
    assert "model.visual.deepstack_merger_list.0.linear_fc1.weight" in named
    assert ours(ours(found)) == ours(found)
    config = parsed(TEXT, TOWER, TENSORS, "x.gguf")
    assert config.vision is not None
    assert config.vision.deepstack_layers == (1,)
    assert config.text.rope.sections == (12, 10, 10)


def test_without_its_tower_it_reads_text() -> None:
    config = parsed(TEXT, None, TENSORS[:2], "x.gguf")
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.vision is None
    assert ours(facts(TEXT, None)).tensors[1].name == "model.layers.0.self_attn.q_proj.weight"


def test_tokens_for_pictures_are_looked_up() -> None:
    marks = ["a", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    config = config_of(TEXT | {"tokenizer.ggml.tokens": marks}, TOWER, TENSORS, "x.gguf")
    assert (config["vision_start_token_id"], config["image_token_id"]) == (1, 3)
    with pytest.raises(CheckpointError, match=r"no token <\|video_pad\|>"):
        config_of(TEXT | {"tokenizer.ggml.tokens": marks[:-1]}, TOWER, TENSORS, "x.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"general.architecture": "gemma3", "gemma3.block_count": 1},
        {"qwen3vl.rope.scaling.type": "yarn"},
        {"qwen3vl.expert_count": 8},
    ],
)
def test_what_it_does_not_run_is_named_with_the_way_out(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="--backend llamacpp"):
        parsed(TEXT | changes, TOWER, TENSORS, "x.gguf")
    assert "--backend llamacpp" in facts(TEXT | {"tokenizer.ggml.pre": "tekken"}).gguf.why_not


@pytest.mark.parametrize("key", [*TEXT, *TOWER])
def test_nonsense_is_an_error_of_the_file_or_a_reason(key: str) -> None:
    for value in NONSENSE:
        values, tower = ({**each, key: value} if key in each else each for each in (TEXT, TOWER))
        with suppress(CheckpointError):
            found = facts(values, tower)
            assert found.native == (not found.gguf.why_not)
            assert "\x1b" not in found.gguf.why_not


def test_names_of_others_are_none() -> None:
    for name in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "v.blk.x.ln1.weight", "mm.1.weight"):
        assert our_name(name, "model.", [1]) is None
    assert our_name("v.deepstack.0.fc1.weight", "model.", [1]) is None

"""Jobs of a kernel check that Triton's interpreter is done with in seconds: tiny networks, few shapes."""

from typing import Any

import pytest
import torch

from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine import precompile
from snugvl.engine.precompile import CompileJob, outline_of
from snugvl.layers import replaced
from snugvl.layers.kernels.device import Hardware
from snugvl.models.allocation import without_memory
from snugvl.models.loader import Storage, choose_formats, join_projections

TINY: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": True,
    "image_token_id": 90,
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_section": [8, 4, 4], "mrope_interleaved": True},
        "hidden_act": "silu",
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [0],
    },
}


def tiny_job(storage: Storage, kv_cache: Any = "bf16", config: dict[str, Any] = TINY) -> CompileJob:
    """A job of a tiny network in a format."""
    network = without_memory(parse_config(config, "a test"))
    network.requires_grad_(False).eval()
    network.to(torch.float32)
    choose_formats(network, storage, None)
    join_projections(network.decoder.layers)
    engine = EngineConfig(num_blocks=1, max_num_seqs=2, max_batched_tokens=6, kv_cache=kv_cache)
    return CompileJob(outline_of(network, network.config), engine, Hardware((0, 0), 4))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted where torch would do, and few shapes are looked at."""
    monkeypatch.setattr(replaced, "on_gpu", lambda _: True)
    monkeypatch.setattr(replaced, "_withdrawn", set())
    monkeypatch.setattr(precompile, "GRIDS", ((1, 4, 4),))

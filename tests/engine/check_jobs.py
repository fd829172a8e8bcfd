"""Jobs of a kernel check that Triton's interpreter is done with in seconds: tiny networks, few shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine import kernel_check, precompile
from snugvl.engine.kernel_check import Checker, check_kernels
from snugvl.engine.precompile import CompileJob, outline_of
from snugvl.layers import replaced
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.linear import Linear
from snugvl.models.linear_attention import join_projections
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import without_memory

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "out_hidden_size": 128,
}
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": True,
    "image_token_id": 90,
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_section": [8, 4, 4], "mrope_interleaved": True},
        "hidden_act": "silu",
    },
    "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "image_token_id": 90,
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "hidden_act": "silu",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    },
    "vision_config": VISION,
}
MIXTURE: dict[str, Any] = {
    **QWEN3_VL,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **QWEN3_VL["text_config"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def tiny_job(
    storage: Storage, kv_cache: Any = "bf16", values: dict[str, Any] = QWEN3_VL, *, most: int = 3,
    blocks: bool = False, sees: bool = True,
) -> CompileJob:  # fmt: skip
    """A job of a tiny network in a format; `most`: tokens of a step, `blocks`: its layers are a GGUF's."""
    config = parse_config(values, "a test")
    config = config if sees else replace(config, vision=None)
    network = without_memory(config)
    network.requires_grad_(False).eval()
    if blocks:
        for linear in network.decoder.layers.modules():
            if isinstance(linear, Linear) and linear.rows > 64:  # experts are of one type
                several = values is not MIXTURE
                linear.store_blocks([("Q8_0", linear.rows - 64), ("Q4_0" if several else "Q8_0", 64)])
        network.decoder.embed_tokens.store_blocks([("Q8_0", 128)])
    choose_formats(network, storage, config.quantization)
    join_projections(network.decoder.layers)
    engine = EngineConfig(num_blocks=1, max_num_seqs=2, max_batched_tokens=most, kv_cache=kv_cache)
    outline = replace(outline_of(network, network.config), slots=storage.expert_slots)
    return CompileJob(outline, engine, Hardware((0, 0), 4))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted where torch would do, and few shapes are looked at."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles kernels where there is a GPU, and these jobs are a CPU's")
    monkeypatch.setattr(replaced, "on_gpu", lambda _: True)
    monkeypatch.setattr(replaced, "_withdrawn", set())
    monkeypatch.setattr(precompile, "GRIDS", ((1, 4, 4),))
    monkeypatch.setattr(precompile, "BEFORE", 20)


def launches(job: CompileJob) -> dict[tuple[str, object], int]:
    """The kernels and variants that a check of `job` launches, each with the tokens of the first step that
    launches it. They are found by a check that launches nothing."""
    first, batch, size = dict[tuple[str, object], int](), precompile._batch, 0

    def begun(lengths: tuple[int, ...], *more: Any, **options: Any) -> Any:
        nonlocal size
        size = sum(lengths)
        return batch(lengths, *more, **options)

    def launch(_: Checker, name: str, variant: object, *__: object) -> None:
        first.setdefault((name, variant), size)

    with pytest.MonkeyPatch.context() as dry:
        dry.setattr(precompile, "_batch", begun)
        dry.setattr(Checker, "_launch", launch)
        dry.setattr(kernel_check, "compared", lambda *_: (0.0, ""))
        check_kernels(job, torch.device("cpu"), lambda _: None)
    return first


def leave_out_repetitions(job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, object], int]:
    """Leave steps out of a check that launch what steps before have launched: they take most of the time.

    Returns `launches(job)`.
    """
    first, edges = launches(job), precompile.edges
    steps = set(first.values())
    monkeypatch.setattr(precompile, "edges", lambda most: [n for n in edges(most) if n in steps or n == most])
    return first

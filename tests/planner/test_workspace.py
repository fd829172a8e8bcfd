"""The workspace formulas against the operations of the networks themselves, traced on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import read_config
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models import loader, qwen2_5_vision
from snugvl.models.batch import ForwardBatch
from snugvl.models.networks import Qwen3VL
from snugvl.models.vision import ROWS
from snugvl.planner.engines.native.footprint import native_prefill
from snugvl.planner.engines.transformers.footprint import plain_attention, transformers_prefill
from snugvl.planner.footprint import vision
from snugvl.planner.footprint.vision import ImageSize
from snugvl.planner.inventory import Inventory, inventory
from tests.models.forward import encode_vision
from tests.planner.models import SHAPES, qwen3_vl
from tests.planner.trace import Trace, fused_attention

# 2B and 4B have one tower, 8B a wider one.
SIZES = [("4B", torch.float32), ("8B", torch.bfloat16)]
LAYERS, VOCAB = 3, 1024  # the workspace doesn't depend on them
OURS = "snugvl.models.vision_blocks.scaled_dot_product_attention"
OURS_TEXT = "snugvl.layers.attention.scaled_dot_product_attention"


def values(size: str) -> dict[str, Any]:
    """`config.json` of a Qwen3-VL with few layers."""
    shape = SHAPES[size]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": shape.tied,
        "image_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 8,
        "video_token_id": 7,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": VOCAB, "hidden_size": shape.hidden,
            "num_hidden_layers": LAYERS, "num_attention_heads": shape.heads, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": shape.intermediate, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_theta": 5e6, "hidden_act": "silu", "tie_word_embeddings": shape.tied,
            "bos_token_id": None, "eos_token_id": None,
            "rope_scaling": {
                "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 7, "hidden_size": shape.vision,
            "intermediate_size": shape.vision_intermediate, "num_heads": 16, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
            "out_hidden_size": shape.hidden, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [1, 3, 5], "hidden_act": "gelu_pytorch_tanh",
        },
    }  # fmt: skip


def network(size: str, folder: Path, dtype: torch.dtype) -> tuple[Qwen3VL, ModelConfig]:
    """Ours, without memory."""
    (folder / "config.json").write_text(json.dumps(values(size)))
    config = read_config(folder)
    with torch.device("meta"):
        return Qwen3VL(config).to(dtype), config


def traced(run: Any, *kept: torch.Tensor) -> int:
    """Peak live bytes of `run` beyond `kept`."""
    trace = Trace()
    for tensor in kept:
        trace.keep(tensor)
    with torch.no_grad(), trace:
        run()
    return trace.peak


def model_of(size: str) -> Inventory:
    return inventory(qwen3_vl(size))


@pytest.mark.parametrize(("size", "dtype"), SIZES)
@pytest.mark.sample("8B-dtype1")
def test_our_vision_tower(size: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, config = network(size, tmp_path, dtype)
    for side in (32, 64, 112):
        patches = torch.empty(side * side, config.vision.patch_dim, dtype=dtype, device="meta")
        with fused_attention(OURS):
            grid = [(1, side, side)]
            peak = traced(lambda: encode_vision(model, patches, grid), *model.parameters(), patches)  # noqa: B023
        planned = vision.native_workspace(
            model_of(size), ImageSize(side * side // 4, side * side), dtype.itemsize
        )
        assert peak <= planned <= peak * 1.08  # one of three whole chunks needs more than 112² in four
    assert vision.ROWS == ROWS
    assert vision.WINDOWED_ROWS == qwen2_5_vision.ROWS


def test_a_video_of_as_many_patches_fits_into_the_same_place(tmp_path: Path) -> None:
    model, config = network("2B", tmp_path, torch.bfloat16)
    patches = torch.empty(4096, config.vision.patch_dim, dtype=torch.bfloat16, device="meta")
    planned = vision.native_workspace(model_of("2B"), ImageSize(1024, 4096), 2)
    for grid in ((2, 32, 64), (16, 16, 16)):
        with fused_attention(OURS):
            peak = traced(lambda: encode_vision(model, patches, [grid]), *model.parameters(), patches)  # noqa: B023
        assert peak <= planned


def dequantized_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel writes a slice of weights into its place and needs nothing besides."""
    monkeypatch.setattr(Linear, "_dequantize", lambda *_: None)


@pytest.mark.parametrize(("size", "dtype"), SIZES)
@pytest.mark.sample("8B-dtype1")
def test_our_vision_tower_in_int8(
    size: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dequantized_on_a_gpu(monkeypatch)
    model, config = network(size, tmp_path, dtype)
    loader.choose_formats(model, loader.Storage(tower="int8"), None)
    for side in (2, 16, 24, 32, 64):  # with few patches the widened matrix is most of it
        patches = torch.empty(side * side, config.vision.patch_dim, dtype=dtype, device="meta")
        with fused_attention(OURS):
            grid = [(1, side, side)]
            kept = (*model.parameters(), *model.buffers(), patches)
            peak = traced(lambda: encode_vision(model, patches, grid), *kept)  # noqa: B023
        image = ImageSize(side * side // 4, side * side)
        planned = vision.native_workspace(model_of(size), image, dtype.itemsize, "int8")
        assert peak <= planned <= peak * 1.04


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_our_prefill(size: str, tmp_path: Path) -> None:
    model, config = network(size, tmp_path, torch.bfloat16)
    planned = model_of(size)
    with fused_attention(OURS_TEXT):
        alone = step(model, config, (2048,), (2048,))
    assert alone <= native_prefill(planned, 2048) <= alone * 1.02
    for new, context in ((512, 4096), (2048, 4096), (2048, 8192)):
        chunk = step(model, config, (new,), (context,))
        assert chunk <= plain_attention(planned, new, context) <= chunk * 1.02


def step(model: Qwen3VL, config: ModelConfig, new: tuple[int, ...], contexts: tuple[int, ...]) -> int:
    """Peak of one step of our decoder, in plain torch."""
    total, blocks = sum(new), -(-max(contexts) // 16)
    cache = KVCache(
        num_layers=LAYERS, num_blocks=blocks * len(new), block_size=16, num_kv_heads=8, head_dim=128,
        dtype=torch.bfloat16, device=torch.device("meta"),
    )  # fmt: skip

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    metadata = AttentionMetadata(new, contexts, zeros(total), zeros(len(new), blocks), 16)
    batch = ForwardBatch(zeros(total), zeros(3, total), metadata, zeros(len(new)), None, None)
    kept = (cache.storage, batch.input_ids, batch.positions, metadata.slot_mapping, metadata.block_tables)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(batch, cache)  # makes the tables of the rotation, once and for all
        return traced(lambda: model(batch, cache), *model.parameters(), *kept)


@pytest.fixture(scope="module", params=["2B", "8B"])
def oracle(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """transformers' network, its buffers filled, its weights never touched."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration._from_config(
            Qwen3VLConfig(**values(request.param)), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return request.param, model.to_empty(device="cpu")


def kept_by(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *inputs.values()]


def computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and products give what they would in size, which is all that is looked at, at no cost."""
    for name, empty in (
        ("scaled_dot_product_attention", lambda q, *_, **__: torch.empty_like(q)),
        ("linear", lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0])),
    ):
        monkeypatch.setattr(torch.nn.functional, name, empty)


@pytest.mark.slow
@pytest.mark.sample("2B")
def test_transformers_vision_tower(oracle: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    size, model = oracle
    computes_nothing(monkeypatch)
    inputs = {"pixels": torch.zeros(1024, 1536), "grid": torch.tensor([[1, 32, 32]])}
    peak = traced(
        lambda: model.model.get_image_features(inputs["pixels"], inputs["grid"]), *kept_by(model, inputs)
    )
    planned = vision.transformers_workspace(model_of(size), ImageSize(256, 1024))
    assert peak == pytest.approx(planned, rel=0.01)


@pytest.mark.slow
def test_transformers_prefill(oracle: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    size, model = oracle
    computes_nothing(monkeypatch)
    ids = torch.full((1, 256), 100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    peak = traced(lambda: model(**inputs, use_cache=True, logits_to_keep=1), *kept_by(model, inputs))
    kv = LAYERS * 2 * 8 * 128 * 2 * 256
    assert peak - kv == pytest.approx(transformers_prefill(model_of(size), 256, 0), rel=0.01)

"""Our engine on a GPU: formulas against real tensors on the meta device, and against the code they follow."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugvl.checkpoint.architecture import Fp8Blocks
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine import memory
from snugvl.engine.graphs import decode as graphs
from snugvl.engine.graphs.prefill import PATCHES, PictureGraphs, StepGraphs
from snugvl.engine.sampling import sampler
from snugvl.layers import linear as layers
from snugvl.layers.linear import Linear
from snugvl.models import loader
from snugvl.models.networks import Qwen3VL
from snugvl.models.tensor_files import CHUNK_BYTES, dequantise
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native import hybrid, step_graphs
from snugvl.planner.engines.native.hybrid import NATIVE_STEPS
from snugvl.planner.footprint import vision
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import LABELS, weight_bytes, weight_components
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import SHAPES, phase_bytes, qwen3_vl
from tests.planner.test_workspace import values
from tests.planner.trace import Trace

MIB = 1 << 20
CAPABILITY = (12, 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Configurations with all layers, by size."""
    found = {}
    for size, shape in SHAPES.items():
        described = values(size)
        described["text_config"] |= {"num_hidden_layers": shape.layers, "vocab_size": shape.vocab}
        described["vision_config"] |= {"depth": shape.depth}
        folder = tmp_path_factory.mktemp(size)
        (folder / "config.json").write_text(json.dumps(described))
        found[size] = read_config(folder)
    return found


def held(network: torch.nn.Module) -> int:
    """Bytes of the distinct tensors."""
    distinct = {id(tensor): tensor.nbytes for tensor in (*network.parameters(), *network.buffers())}
    return sum(distinct.values())


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
@pytest.mark.parametrize("head", ["bf16", "int8"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int6", "int5", "int4"])
@pytest.mark.sample(
    *(
        f"{weights}-{head}-8B"
        for weights in ("bf16", "fp8", "int8", "int6", "int5", "int4")
        for head in ("bf16", "int8")
    ),
    "bf16-bf16-2B",
    "int4-int8-2B",
    "int8-bf16-4B",
)
def test_weights_are_planned_to_the_byte(whole: dict[str, Any], size: str, head: Any, weights: Any) -> None:
    with torch.device("meta"):
        network = Qwen3VL(whole[size]).to(torch.bfloat16)
    loader.choose_formats(network, loader.Storage(weights, head), Fp8Blocks(128, 128))
    model = inventory(qwen3_vl(size, fp8=weights == "fp8"))
    settings = Settings("native", weights, head)
    assert weight_bytes(model, settings) == held(network)
    parts = {part.name: part.nbytes for part in weight_components(model, settings)}
    assert parts[LABELS["vision"]] == held(network.model["visual"])
    assert parts[LABELS["embedding"]] == held(network.decoder.embed_tokens)
    if not whole[size].tie_word_embeddings:
        assert parts[LABELS["lm_head"]] == held(network.lm_head)


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tower_in_int8_is_planned_to_the_byte(whole: dict[str, Any], size: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        network = Qwen3VL(whole[size]).to(dtype)
    wide = held(network.model["visual"])
    loader.choose_formats(network, loader.Storage("int4", "int8", tower="int8"), None)
    model = inventory(qwen3_vl(size))
    settings = Settings("native", "int4", "int8", float32=dtype == torch.float32, vision_weights="int8")
    parts = {part.name: part.nbytes for part in weight_components(model, settings)}
    assert parts[LABELS["vision"]] == held(network.model["visual"])
    assert parts[LABELS["vision"]] < wide * (0.53 if dtype == torch.bfloat16 else 0.28)
    assert weight_bytes(model, settings) == held(network)


def test_float32_beside_quantised_weights(whole: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = Qwen3VL(whole["2B"])
    loader.choose_formats(network, loader.Storage("int8"), None)
    for linear in network.modules():
        if isinstance(linear, Linear) and linear.scale is not None:
            assert linear.scale.dtype == torch.bfloat16
    planned = weight_bytes(inventory(qwen3_vl("2B")), Settings("native", "int8", float32=True))
    assert planned == held(network)


def test_the_numbers_are_those_of_the_code() -> None:
    from snugvl.engine import batch
    from snugvl.engine.graphs import cache as graph_cache
    from snugvl.engine.graphs import prefill
    from snugvl.layers.kernels.attention.decode import DecodeCut
    from snugvl.layers.kernels.products import dequantize, tiles

    assert graphs.SIZES == native.GRAPH_SIZES
    assert DecodeCut().splits == native.ATTENTION_SPLITS
    assert dequantize.WIDE_BYTES == native.SLICE_BYTES
    assert (layers.SLICE_BYTES, layers.SLICE_ROWS) == (vision.SLICE_BYTES, vision.SLICE_ROWS)
    assert dequantize.WIDE_TILE == native.SLICE_ROWS
    assert tiles.SMALL == native.SMALL_ROWS
    assert (prefill.TOKENS, PATCHES, batch.TABLE, graph_cache.SMALL_BYTES, graph_cache.MOST) == (
        step_graphs.TOKENS, step_graphs.PATCHES, step_graphs.TABLE, step_graphs.SMALL_BYTES, step_graphs.MOST
    )  # fmt: skip
    assert step_graphs.DRAFT_TOKENS in prefill.FEWEST
    assert memory.STATES_SMALL_BYTES == hybrid.SMALL_BYTES
    assert (native.READERS[0], native.PIECE_BYTES) == (loader.GPU_READERS, CHUNK_BYTES)
    for chunk, sequences in NATIVE_STEPS:
        EngineConfig(1, max_batched_tokens=chunk, max_num_seqs=sequences)


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_split_products_as_the_kernels_do(size: str) -> None:
    from snugvl.layers.kernels.products.tiles import matrix_tile

    shape = SHAPES[size]
    products = (
        (shape.intermediate, shape.hidden, True),
        (shape.hidden, shape.intermediate, False),
        (shape.vocab, shape.hidden, False),
    )
    for (rows, columns, swiglu), units, tokens in product(products, (16, 30, 132), (2, 16, 17, 32, 33, 64)):
        weights = Linear(columns, 1, bias=False).weights
        high, wide, split, _, _ = matrix_tile(tokens, rows, weights, units, swiglu=swiglu)
        tiles = -(-rows // wide)
        expected = split * tiles * high * wide * (1 + swiglu) * 4 if split > 1 else 0
        assert native.split_bytes(native.Product(rows, columns, swiglu), tokens, units) == expected
        high, wide, split, _, _ = matrix_tile(tokens, rows, weights, units, swiglu=swiglu, loops=True)
        taken = split * -(-rows // wide) * -(-tokens // high) * high * wide * (1 + swiglu) * 4
        assert (taken if split > 1 else 0) <= expected, "an old card takes no more than is planned"
        fine = replace(weights, group=32)  # a pre-quantized checkpoint's
        high, wide, split, _, _ = matrix_tile(tokens, rows, fine, units, swiglu=swiglu)
        expected = split * tiles * high * wide * (1 + swiglu) * 4 if split > 1 else 0
        assert native.split_bytes(native.Product(rows, columns, swiglu), tokens, units, 32) == expected


@pytest.mark.parametrize(
    ("params", "most"),
    [
        (SamplingParams(), 0),
        (SamplingParams(temperature=1.0), 20),
        (SamplingParams(temperature=1.0, top_p=0.9), 42),
        (
            SamplingParams(
                temperature=1.0,
                top_p=0.9,
                top_k=5000,
                min_p=0.01,
                frequency_penalty=1.0,
                repetition_penalty=1.1,
                logprobs=20,
            ),
            native.SAMPLING_BYTES,
        ),
    ],
)
def test_sampling_takes_no_more_than_planned(params: SamplingParams, most: int) -> None:
    vocab, rows = 32_768, 2
    scores = torch.rand(rows, vocab) * 1e-3  # nearly equal: filters have to sort all of them
    trace = Trace()
    trace.keep(scores)
    with torch.inference_mode(), trace:
        sampler.sample(scores, [sampler.SamplerInput(row, params, counts={1: 2}) for row in range(rows)])
    assert most * 0.9 <= trace.peak / (rows * vocab) <= most * 1.001 + 0.01


@pytest.mark.parametrize("weights", ["bf16", "int8", "int6", "int5", "int4"])
@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_loading_takes_no_more_than_planned(weights: Any, stored: str) -> None:
    rows, columns = 256, 1024
    linear = Linear(columns, rows)
    linear.store_as(weights)
    piece = torch.randn(rows, columns).to(torch.bfloat16 if stored == "bf16" else torch.float8_e4m3fn)
    scale = torch.rand(2, 8)
    trace = Trace()
    for tensor in (piece, scale, linear.weight, linear.scale, linear.zero, linear.upper):
        if tensor is not None:
            trace.keep(tensor)
    with torch.inference_mode(), trace:
        wide = piece if stored == "bf16" else dequantise(piece, scale, Fp8Blocks(128, 128))
        linear.put(0, wide)
    each = native.PUT_BYTES[weights]
    if stored == "fp8":
        each = max(each, native.DEQUANTISED_BYTES)
    assert trace.peak <= each * rows * columns
    assert each == 0 or trace.peak >= each * rows * columns * 0.9


def test_a_smaller_head_and_fewer_sequences_take_less() -> None:
    model = inventory(qwen3_vl("4B", fp8=True))
    device = Device(450 * MIB, compute_capability=CAPABILITY)
    base = Settings("native", "fp8", context=4096, max_pixels=1 << 20, eager=False)

    def total(**changes: Any) -> int:
        return footprint(model, base._replace(**changes), device).total_bytes

    assert total(head="int8") < total() - 340 * MIB
    assert total(sequences=1, chunk=512) < total(sequences=4, chunk=512) < total(sequences=16, chunk=512)
    assert total(weights="int4") < total(weights="int8") < total(weights="bf16")
    assert total(context=8192) > total()


def test_one_sequence_needs_no_library_in_its_graph() -> None:
    model = inventory(qwen3_vl("2B"))
    alone, pair = Settings("native", "int4", sequences=1), Settings("native", "int4", sequences=2)
    assert native.graph_bytes(model, alone, 30) < 12 * MIB < native.graph_bytes(model, pair, 30)
    assert native.library_bytes(model, alone, 32 * MIB) == 0
    assert native.library_bytes(model, pair, 32 * MIB) == 32 * MIB
    assert native.library_bytes(model, pair._replace(head="int8"), 32 * MIB) == 0
    assert native.library_bytes(model, pair._replace(weights="bf16", head="int8"), 32 * MIB) == 32 * MIB


@pytest.mark.parametrize(("sequences", "largest"), [(1, 1), (3, 4), (16, 16), (17, 32), (99, 32)])
def test_graphs_of_the_sizes_that_are_needed(sequences: int, largest: int) -> None:
    assert native.graph_sizes(sequences)[-1] == largest


def test_logits_outlive_the_layers() -> None:
    model = inventory(qwen3_vl("2B"))
    settings = Settings("native", "int4", context=16, sequences=16, images=0, chunk=16)
    few = native.prefill_bytes(model, settings)
    assert few >= 16 * 151_936 * 6
    assert native.logits_bytes(model, settings, 1) == 4 * 151_936
    assert native.logits_bytes(model, settings._replace(head="int8"), 16) == 64 * 151_936


def test_loading_fits_into_the_place_of_the_cache() -> None:
    model = inventory(qwen3_vl("2B"))
    device = Device(450 * MIB, compute_capability=CAPABILITY)
    short = Settings("native", "int4", "int8", context=1024, eager=False)
    found = footprint(model, short._replace(context=8192), device)
    assert phase_bytes(found, "load") == 0
    small = footprint(model, short._replace(sequences=1, context=64), device)
    assert 0 < phase_bytes(small, "load") < native.loading_bytes(model, short, 1)


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
def test_slices_of_a_long_step_as_the_kernels_make_them(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a kernel or two more in every recording, of which the driver keeps some memory."""
    from snugvl.layers.kernels.products import dequantize
    from snugvl.layers.kernels.products.epilogue import Epilogue

    shape, made = SHAPES[size], list[int]()
    monkeypatch.setattr(dequantize, "_dequantize", lambda _weights, first, *_: made.append(first))
    monkeypatch.setattr(dequantize, "swiglu", lambda *_: None)
    for rows, columns, swiglu in (
        (shape.intermediate, shape.hidden, True),
        (shape.hidden, shape.intermediate, False),
    ):
        x = torch.empty(200, columns, dtype=torch.bfloat16, device="meta")
        out = torch.empty(200, rows, dtype=torch.bfloat16, device="meta")
        weights = replace(Linear(columns, 1, bias=False).weights, rows=rows * (1 + swiglu))
        made.clear()
        dequantize.multiply_dequantized(x, weights, Epilogue(swiglu=swiglu), out)
        assert len(made) == native.slices(rows, columns * (1 + swiglu), 2)


@pytest.mark.parametrize("size", ["2B", "4B", "8B"])
@pytest.mark.parametrize("language_only", [False, True])
def test_what_graphs_of_prompts_hold_is_planned(
    whole: dict[str, Any], size: str, language_only: bool
) -> None:
    config = replace(whole[size], vision=None) if language_only else whole[size]
    with torch.device("meta"):
        network = Qwen3VL(config).to(torch.bfloat16)
    limits = EngineConfig(99, max_model_len=3000, max_num_seqs=32, max_batched_tokens=2000)
    graph_pool: Any = None
    held = [StepGraphs(network, SimpleNamespace(block_size=16), limits, graph_pool)._buffers()]  # type: ignore[arg-type]
    if not language_only:
        held.append(PictureGraphs(network, graph_pool)._buffers())  # type: ignore[arg-type]
    made = [getattr(each, name) for each in held for name in each.__slots__]
    settings = Settings(
        "native", "fp8", context=3000, chunk=2000, sequences=32, images=1 - language_only, step_graphs=True
    )
    planned = step_graphs.held_bytes(inventory(qwen3_vl(size, fp8=True)), settings)
    assert 0 <= planned - sum(each.nbytes for each in made if isinstance(each, torch.Tensor)) <= 512

"""The workspace of Qwen3.5's attention, traced on our network, and its place in the plan."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from snugvl.checkpoint.catalogue import catalogue_facts, find
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.memory import allocate
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kernels import convolution, delta_rule
from snugvl.models import linear_attention, loader
from snugvl.models.linear_attention import GatedDeltaNet
from snugvl.models.networks import Qwen35
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native import hybrid
from snugvl.planner.footprint import total, vision
from snugvl.planner.footprint.kv import state_bytes, state_component
from snugvl.planner.footprint.vision import ImageSize
from snugvl.planner.footprint.weights import part_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings
from tests.models.forward import encode_vision
from tests.planner.test_native import held
from tests.planner.test_workspace import dequantized_on_a_gpu, traced
from tests.planner.trace import Trace, fused_attention

SIZES = ("0.8B", "4B")
META = torch.device("meta")


def model_of(size: str) -> Inventory:
    facts = catalogue_facts(f"Qwen/Qwen3.5-{size}")
    assert facts is not None
    return inventory(facts)


def network(size: str) -> Qwen35:
    """A linear and a full layer, without memory."""
    found = find(f"Qwen/Qwen3.5-{size}")
    assert found is not None
    values: dict[str, Any] = deepcopy(dict(found[0].config))
    values["text_config"] |= {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 512}
    with META:
        return Qwen35(parse_config(values, size)).to(torch.bfloat16)


class Nothing:
    """A kernel that isn't launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers by kernels, of which only the tensors around them are made."""
    monkeypatch.setattr(GatedDeltaNet, "_plain", GatedDeltaNet._by_kernels)
    for module, names in (
        (convolution, ("convolve", "slide")),
        (delta_rule, ("correct", "solve", "scan", "gate")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Nothing())


def linear_layer(model: Qwen35, tokens: int, trace: Trace) -> int:
    """The peak of what a linear layer takes for so many tokens."""
    cache = allocate(model, EngineConfig(num_blocks=1, max_num_seqs=1))
    ints = torch.zeros(tokens, dtype=torch.int64, device=META)
    metadata = AttentionMetadata((tokens,), (tokens,), ints, ints[None], 16, state_slots=ints[:1])
    x = torch.empty(tokens, model.config.text.hidden_size, dtype=torch.bfloat16, device=META)
    layer = model.decoder.layers[0]
    assert cache.states is not None
    for tensor in (*model.parameters(), cache.states.recurrent, cache.states.inputs, ints):
        trace.keep(tensor)
    with torch.inference_mode(), trace:
        trace.keep(x)
        layer.linear_attn(x, layer.input_layernorm, cache, metadata)
    return trace.peak


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [512, 2048])
def test_a_linear_layers_workspace(size: str, tokens: int) -> None:
    peak = linear_layer(network(size), tokens, Trace()) + tokens * model_of(size).facts.text.hidden_size * 2
    assert peak <= hybrid.attention_bytes(model_of(size), 2, tokens, kernels=False) <= peak * 1.2
    assert hybrid.PIECE == linear_attention.PIECE


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 32, 512, 2048])
def test_a_linear_layers_workspace_with_kernels(size: str, tokens: int) -> None:
    peak = linear_layer(network(size), tokens, Trace()) + tokens * model_of(size).facts.text.hidden_size * 2
    planned = hybrid.attention_bytes(model_of(size), 2, tokens, kernels=True)
    assert peak <= planned
    assert planned <= peak * 1.05 or tokens == 1, "a decode step has no squares"
    assert hybrid.SQUARES == 2 * delta_rule.CHUNK


class Small(Trace):
    """Counts tensors of up to 1 MiB alone."""

    def _add(self, storage: torch.UntypedStorage, what: str) -> None:
        if storage.nbytes() <= total.SMALL_BYTES:
            super()._add(storage, what)


@pytest.mark.parametrize("size", ["0.8B", "2B", "4B"])
def test_small_tensors_of_a_linear_layer(size: str) -> None:
    model = network(size)
    peaks = [linear_layer(model, tokens, Small()) for tokens in (1, 16, 64, 65, 128, 200, 256, 512)]
    assert 8 << 20 < max(peaks) <= hybrid.SMALL_BYTES - (2 << 20), "and what lies idle between them"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_planned_to_the_byte(size: str, dtype: torch.dtype) -> None:
    model, planned = network(size).to(dtype), model_of(size)
    settings = Settings("native", sequences=16, float32=dtype == torch.float32)
    cache = allocate(model, EngineConfig(num_blocks=1, max_num_seqs=16))
    linear_layers = sum(count for layer, count in planned.kv_layers if layer.state_bytes)
    assert cache.states is not None
    assert state_component(planned, settings).nbytes == cache.states.nbytes * linear_layers
    assert state_bytes(planned, settings) * 17 == state_component(planned, settings).nbytes


def test_plain_attention_needs_none_of_it() -> None:
    facts = catalogue_facts("Qwen/Qwen3-VL-2B-Instruct")
    assert facts is not None
    plain, settings = inventory(facts), Settings("native", "int4", head="int8", sequences=1)
    assert [hybrid.attention_bytes(plain, 2, 2048, kernels=each) for each in (False, True)] == [0, 0]
    assert hybrid.products(plain) == []
    assert native.library_bytes(plain, settings, 8) == 0
    assert native.library_bytes(model_of("0.8B"), settings, 8) == 8


def test_the_small_models_run_on_our_engine() -> None:
    for size in ("0.8B", "2B", "4B"):
        facts = catalogue_facts(f"Qwen/Qwen3.5-{size}")
        assert facts is not None
        assert facts.native


@pytest.mark.parametrize("size", SIZES)
def test_a_tower_in_int8_without_deepstack_levels(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dequantized_on_a_gpu(monkeypatch)
    model, ours = model_of(size), network(size)
    loader.choose_formats(ours, loader.Storage("int4", "int8", tower="int8"), None)
    assert ours.tower is not None
    settings = Settings("native", "int4", "int8", vision_weights="int8")
    assert part_bytes(model, settings, "vision") == held(ours.tower)
    del ours.tower.blocks[3:]
    for side in (2, 16, 64):
        patches = torch.empty(side * side, 1536, dtype=torch.bfloat16, device=META)
        with fused_attention("snugvl.models.vision_blocks.scaled_dot_product_attention"):
            grid, kept = [(1, side, side)], (*ours.parameters(), *ours.buffers(), patches)
            peak = traced(lambda: encode_vision(ours, patches, grid), *kept)  # noqa: B023
        planned = vision.native_workspace(model, ImageSize(side * side // 4, side * side), 2, "int8")
        assert peak <= planned <= peak * 1.02

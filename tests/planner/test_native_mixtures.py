"""Mixtures of experts on our engine: weights to the byte, the workspace traced on our network."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.checkpoint.architecture import Fp8Blocks
from snugvl.checkpoint.catalogue import catalogue_facts, find
from snugvl.checkpoint.families import parse_config
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import LoadOptions
from snugvl.layers.kernels.products import dequantize, grouped
from snugvl.models import loader
from snugvl.models.decoder import SparseMLP
from snugvl.models.linear_attention import join_projections
from snugvl.models.networks import LoadableNetwork, network_of, segment_bytes
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native import step_graphs
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import keeps_fp8, weight_bytes, weight_components
from snugvl.planner.inventory import Inventory, inventory, mlp_width
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import wishes_of
from tests import mixtures, prequantized
from tests.mixtures import Options
from tests.planner.test_hybrid import Nothing
from tests.planner.test_native import held
from tests.planner.trace import Trace

NAME = "Qwen/Qwen3-VL-30B-A3B-Instruct"
META = torch.device("meta")
ROUNDING = "allocator rounding"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Options], Path]:
    return lambda options: mixtures.write(tmp_path_factory.mktemp("mixture"), options)


def published() -> dict[str, Any]:
    found = find(NAME)
    assert found is not None
    return deepcopy(dict(found[0].config))


def network(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> LoadableNetwork:
    with META:
        return network_of(parse_config(config, NAME)).to(dtype)


def in_one_segment(model: LoadableNetwork) -> int:
    """Bytes that torch reserves for its tensors, beyond the tensors."""
    sizes = [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]
    small = sum(-(-size // 512) * 512 for size in sizes if size <= 1 << 20)
    return (
        -(-segment_bytes(sizes) // (2 << 20)) * (2 << 20) + -(-small // (2 << 20)) * (2 << 20) - held(model)
    )


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int4"])
def test_published_weights_are_planned_to_the_byte(weights: Any) -> None:
    ours = network(published())
    loader.choose_formats(ours, loader.Storage(weights), Fp8Blocks(128, 128))
    facts = catalogue_facts(NAME + "-FP8" if weights == "fp8" else NAME)
    assert facts is not None
    model, settings = inventory(facts), Settings("native", weights)
    assert keeps_fp8(model) == (weights == "fp8")
    assert weight_bytes(model, settings) == held(ours)
    parts = {part.name: part.nbytes for part in weight_components(model, settings)}
    assert parts[ROUNDING] == in_one_segment(ours)


@pytest.mark.parametrize("family", mixtures.FAMILIES)
@pytest.mark.parametrize("form", ["whole", "turned", "apart"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.sample(
    *(
        f"{weights}-{form}-qwen3_5_moe"
        for weights, form in (("bf16", "whole"), ("int8", "turned"), ("int4", "apart"))
    ),
    *(
        f"{weights}-{form}-qwen3_vl_moe"
        for weights, form in (("bf16", "apart"), ("int8", "whole"), ("int4", "turned"))
    ),
)
def test_weights_of_any_form_are_planned_to_the_byte(
    family: str, form: Any, weights: Any, folder: Callable[[Options], Path]
) -> None:
    wide = family == "qwen3_5_moe"
    options = Options(family, form=form, width=128, hidden=128 if wide else 64)
    place = folder(options)
    opened = loader.open_checkpoint(place, torch.bfloat16, loader.Storage(weights))
    join_projections(opened.model.decoder.layers)
    model = inventory(facts_of(str(place)))
    assert model.mixed
    assert model.experts_read == pytest.approx(mixtures.USED / mixtures.COUNT)
    settings = Settings("native", weights)
    assert weight_bytes(model, settings) == held(opened.model)
    parts = {part.name: part.nbytes for part in weight_components(model, settings)}
    assert parts[ROUNDING] == in_one_segment(opened.model)


def test_experts_of_four_bits_are_planned_to_the_byte(
    folder: Callable[[Options], Path], tmp_path: Path
) -> None:
    source = folder(Options(form="apart", width=64, hidden=64))
    form = prequantized.gptq(32, version=1)
    prequantized.write(source, tmp_path / "packed", tmp_path / "wide", form, ("attn", "shared_expert"))
    opened = loader.open_checkpoint(tmp_path / "packed", torch.bfloat16)
    join_projections(opened.model.decoder.layers)
    model = inventory(facts_of(str(tmp_path / "packed")))
    assert weight_bytes(model, Settings("native", "int4")) == held(opened.model)


def test_experts_of_a_width_that_blocks_dont_end_at_are_not_kept_in_fp8() -> None:
    facts = catalogue_facts(NAME + "-FP8")
    assert facts is not None
    mixture = facts.text.mixture
    assert mixture is not None
    odd = replace(facts, text=replace(facts.text, mixture=replace(mixture, width=704)))
    assert not keeps_fp8(inventory(odd))


def sparse_layer(config: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Peak of a mixture's layer by kernels, of which only the tensors around them are made."""
    for name in ("gemm", "choose", "sort_pairs", "grouped", "add_pairs"):
        monkeypatch.setattr(grouped, name, Nothing())
    ours = network(config)
    layer = ours.decoder.layers[0]
    assert isinstance(layer.mlp, SparseMLP)
    trace = Trace()
    for tensor in ours.parameters():
        trace.keep(tensor)
    with torch.inference_mode(), trace:
        stream = torch.empty(tokens, ours.config.text.hidden_size, dtype=torch.bfloat16, device=META)
        x = torch.empty_like(stream)
        _by_kernels(layer.mlp, x)
        del stream
    return trace.peak


def _by_kernels(mlp: SparseMLP, x: torch.Tensor) -> None:
    """`SparseMLP.forward` as on a GPU; the norm and the shared expert as the formulas have them."""
    normed = torch.empty_like(x)
    scores = grouped.score(normed, mlp.scores.weight)
    ids, shares = grouped.choose_experts(scores, mlp.count, mlp.used, x.dtype)
    shared = None if mlp.shared_expert is None else torch.empty_like(x)
    out = torch.empty(len(x), mlp.used, x.shape[1], dtype=x.dtype, device=x.device)
    groups = grouped.Groups(ids, mlp.count)
    for part in mlp.experts._rounds(ids):
        groups.multiply(normed, part, shares, out)
    grouped.add(out, shared, scores, x)


def configs() -> dict[str, dict[str, Any]]:
    wide = mixtures.config(Options(hidden=2048, width=512))
    wide["text_config"] |= {"num_experts": 256, "num_experts_per_tok": 8}
    few = published()
    few["text_config"] |= {"num_hidden_layers": 1}
    few["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": []}
    return {"qwen3_5_moe": wide, "qwen3_vl_moe": few}


def model_of(config: dict[str, Any]) -> Inventory:
    """The facts of a published mixture with the sizes of a configuration."""
    facts, text = catalogue_facts(NAME), parse_config(config, NAME).text
    assert facts is not None
    sizes = replace(
        facts.text, mixture=text.mixture, hidden_size=text.hidden_size, num_layers=text.num_layers
    )
    return inventory(replace(facts, text=sizes))


@pytest.mark.parametrize("name", mixtures.FAMILIES)
@pytest.mark.parametrize("tokens", [1, 512, 2048])
def test_a_layers_workspace_with_kernels(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs()[name]
    peak = sparse_layer(config, tokens, monkeypatch)
    planned = tokens * native.experts_per_token(model_of(config), 2)
    assert peak - 4 * 256 <= planned <= peak * 1.02


@pytest.mark.parametrize("name", mixtures.FAMILIES)
def test_a_layers_workspace_on_a_cpu(name: str) -> None:
    """All tokens choose the same experts, which takes most."""
    config = mixtures.config(Options(name))
    config["text_config"] |= {"num_experts": 8, "num_experts_per_tok": 4}
    ours = network_of(parse_config(config, name)).to(torch.bfloat16)
    for parameter in ours.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    layer = ours.decoder.layers[0]
    trace = Trace()
    for tensor in ours.parameters():
        trace.keep(tensor)
    with torch.inference_mode(), trace:
        x = torch.ones(2048, 64, dtype=torch.bfloat16)
        layer.mlp(x, layer.post_attention_layernorm)
    planned = native.native_prefill(model_of(config), 2048)
    assert trace.peak <= planned <= trace.peak * 1.35


def test_the_numbers_are_those_of_the_code() -> None:
    launches = ("gemm", "choose", "sort_pairs", "grouped", "grouped", "add_pairs")
    assert len(launches) == step_graphs.ROUTED
    assert all(hasattr(grouped, name) for name in launches)
    assert dequantize.WIDE_BYTES == native.SLICE_BYTES


def test_mlps_beside_experts_are_those_that_our_engine_has() -> None:
    facts = catalogue_facts(NAME)
    assert facts is not None
    model = inventory(facts)
    assert (facts.text.intermediate_size, mlp_width(model)) == (6144, 0), "no layer has such an MLP"
    settings = Settings("native", "int4", chunk=2048)
    assert native.prefill_per_token(model, settings) < 64 << 10
    assert native.split_workspace(model, settings, 16, 132) >= 0
    some = replace(facts.text.mixture or pytest.fail("it is one"), layers=(True, False) * 24)
    assert mlp_width(inventory(replace(facts, text=replace(facts.text, mixture=some)))) == 6144


def test_codes_in_two_planes_are_for_cpus() -> None:
    """The product of experts reads formats of one plane; int5 and int6 have two."""
    from snugvl.planner.engines import rules_of

    facts = catalogue_facts(NAME)
    assert facts is not None
    model, rules = inventory(facts), rules_of("native")
    card = Device(450 << 20, compute_capability=(12, 0), host_bytes=64 << 30)
    offered = rules.options(model, card, wishes_of(LoadOptions(NAME), sees=True, backend="native"))
    assert isinstance(offered, list)
    assert {option.weights for option in offered} == {"bf16", "int8", "int4"}
    wished = wishes_of(LoadOptions(NAME, weights="int5"), sees=True, backend="native")
    assert "no int6 or int5 weights" in str(rules.options(model, card, wished))
    cpu = rules.options(model, Device(0, cpu=True), wished)
    assert isinstance(cpu, list)
    assert "int5" in {option.weights for option in cpu}

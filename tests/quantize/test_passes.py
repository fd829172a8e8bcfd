"""What rounding a layer is told of the exact network, against whole networks without a sweep."""

from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.core.options import LoadOptions
from snugvl.errors import UnsupportedModel
from snugvl.fidelity.sweep import Sequences, Sweep
from snugvl.layers.linear import Linear
from snugvl.models.loader import load_model
from snugvl.quantize import passes, setup
from snugvl.quantize.passes import Matrix
from snugvl.quantize.rounding import Moments, Rounded, rounded
from snugvl.quantize.setup import Given, QuantizeJob
from tests import mixtures
from tests.models.forward import Prompt, logits

TEXTS = [
    ("a.txt", "the quick brown fox jumps over the lazy dog. " * 20),
    ("b.txt", "what one loses the others make up for, as far as they can. " * 30),
]
MATRICES = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)  # as they are called


def job(model: Path, out: Path, texts: list[tuple[str, str]]) -> QuantizeJob:
    return QuantizeJob(
        LoadOptions(str(model), device="cpu"), out, Given(texts=texts), bits=4.7, group=None, tell=print
    )


def given_to(model: Any, layer: int, prompts: list[list[int]]) -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Inputs of each matrix of a layer behind their norm, and what its product is added to."""
    found = defaultdict(list)
    for name in MATRICES:
        matrix = model.decoder.layers[layer].get_submodule(name)

        def show(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            norm, residual = kwargs.get("norm"), kwargs.get("residual")
            x = args[0] if norm is None else norm(args[0])
            found[name].append((x.clone(), *([] if residual is None else [residual.clone()])))

        matrix.register_forward_pre_hook(show, with_kwargs=True)
    for ids in prompts:
        logits(model, Prompt(ids))
    return found


def test_a_layer_is_told_what_the_rounded_ones_before_it_have_lost(
    tiny_whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Moments, Rounded]] = []

    def watched(values: torch.Tensor, *args: Any, **kwargs: Any) -> Rounded:
        made = rounded(values, *args, **kwargs)
        if kwargs["compensate"]:  # not while costs are measured
            told.append((args[1], made))
        return made

    monkeypatch.setattr(passes, "rounded", watched)
    with closing(job(tiny_whole, tmp_path / "out", TEXTS)) as asked:
        prompts = [list(prompt.ids) for prompt in asked.material.prompts]
        *before, last = asked.plan.passes
        chunks = replace(last, sizes=replace(last.sizes, chunk=100))  # so that a sequence has some
        asked.plan = replace(asked.plan, passes=(*before, chunks))
        asked.run()
    assert max(map(len, prompts)) > 200
    assert len(prompts) > 1
    assert all(each.count == asked.material.tokens for each, _ in told)
    opening = told[0][0]
    assert opening.lost is not None
    assert not opening.lost.any(), "nothing was rounded before"
    exact, behind = (load_model(tiny_whole, dtype=torch.float32, device=torch.device("cpu")) for _ in "ab")
    layers: Any = behind.decoder.layers
    for layer in (*layers, *exact.decoder.layers):
        passes._fold(layer, MATRICES)
    places = [(layer, name) for layer in (0, 1) for name in MATRICES]
    for (layer, name), (moments, made) in zip(places, told, strict=False):
        matrix = layers[layer].get_submodule(name)
        assert isinstance(matrix, Linear)
        was, now = (given_to(model, layer, prompts)[name] for model in (exact, behind))
        wanted = torch.zeros(matrix.rows, matrix.columns)
        for (x, *before), (y, *after) in zip(was, now, strict=True):
            lacking = (x - y) @ matrix.weight.T
            share = torch.ones(1)
            for old, new in zip(before, after, strict=True):
                lacking, share = lacking + old - new, 1 / new.square().mean(-1, keepdim=True).sqrt()
            wanted += (lacking * share).T @ (y * share)
        assert moments.lost is not None
        if (layer, name) != places[0]:
            assert wanted.norm() > 0
        assert (moments.lost - wanted).norm() <= 1e-3 * wanted.norm(), (layer, name)
        matrix.weight.copy_(made.values())


def test_a_folded_layer_computes_what_it_did(tiny_whole: Path) -> None:
    plain, folded = (load_model(tiny_whole, dtype=torch.float32, device=torch.device("cpu")) for _ in "ab")
    layers: Any = folded.decoder.layers
    for layer in layers:
        for name, norm in passes.fed(layer).items():
            matrix, sizes = layer.get_submodule(name), 2.0 ** torch.randint(-3, 4, norm.weight.shape)
            matrix.weight.mul_(sizes)  # so that there is something to fold
            norm.weight.div_(sizes)
        inner, outer = (layer.mlp.get_submodule(name).weight for name in ("gate_up_proj", "down_proj"))
        sizes = 2.0 ** torch.randint(-3, 4, outer.shape[1:])
        outer.mul_(sizes)
        inner[len(sizes) :].div_(sizes[:, None])
        before = {name: layer.get_submodule(name).weight.clone() for name in MATRICES}
        factors = passes._fold(layer, MATRICES)
        assert list(factors) == ["self_attn.qkv_proj", "mlp.gate_up_proj"]
        outer_factors = layer.mlp.down_proj.weight[0] / before["mlp.down_proj"][0]
        assert torch.equal(outer_factors, outer_factors.log2().round().exp2()), "so rows' codes stay"
        for name, found in factors.items():
            wanted = before[name] * found
            if name == "mlp.gate_up_proj":
                wanted[len(sizes) :] /= outer_factors[:, None]
            assert torch.equal(layer.get_submodule(name).weight, wanted)
        assert not any((found == 1).all() for found in (outer_factors, *factors.values()))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            stored = norm.weight.bfloat16().float()
            torch.testing.assert_close(stored, norm.weight, rtol=1e-6, atol=0.0, msg="files can store it")
    ids = Prompt([3, 1, 4, 1, 5, 9, 2, 6])
    assert (logits(plain, ids) - logits(folded, ids)).abs().max() < 1e-4
    kept = layers[0].mlp.down_proj.weight.clone()
    assert passes._fold(layers[0], ["self_attn.o_proj", "mlp.down_proj"]) == {}
    assert torch.equal(layers[0].mlp.down_proj.weight, kept), "whose rows before aren't rounded"
    layers[0].input_layernorm.offset = 1.0  # stored as how far it is from 1: there a factor isn't exact
    assert list(passes._fold(layers[0], MATRICES)) == ["mlp.gate_up_proj"]


def test_matrices_come_in_the_order_in_which_they_are_called(tiny_whole: Path, tmp_path: Path) -> None:
    with closing(job(tiny_whole, tmp_path / "out", TEXTS)) as asked, closing(asked._network()) as network:
        sweep = Sweep(network, [Sequences(asked.material.prompts[0], ())], asked.plan.passes[-1].sizes)
        found: list[list[str]] = []

        def visit(index: int, layer: Any) -> None:
            found.append(passes._order(sweep, index, layer, sorted(MATRICES)))
            sweep.advance(index, layer)

        with torch.inference_mode():
            sweep.run(visit)
    assert found == [list(MATRICES)] * len(found)
    assert len(found) > 1


def test_what_the_exact_network_takes_beside_is_planned(
    tiny_whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states twice, products of a matrix and of what it lacks, its inputs, and what was rounded."""
    monkeypatch.setattr(setup, "WORK", 0)
    monkeypatch.setattr(setup, "INVERSES", 0)  # so that inputs are the most beside products
    held = []
    for texts in (TEXTS, []):
        with closing(job(tiny_whole, tmp_path / "out", texts)) as asked:
            parts = {part.name: part.nbytes for part in asked.plan.passes[-1].footprint.components}
            held.append((asked, parts))
    (own, ours), (_, random) = held
    hidden = own.side.config.text.hidden_size
    first = [matrix for (layer, _), matrix in own.matrices.items() if layer == 0]
    weights = sum(each.weights for each in first)
    assert ours["hidden states"] == 2 * own.material.tokens * hidden * 4
    assert random["products of inputs"] == 4 * sum(each.columns**2 for each in first)
    assert ours["products of inputs"] == 4 * max(each.columns**2 + each.weights for each in first)
    longest = 4 * max(map(len, own.material.prompts))
    kept = longest * max(each.columns + hidden for each in first)
    made = longest * max(each.rows + each.columns for each in first)
    assert kept + made < ours["rounding"] - (2 + 4) * weights <= kept + setup.COMPARED * made
    assert random["rounding"] == 2 * weights


def test_products_are_let_go_behind_each_matrix(tiny_whole: Path, tmp_path: Path) -> None:
    """The largest inverses are of the last matrix, when nothing else of its layer is held any more."""
    with closing(job(tiny_whole, tmp_path / "out", TEXTS)) as asked:
        large = Matrix(64, 1 << 12, ())
        small = Matrix(1 << 12, 64, ())
        alone, last, first = (asked._rounding(each) for each in ([large], [small, large], [large, small]))
    assert last == alone
    assert first == alone + 4 * (small.columns**2 + small.weights)


def test_costs_are_measured_on_the_middles_of_pieces(tiny_whole: Path, tmp_path: Path) -> None:
    with closing(job(tiny_whole, tmp_path / "out", TEXTS)) as asked:
        tokenizer, probe = asked.side.processor.tokenizer, asked.material.probe
        pieces = [
            ids[start : start + setup.PIECE]
            for _, text in TEXTS
            for ids in (tokenizer.encode(text),)
            for start in range(0, len(ids), setup.PIECE)
        ]
    middles = [tuple(ids[(len(ids) - setup.PROBE) // 2 :][: setup.PROBE]) for ids in pieces]
    assert all(len(middle) == setup.PROBE for middle in middles)
    assert probe.prompt.ids == (pieces[0][0],)
    assert set(probe.answers) <= set(middles)
    assert len(probe.answers) > 1


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    """Its experts each have inputs of their own, and codes in two planes have no product for them."""
    source = mixtures.write(tmp_path / "source", mixtures.Options("qwen3_vl_moe"))
    with pytest.raises(UnsupportedModel, match=r"mixture of experts, which can't be .*--weights int4"):
        job(source, tmp_path / "out", [("a", "some text")])

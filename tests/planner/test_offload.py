"""Layers in host memory: the last way out, as few as possible, every module placed, the price told."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from snugvl.planner.engines.transformers.footprint import host_bytes, layer_elements
from snugvl.planner.engines.transformers.rules import placement
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.speed import ASSUMED_LINK, STAGED_RATE, copy_rate
from snugvl.planner.wishes import Wishes
from tests.draws import draws
from tests.planner.machines import GIB, MIB, machine
from tests.planner.models import qwen3_vl

LARGE = qwen3_vl("8B")
BF16 = Wishes(quality="bf16")


def plan_for(total_bytes: int, wishes: Wishes = BF16, ram_bytes: int = 24 * GIB) -> Plan:
    on = replace(machine(total_bytes), ram_free_bytes=ram_bytes, ram_total_bytes=max(ram_bytes, 32 * GIB))
    return solve([Candidate(LARGE)], on, wishes)


def offloaded(total_bytes: int) -> Choice:
    choice = require(plan_for(total_bytes))
    assert choice.option.offload
    return choice


def test_8b_in_bf16_runs_on_8_gb_and_says_what_it_costs() -> None:
    plan = plan_for(8 * GIB)
    choice = require(plan)
    assert (choice.settings.engine, choice.settings.weights, choice.settings.vision) == (
        "transformers",
        "bf16",
        "cpu",
    )
    assert 20 < choice.settings.offloaded < 36
    assert choice.footprint.total_bytes <= choice.budget.usable_bytes
    text = plain(report(plan, machine(8 * GIB)))
    assert "only with layers in host memory" in text
    assert (
        f"{choice.settings.offloaded} of 36 decoder layers and the vision tower stay in host memory" in text
    )
    assert "cross PCI Express for every token" in text
    assert "not native: it needs at least" in text
    assert "snugvl serve Qwen/Qwen3-VL-8B-Instruct --backend transformers" in text


def test_one_layer_less_would_not_fit() -> None:
    choice = offloaded(8 * GIB)
    fewer = choice.settings._replace(offloaded=choice.settings.offloaded - 1)
    from snugvl.planner.footprint.total import footprint

    needed = footprint(choice.option.model, fewer, choice.budget.device).total_bytes
    assert needed > choice.budget.usable_bytes
    layer = layer_elements(choice.option.model)[0] * 2
    assert needed - choice.footprint.total_bytes == pytest.approx(layer, abs=8 * MIB)


def test_it_is_the_last_way_out() -> None:
    assert not require(plan_for(8 * GIB, Wishes())).option.offload  # int4 fits
    assert not require(plan_for(24 * GIB)).option.offload
    several = [Candidate(LARGE), Candidate(qwen3_vl("32B"))]
    assert solve(several, machine(8 * GIB), BF16).choice is None
    assert require(plan_for(8 * GIB, Wishes(backend="transformers", weights="bf16"))).option.offload
    assert plan_for(8 * GIB, Wishes(backend="vllm")).choice is None


def test_host_memory_must_have_room() -> None:
    plan = plan_for(8 * GIB, ram_bytes=8 * GIB)
    assert plan.choice is None
    (refusal,) = [refusal for refusal in plan.refusals if "host memory" in refusal.text]
    assert "layers would have to stay in host memory" in refusal.text
    assert "7.20 GiB may be used" in refusal.text
    tiny = plan_for(2 * GIB)
    assert tiny.choice is None
    assert any("with every layer in host memory it still takes" in refusal.text for refusal in tiny.refusals)


def test_a_quantised_checkpoint_is_refused_by_name() -> None:
    plan = solve([Candidate(qwen3_vl("32B", fp8=True))], machine(8 * GIB), Wishes(backend="transformers"))
    assert plan.choice is None
    assert any("the bf16 edition's can" in refusal.text for refusal in plan.refusals)


@given(total=st.integers(3 * 1024, 24 * 1024), more=st.integers(0, 4096), ram=st.integers(4, 40))
@example(total=16_411, more=60, ram=4)  # larger steps instead of sixteen tokens more in the pool
@draws(12)
def test_more_memory_never_gives_less(total: int, more: int, ram: int) -> None:
    small = plan_for(total * MIB, ram_bytes=ram * GIB).choice
    large = plan_for((total + more) * MIB, ram_bytes=ram * GIB).choice
    richer = plan_for(total * MIB, ram_bytes=(ram + 8) * GIB).choice
    for better in (large, richer):
        assert small is None or (better is not None and better.score >= small.score)
    if small is not None and small.option.offload:
        assert host_bytes(small.option.model, small.settings) <= ram * GIB
        assert small.footprint.total_bytes <= small.budget.usable_bytes


def test_the_price_is_bytes_over_the_links() -> None:
    choice = offloaded(8 * GIB)
    gpu = choice.gpus[0]
    assert copy_rate(gpu) == ASSUMED_LINK / 2
    assert copy_rate(replace(gpu, link_bandwidth=8e9)) == 4e9
    assert copy_rate(replace(gpu, link_bandwidth=63e9)) == STAGED_RATE
    speed = choice.speed
    crossing = sum(layer_elements(choice.option.model)[36 - choice.settings.offloaded :]) * 2
    assert speed.crossing_bytes == crossing
    assert speed.decode_tokens_per_s is not None
    link_alone = copy_rate(gpu) / crossing
    assert 0.9 * link_alone < speed.decode_tokens_per_s < link_alone


def test_the_map_names_every_module_once_and_keeps_the_head_on_the_gpu() -> None:
    choice = offloaded(8 * GIB)
    places = dict(placement(choice))
    assert places["model.visual"] == "cpu"
    assert places["model.language_model.embed_tokens"] == places["lm_head"] == "cuda:0"
    kept = 36 - choice.settings.offloaded
    layers = [places[f"model.language_model.layers.{number}"] for number in range(36)]
    assert layers == ["cuda:0"] * kept + ["cpu"] * (36 - kept)
    assert (
        json.loads(json.dumps(document(plan_for(8 * GIB), machine(8 * GIB))))["choice"]["placement"] == places
    )
    whole = require(plan_for(24 * GIB))
    assert placement(whole) == ()


@pytest.mark.parametrize(
    ("model", "gib"), [("Qwen/Qwen2.5-VL-7B-Instruct", 8), ("google/gemma-3-4b-it", 6), ("Qwen/Qwen3-8B", 8),
                       ("Qwen/Qwen3.5-4B", 6), ("microsoft/Phi-3-mini-4k-instruct", 5),
                       ("OpenGVLab/InternVL3-8B-hf", 8), ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 4)],
)  # fmt: skip
def test_other_families_have_real_module_names(model: str, gib: int) -> None:
    """Every parameter and buffer of transformers' own network is below a module of the map."""
    from snugvl.checkpoint.catalogue import catalogue_facts, find

    facts = catalogue_facts(model)
    found = find(model)
    if facts is None or found is None:
        pytest.skip(f"{model} is not in the catalogue")
    wishes = Wishes(backend="transformers", weights="bf16", images=1 if facts.vision else 0)
    choice = require(solve([Candidate(facts)], machine(gib * GIB), wishes))
    assert choice.option.offload
    network = on_meta(dict(found[0].config))
    names = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
    modules = dict(network.named_modules())
    places = dict(placement(choice))
    assert not [name for name in names if not any(name.startswith(f"{place}.") for place in places)]
    assert not [place for place in places if place not in modules]


def on_meta(config: dict[str, object]) -> torch.nn.Module:
    import transformers

    kind = getattr(transformers, str(config["architectures"][0]))  # type: ignore[index]
    with torch.device("meta"):
        return kind(transformers.AutoConfig.for_model(**config))  # type: ignore[no-any-return, arg-type]


def test_older_files_are_placed_by_transformers_names() -> None:
    """Some files store `visual.` and `model.layers.` where transformers has `model.visual.` and so on."""
    from snugvl.checkpoint.assemble import assemble, network_of
    from snugvl.checkpoint.catalogue import entries
    from snugvl.checkpoint.facts import Material, Stored

    entry = next(entry for entry in entries() if entry.name == "google/gemma-3-4b-it")
    network = network_of(entry.config, entry.images, "here")
    old, new = next(alias for alias in network.aliases if alias[1] == "model.language_model.")
    stored = tuple(
        Stored(
            tensor.name.replace(new, old, 1) if tensor.name.startswith(new) else tensor.name, "BF16",
            tensor.shape, 2 * prod(tensor.shape),
        )
        for tensor in network.tensors
    )  # fmt: skip
    assert any(tensor.name.startswith(old) for tensor in stored)
    facts = assemble("old", Material("old", "folder", None, dict(entry.config), entry.images, stored, 0))
    choice = require(
        solve([Candidate(facts)], machine(6 * GIB), Wishes(backend="transformers", weights="bf16"))
    )
    places = dict(placement(choice))
    assert places["model.language_model.layers.0"] == "cuda:0"
    assert not [place for place in places if place.startswith(old)]

"""A multi-token predictor in the plan: its weights, its keys and values, and what it goes on from."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugvl.checkpoint.catalogue import catalogue_facts, find
from snugvl.checkpoint.facts import PREDICTOR, ModelFacts
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.graphs.prefill import PictureGraphs, StepGraphs
from snugvl.engine.memory import allocate
from snugvl.engine.predictor import hidden_states
from snugvl.layers.weights import FormatName
from snugvl.models import loader
from snugvl.models.networks import Qwen35
from snugvl.planner.engines.native import step_graphs
from snugvl.planner.footprint.kv import block_bytes, predictor_component
from snugvl.planner.footprint.weights import sizes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import HeadFormat, Settings
from tests.planner.test_native import held

NAME = "Qwen/Qwen3.5-4B"


def facts_of() -> ModelFacts:
    facts = catalogue_facts(NAME)
    assert facts is not None
    return facts


def network(vocab: int = 512) -> Qwen35:
    """Two layers, without memory; the predictor's widths are the model's."""
    found = find(NAME)
    assert found is not None
    values: dict[str, Any] = deepcopy(dict(found[0].config))
    values["text_config"] |= {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": vocab}
    with torch.device("meta"):
        return Qwen35(parse_config(values, NAME).with_predictor()).to(torch.bfloat16)


@pytest.mark.parametrize(("weights", "head"), [("bf16", "bf16"), ("int8", "int8"), ("int4", "int8")])
def test_it_is_planned_to_the_byte(weights: FormatName, head: HeadFormat) -> None:
    plain, model = inventory(facts_of()), inventory(facts_of().with_predictor())
    ours, settings = network(), Settings("native", weights, head, sequences=8)
    loader.choose_formats(ours, loader.Storage(weights, head), None)
    assert sum(size * count for size, count in sizes(model, settings, "predictor")) == held(ours.mtp)
    for part in ("decoder", "embedding", "vision"):
        assert list(sizes(model, settings, part)) == list(sizes(plain, settings, part))
    config = EngineConfig(num_blocks=1, max_num_seqs=8)
    cache, hidden = allocate(ours, config), hidden_states(ours, config)
    assert hidden is not None
    ours.config = replace(ours.config, text=replace(ours.config.text, predictors=0))
    without = allocate(ours, config)
    assert block_bytes(model, settings) - block_bytes(plain, settings) == cache.nbytes - without.nbytes > 0
    assert predictor_component(model, settings).nbytes == hidden.nbytes
    assert hidden_states(ours, config) is None
    assert predictor_component(plain, settings).nbytes == 0


@pytest.mark.parametrize("drafts_alone", [False, True])
def test_what_it_is_given_is_part_of_what_graphs_hold(drafts_alone: bool) -> None:
    facts, limits = facts_of(), EngineConfig(99, max_model_len=3000, max_num_seqs=32, max_batched_tokens=2000)
    if drafts_alone:
        limits = replace(limits, step_graph_tokens=step_graphs.DRAFT_TOKENS)
    ours, cache = network(facts.text.vocab_size), SimpleNamespace(block_size=16)
    pool: Any = None
    held_: list[Any] = [StepGraphs(ours, cache, limits, pool, torch.empty(99, 1))._buffers()]  # type: ignore[arg-type]
    held_ += [] if drafts_alone else [PictureGraphs(ours, pool)._buffers()]
    made = [getattr(each, name) for each in held_ for name in each.__slots__]
    settings = Settings("native", context=3000, chunk=2000, sequences=32, step_graphs=not drafts_alone)
    planned = step_graphs.held_bytes(inventory(facts.with_predictor()), settings)
    assert 0 <= planned - sum(part.nbytes for part in made if isinstance(part, torch.Tensor)) <= 512


def test_only_a_whole_one_of_one_layer_counts() -> None:
    facts = facts_of()
    stored = [tensor for tensor in facts.tensors if tensor.name.startswith(PREDICTOR)]
    assert len(stored) == 15
    assert not any(tensor.loaded for tensor in stored)
    assert all(t.loaded for t in facts.with_predictor().tensors if t.name.startswith(PREDICTOR))
    assert facts.with_predictor().with_predictor() == facts.with_predictor()
    assert replace(facts, predictor=None).with_predictor().predicts is False

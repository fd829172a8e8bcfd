"""Text models against transformers on the same weights, in float32: logits, and 64 greedy tokens."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.errors import CheckpointError
from snugvl.models import loader
from snugvl.models.loader import load_model
from snugvl.models.networks import CausalLM
from tests import text_checkpoints
from tests.checkpoints import dequantised
from tests.engine.toy import run, tokens
from tests.models.forward import Prompt, logits
from tests.text_checkpoints import MODELS

CPU = torch.device("cpu")
PROMPT = [3 + (37 * i + i * i) % 300 for i in range(30)]  # longer than any window
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("text")
    return cache(lambda name: text_checkpoints.write(root / name.replace(" ", "_"), MODELS[name]))


def load(folder: Path) -> CausalLM:
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(model, CausalLM)
    return model


def oracle(folder: Path, name: str) -> Any:
    if MODELS[name].fp8:  # transformers' own FP8 needs a kernel from the Hub: the plain product instead
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name].config))
        model.load_state_dict(dequantised(folder), strict=False)
        model.tie_weights()
        return model.eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(
    "llama 3.2", "llama, biased", "mistral", "qwen2.5", "qwen3", "qwen3, fp8", "phi-3", "phi-3 long"
)
def test_logits_and_64_greedy_tokens_equal_transformers(name: str, folders: Any) -> None:
    folder = folders(name)
    ours, theirs = load(folder), oracle(folder, name)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = theirs(ids).logits[0]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits(ours, Prompt(PROMPT)), expected, atol=1e-4, rtol=0)
    new = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert len(set(new)) > 3  # a loop of one token would prove little
    engine = Engine(ours, EngineConfig(num_blocks=16, max_model_len=128))
    assert tokens(run(engine, EngineRequest("a", tuple(PROMPT), SAMPLING))["a"]) == new


@pytest.mark.parametrize("name", ["llama 3.2", "mistral", "qwen2.5", "phi-4 mini"])
@pytest.mark.sample("qwen2.5")
def test_company_chunks_and_preemption_change_no_token(name: str, folders: Any) -> None:
    model = load(folders(name))
    asked = [EngineRequest(str(n), tuple(PROMPT[n : 20 + 3 * n]), SAMPLING) for n in range(4)]
    whole = EngineConfig(num_blocks=32, max_model_len=128)
    alone = [tokens(run(Engine(model, whole), each)[each.request_id]) for each in asked]
    tight = EngineConfig(num_blocks=24, block_size=8, max_model_len=104, max_num_seqs=4, max_batched_tokens=7)
    here = Engine(model, tight)
    together = run(here, *asked)
    assert [tokens(together[each.request_id]) for each in asked] == alone
    assert here.stats.preemptions > 0


@pytest.mark.parametrize("name", ["mistral", "qwen2.5", "phi-3"])
@pytest.mark.sample("qwen2.5")
def test_a_window_and_blocks_that_another_request_left(name: str, folders: Any) -> None:
    """The prefix cache keeps what a window has passed by: a shorter question may begin before it."""
    model = load(folders(name))
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=128)
    short = EngineRequest("short", (*PROMPT[:13], 7), SAMPLING)
    expected = tokens(run(Engine(model, config), short)["short"])
    shared = Engine(model, config)
    run(shared, EngineRequest("long", tuple(PROMPT), SAMPLING))
    assert tokens(run(shared, short)["short"]) == expected
    assert shared.stats.prefix_hit_tokens == 12


def test_long_contexts_of_scaled_positions_equal_transformers(folders: Any) -> None:
    """Far beyond the original 64 positions, where only the scaling tells places apart."""
    ids = [3 + (31 * i + i * i) % 290 for i in range(300)]
    for name in ("llama 3.2", "llama, linear", "qwen2.5, yarn"):
        folder = folders(name)
        with torch.inference_mode():
            expected = oracle(folder, name)(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits(load(folder), Prompt(ids)), expected, atol=1e-4, rtol=0)


def edit(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mistral", "model.layers.1.self_attn.k_proj.weight", "lacks tensor"),
        ("qwen2.5", "model.layers.2.self_attn.q_proj.bias", "lacks tensor"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "lacks tensor"),
        ("phi-3", "model.layers.0.mlp.gate_up_proj.weight", "lacks tensor"),
        ("phi-3", "lm_head.weight", "lacks tensor"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, message: str, tmp_path: Path) -> None:
    folder = text_checkpoints.write(tmp_path, MODELS[name])
    edit(folder, lambda state: state.pop(tensor))
    with pytest.raises(CheckpointError, match=f"{message} '{tensor}'"):
        load(folder)


def test_a_fused_tensor_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    folder = text_checkpoints.write(tmp_path, MODELS["phi-3"])
    name = "model.layers.0.self_attn.qkv_proj.weight"
    edit(folder, lambda state: state.update({name: state[name][:-1].clone()}))
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight' has shape \[191, 96\].*\[192, 96\]"):
        load(folder)


def test_biases_that_the_configuration_does_not_name_are_refused(tmp_path: Path) -> None:
    folder = text_checkpoints.write(tmp_path, MODELS["llama, biased"])
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"attention_bias": False}))
    with pytest.raises(CheckpointError, match=r"_proj.bias' does not belong to a LlamaForCausalLM"):
        load(folder)


def test_two_names_of_one_tensor_are_refused(folders: Any) -> None:
    tensors = loader.read_weights(folders("qwen3"))
    entry = tensors["model.norm.weight"]
    both = {"old.norm.weight": entry, "model.norm.weight": entry}
    renamed = loader._renamed({"old.norm.weight": entry}, (("old.", "model."),))
    assert list(renamed) == ["model.norm.weight"]
    with pytest.raises(CheckpointError, match="are the same one"):
        loader._renamed(both, (("old.", "model."),))

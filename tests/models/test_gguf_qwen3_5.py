"""GGUFs of Qwen3.5 and of mixtures: what the converter changes is undone, and llama.cpp answers the same."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from training.gguf_export import export, rewrite

from snugvl.checkpoint.gguf_facts import gguf_facts
from snugvl.checkpoint.gguf_files import file_material, gguf_files
from snugvl.checkpoint.gguf_folder import folder_of
from snugvl.checkpoint.read import facts_of
from snugvl.core.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.linear import Linear
from snugvl.models.linear_attention import join_projections
from snugvl.models.loader import load_model, open_checkpoint
from snugvl.planner.footprint.kv import state_bytes
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests import gguf_models, hybrid, mixtures
from tests.engine.toy import run, tokens
from tests.models.forward import Prompt, logits
from tests.models.test_mixtures import CONFIG, PICTURE, request
from tests.models.test_qwen3_vl import CASES

CPU = torch.device("cpu")
MODELS = ("qwen35", "qwen35moe", "qwen3vlmoe")
KINDS = ("Q8_0", "Q5_0", "IQ4_NL", "MXFP4")  # whose blocks are 32 columns
ANSWERS = """
import json, os, sys, urllib.request, xllamacpp as x
given = json.loads(sys.stdin.read())
params = x.CommonParams()
params.model.path, params.n_ctx, params.verbosity, params.warmup = given["model"], 256, 1, False
params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = x.Server(params)
body = {"prompt": given["prompt"], "n_predict": 24, "temperature": 0, "return_tokens": True}
body["ignore_eos"] = True
address = server.listening_address + "/completion"
asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.dumps(json.loads(urllib.request.urlopen(asked).read())["tokens"]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders with a checkpoint `source`, its GGUF in float32 and its mmproj, each written once."""

    def write(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        if name == "qwen35":
            source = hybrid.write(root / "source", hybrid.Options(predictor=True, tied=False, value_dim=16))
        else:
            moe = name == "qwen35moe"
            options = mixtures.Options("qwen3_5_moe" if moe else "qwen3_vl_moe", predictor=moe, value_dim=16)
            source = mixtures.write(root / "source", options)
        (source / "preprocessor_config.json").write_text(json.dumps(mixtures.IMAGES))
        gguf_models._tokenizer(source, 320)
        export(str(source), root / "model.gguf", "F32")
        return root

    return cache(write)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder(path: Path) -> Path:
    files = gguf_files(str(path))
    assert files is not None
    return folder_of(files)


def loaded(path: Path, **said: Any) -> Any:
    return load_model(path, dtype=torch.float32, device=CPU, **said)


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_that_all_layers_lack_is_missed_by_the_plan(name: str, made: Any) -> None:
    """No layer differs from another: only what the network is made of says so."""
    files = gguf_files(str(made(name) / "model.gguf"))
    assert files is not None
    material = file_material("m", files)
    assert gguf_facts(name, material).native
    for lost in ("attn_norm.weight", "attn_output.weight", "output_norm.weight"):
        kept = tuple(tensor for tensor in material.tensors if not tensor.name.endswith(lost))
        assert len(kept) < len(material.tensors)
        with pytest.raises(
            CheckpointError, match=r"lacks the tensor model\..*\.weight \(\d+ of \d+ that the"
        ):
            gguf_facts(name, replace(material, tensors=kept))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("qwen35moe")
def test_64_greedy_tokens_are_the_checkpoints(name: str, made: Any) -> None:
    """With a picture, and where there is one with the predictor."""
    root = made(name)
    predicts = name != "qwen3vlmoe"
    ours, theirs = (
        loaded(each, predictor=predicts) for each in (folder(root / "model.gguf"), root / "source")
    )
    for case in CASES.values():
        torch.testing.assert_close(logits(ours, case), logits(theirs, case), atol=1e-4, rtol=0)
    answers = [tokens(run(Engine(each, CONFIG), request("a", PICTURE))["a"]) for each in (ours, theirs)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3
    if predicts:
        guessing = EngineConfig(num_blocks=64, block_size=4, max_model_len=160, speculation="mtp")
        here = Engine(ours, guessing)
        assert tokens(run(here, request("a", PICTURE))["a"]) == answers[0]


@pytest.mark.parametrize("name", MODELS)
def test_without_its_mmproj_it_reads_the_same_text(name: str, made: Any, tmp_path: Path) -> None:
    root = made(name)
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(root / "model.gguf")
    ours = loaded(folder(alone))
    assert ours.tower is None
    blind = loaded(root / "source", language_only=True)
    torch.testing.assert_close(logits(ours, CASES["text"]), logits(blind, CASES["text"]), atol=1e-4, rtol=0)


def quantised(root: Path, out: Path, *, wide: bool = False) -> Path:
    """The same file with matrices in blocks, another type for each kind; `wide`: their values in float32."""

    def change(tensor: Any) -> tuple[Any, Any]:
        ends = tensor.name.split(".")
        if len(tensor.data.shape) < 2 or ends[-1] != "weight" or "conv1d" in tensor.name:
            return tensor.data, None
        if "gate_inp" in tensor.name:
            return tensor.data, None
        kind = gguf.GGMLQuantizationType[KINDS[len(ends[-2]) % len(KINDS)]]
        kind = gguf.GGMLQuantizationType.Q8_0 if "exps" in tensor.name and "down" not in tensor.name else kind
        raw = gguf_models.random_blocks(
            kind.name, tensor.data.size // tensor.data.shape[-1], tensor.data.shape[-1]
        )
        if wide:
            values = gguf.quants.dequantize(raw, kind).reshape(tensor.data.shape)
            return values, None
        return raw.reshape(*tensor.data.shape[:-1], -1), kind

    rewrite(root / "model.gguf", out, change)
    return out


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_blocks_of_every_matrix_mean_what_their_values_do(name: str, made: Any, tmp_path: Path) -> None:
    """Value heads stay apart, so no columns of blocks have to move; experts are rows of one matrix."""
    root = made(name)
    ours = loaded(folder(quantised(root, tmp_path / "blocks.gguf")))
    wide = loaded(folder(quantised(root, tmp_path / "wide.gguf", wide=True)))
    met = set()
    for place, module in ours.decoder.named_modules():
        if isinstance(module, Linear) and module.parts:
            met |= {part.type for part in module.parts}
            assert torch.equal(module.weights.wide(torch.float32), _twin(wide.decoder, place, module)), place
    assert met >= set(KINDS) - {"MXFP4"}
    assert logits(ours, CASES["text"]).isfinite().all()


def _twin(decoder: torch.nn.Module, place: str, linear: Linear) -> torch.Tensor:
    """Values of the same matrix in float32, where both projections of linear attention are one."""
    owner, _, name = place.rpartition(".")
    if not name.startswith("in_proj"):
        return decoder.get_submodule(place).weights.wide(torch.float32)
    whole = decoder.get_submodule(f"{owner}.in_proj").weight
    return whole[: linear.rows] if name == "in_proj_qkvz" else whole[-linear.rows :]


@pytest.mark.parametrize("name", MODELS)
def test_its_plan_is_what_our_engine_holds(name: str, made: Any, tmp_path: Path) -> None:
    from snugvl.checkpoint.gguf_network import ours as as_ours
    from snugvl.models.networks import segment_bytes

    root = made(name)
    file = quantised(root, tmp_path / "blocks.gguf")
    facts = facts_of(str(file))
    assert facts.native, facts.gguf
    assert facts.gguf is not None
    opened = open_checkpoint(folder(file), torch.bfloat16)
    join_projections(opened.model.decoder.layers)
    model, settings = inventory(as_ours(facts)), Settings("native", "int4")
    held = {id(each): each.nbytes for each in (*opened.model.parameters(), *opened.model.buffers())}
    assert weight_bytes(model, settings) == sum(held.values())
    assert segment_bytes(held.values()) >= 0
    plain = inventory(facts_of(str(root / "source")))
    assert state_bytes(model, settings) == state_bytes(plain, settings)
    assert model.facts.text.mixture == plain.facts.text.mixture
    assert model.facts.text.kv_layers == plain.facts.text.kv_layers


def test_gate_and_up_of_two_types_are_refused_by_name(made: Any, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0

    def change(tensor: Any) -> tuple[Any, Any]:
        if tensor.name != "blk.1.ffn_gate_exps.weight":
            return tensor.data, None
        return gguf.quants.quantize(tensor.data, kind), kind

    rewrite(made("qwen35moe") / "model.gguf", tmp_path / "mixed.gguf", change)
    with pytest.raises(UnsupportedModel, match=r"ffn_gate_exps\.weight is Q8_0, but its experts' up is F32"):
        folder(tmp_path / "mixed.gguf")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("qwen35", "qwen3vlmoe")
def test_llama_cpp_answers_the_same(name: str, made: Any) -> None:
    pytest.importorskip("xllamacpp")
    file = made(name) / "model.gguf"
    prompt = list(range(40, 60))
    given = json.dumps({"model": str(file), "prompt": prompt})
    ran = subprocess.run([sys.executable, "-c", ANSWERS], input=given, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = json.loads(ran.stdout.strip().splitlines()[-1])
    ours = tokens(run(Engine(loaded(folder(file)), CONFIG), request("a", Prompt(prompt)))["a"])
    assert theirs == ours[: len(theirs)]
    assert len(set(theirs)) > 3

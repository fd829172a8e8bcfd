"""Mixtures of experts on our network and engine against transformers on the same weights, in float32."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.weights import FormatName
from snugvl.models.loader import Storage, load_model
from tests import mixtures, prequantized
from tests.checkpoints import IMAGE
from tests.engine.toy import run, tokens
from tests.mixtures import FAMILIES, Form, Options
from tests.models.forward import Prompt, logits
from tests.models.test_qwen3_5 import oracle
from tests.models.test_qwen3_vl import CASES, prompt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True)
FEW = replace(SAMPLING, max_tokens=16)  # where the same engine computes with other files
CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=160)
PICTURE = prompt(11, 12, (1, 4, 6), 13, 14, 15)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a checkpoint, written once."""
    return cache(lambda options: mixtures.write(tmp_path_factory.mktemp("mixture"), options))


def load(folder: Path, **said: Any) -> Any:
    return load_model(folder, dtype=torch.float32, device=DEVICE, **said)


def close(ours: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="`forward.logits` makes its batch on the host")
@pytest.mark.sample(
    "text-qwen3_vl_moe",
    "one image-qwen3_5_moe",
    "larger than the position grid-qwen3_5_moe",
    "image last-qwen3_vl_moe",
    "three images, some side by side-qwen3_vl_moe",
)
def test_logits_equal_transformers(name: str, family: str, made: Any) -> None:
    folder = made(Options(family))
    right = oracle(mixtures.transformers_of(folder, Options(family)), CASES[name])
    assert right.abs().max() > 0.5
    close(logits(load(folder), CASES[name]), right)


def request(name: str, case: Prompt) -> EngineRequest:
    items = tuple(
        VisionItem(patches, grid, f"{name}{number}".encode())
        for number, (patches, grid) in enumerate(zip(case.patches.split(24), case.grids, strict=False))
    )
    return EngineRequest(name, tuple(case.ids), SAMPLING, items)


def greedy(theirs: Any, case: Prompt) -> list[int]:
    kinds = torch.tensor([[int(token == IMAGE) for token in case.ids]])
    inputs = {"input_ids": torch.tensor([case.ids]), "mm_token_type_ids": kinds}
    if case.grids:
        inputs |= {"pixel_values": case.patches, "image_grid_thw": torch.tensor(case.grids)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    said = theirs.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    new: list[int] = said[0, len(case.ids) :].tolist()
    return new


@pytest.mark.parametrize("family", FAMILIES)
# `test_fp8_as_published_is_read` has 64 greedy tokens, `test_expert_cache.py` what goes on in company.
@pytest.mark.extended
def test_64_greedy_tokens_alone_and_in_company(family: str, made: Any) -> None:
    """With a picture; in chunks of seven tokens, preempted, and beside others."""
    folder = made(Options(family))
    theirs, ours = mixtures.transformers_of(folder, Options(family)), load(folder)
    cases = {"picture": PICTURE} | {str(n): prompt(*range(20 + n, 30 + 3 * n)) for n in range(3)}
    right = {name: greedy(theirs, case) for name, case in cases.items()}
    assert all(len(set(new)) > 3 for new in right.values())
    asked = [request(name, case) for name, case in cases.items()]
    for each in asked:
        assert tokens(run(Engine(ours, CONFIG), each)[each.request_id]) == right[each.request_id]
    tight = EngineConfig(num_blocks=44, block_size=4, max_model_len=160, max_num_seqs=4, max_batched_tokens=7)
    here = Engine(ours, tight)
    together = run(here, *asked)
    assert {name: tokens(together[name]) for name in right} == right
    assert here.stats.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["turned", "apart"])
def test_a_checkpoints_form_of_experts_changes_nothing(family: str, form: Form, made: Any) -> None:
    whole, other = (load(made(Options(family, form=each, width=48))) for each in ("whole", form))
    names = ("gate_up_proj", "down_proj")
    for one, two in zip(whole.decoder.layers, other.decoder.layers, strict=True):
        for name in names:
            assert torch.equal(*(getattr(layer.mlp.experts, name).weight for layer in (one, two)))


@pytest.mark.parametrize("form", ["whole", "turned"])
def test_tensors_that_could_be_either_way_are_read_by_those_that_cannot(form: Form, made: Any) -> None:
    """Gate and up of 64 rows and 64 columns; down tells."""
    folder = made(Options("qwen3_vl_moe", form=form, width=32))
    layer = load(folder).decoder.layers[0].mlp.experts
    state = torch.load(folder / "whole.pt")["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(layer.gate_up_proj.weight.cpu(), state.flatten(0, 1))


def test_layers_without_experts_among_them(made: Any) -> None:
    options = Options("qwen3_vl_moe", dense=(1, 3))
    folder = made(options)
    ours, theirs = load(folder), mixtures.transformers_of(folder, options)
    assert [hasattr(layer.mlp, "experts") for layer in ours.decoder.layers] == [True, False, True, False]
    case = CASES["text"]
    new = greedy(theirs, case)
    assert tokens(run(Engine(ours, CONFIG), request("a", case))["a"]) == new


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("qwen3_5_moe")
def test_fp8_as_published_is_read(family: str, made: Any) -> None:
    """Each expert by itself, in blocks with their scales."""
    options = Options(family, form="apart", fp8=True)
    folder = made(options)
    theirs, ours = mixtures.transformers_of(folder, options), load(folder)
    assert tokens(run(Engine(ours, CONFIG), request("a", PICTURE))["a"]) == greedy(theirs, PICTURE)


def test_turned_fp8_blocks_are_turned_with_their_scales(made: Any, tmp_path: Path) -> None:
    """As Qwen3-VL's files would have them: one tensor of all experts, its scales of the same form."""
    apart = made(Options("qwen3_vl_moe", form="apart", fp8=True))
    state = load_file(apart / "model.safetensors")
    stems = {name.split(".experts.")[0] for name in state if ".experts." in name}
    for stem in stems:
        for suffix in ("", "_scale_inv"):

            def taken(expert: int, part: str, stem: str = stem, suffix: str = suffix) -> torch.Tensor:
                return state.pop(f"{stem}.experts.{expert}.{part}.weight{suffix}")

            every = range(mixtures.COUNT)
            first = [torch.cat([taken(e, "gate_proj"), taken(e, "up_proj")]).T for e in every]
            state[f"{stem}.experts.gate_up_proj{suffix}"] = torch.stack(first).contiguous()
            state[f"{stem}.experts.down_proj{suffix}"] = torch.stack(
                [taken(e, "down_proj").T for e in every]
            ).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((apart / "config.json").read_text())
    for one, two in zip(load(apart).decoder.layers, load(tmp_path).decoder.layers, strict=True):
        assert torch.equal(one.mlp.experts.gate_up_proj.weight, two.mlp.experts.gate_up_proj.weight)
        assert torch.equal(one.mlp.experts.down_proj.weight, two.mlp.experts.down_proj.weight)


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed", "compressed with zeros", "auto-round"])
@pytest.mark.sample("gptq", "awq", "compressed", "auto-round")
def test_experts_of_four_bits_as_published_are_read(form: str, made: Any, tmp_path: Path) -> None:
    """Each expert by itself; what `dynamic` leaves out, attention and shared experts, is as wide as ever."""
    packed = {
        "gptq": prequantized.gptq(32, version=1), "awq": prequantized.awq(32),
        "compressed": prequantized.compressed(32, symmetric=True),
        "compressed with zeros": prequantized.compressed(32, symmetric=False),
        "auto-round": prequantized.auto_round(32),
    }[form]  # fmt: skip
    if form == "gptq":
        left = ("lm_head", "model.language_model.embed_tokens", "-:.*attn.*", "-:.*shared_expert.*")
        packed.config["dynamic"] = {name: {} for name in left}
    source = made(Options(form="apart", predictor=True))
    skip = ("attn", "shared_expert", "mtp.")
    prequantized.write(source, tmp_path / "packed", tmp_path / "wide", packed, skip)
    ours, wide = (load(tmp_path / name, predictor=True) for name in ("packed", "wide"))
    layer = ours.decoder.layers[0]
    assert (layer.mlp.experts.gate_up_proj.format, layer.mlp.shared_expert.gate_up_proj.format) == (
        "int4",
        "bf16",
    )
    asked = replace(request("a", PICTURE), sampling=FEW)
    answers = [tokens(run(Engine(each, CONFIG), asked)["a"]) for each in (ours, wide)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["channel", "block"])
@pytest.mark.sample("channel-qwen3_vl_moe", "block-qwen3_5_moe")
def test_experts_in_compressed_tensors_fp8_are_read(
    strategy: str, family: str, made: Any, tmp_path: Path
) -> None:
    """As llm-compressor writes them: each expert by itself, the router and the tower wide."""
    options = Options(family, form="apart", width=128, hidden=128)
    linears = ("gate_proj", "up_proj", "down_proj")  # attention here has no whole blocks
    prequantized.write_fp8(made(options), tmp_path / "packed", tmp_path / "wide", strategy, linears)
    kept = Storage("fp8" if strategy == "block" else "bf16")
    ours, wide = load(tmp_path / "packed", storage=kept), load(tmp_path / "wide")
    experts = ours.decoder.layers[0].mlp.experts.gate_up_proj
    assert experts.format == (kept.layers if experts.columns == 128 else "bf16")  # whole blocks
    asked = replace(request("a", PICTURE), sampling=FEW)
    answers = [tokens(run(Engine(each, CONFIG), asked)["a"]) for each in (ours, wide)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_close_to_transformers_in_bf16(family: str, made: Any) -> None:
    folder = made(Options(family))
    ours = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    theirs = mixtures.transformers_of(folder, Options(family), torch.bfloat16)
    right = oracle(theirs, CASES["text"])
    assert (logits(ours, CASES["text"]) - right).norm() / right.norm() < 3e-2


@pytest.mark.parametrize("weights", ["int8", "int4", "int5"])
def test_experts_in_few_bits_stay_close(weights: FormatName, made: Any) -> None:
    """The router and the gate of the shared expert stay wide."""
    folder = made(Options(hidden=128, width=128))
    exact = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    made_ = load_model(
        folder, dtype=torch.float32, device=torch.device("cpu"), storage=Storage(weights, group=32)
    )
    layer = made_.decoder.layers[0].mlp
    assert (layer.experts.gate_up_proj.format, layer.experts.down_proj.format) == (weights, weights)
    assert layer.scores.weight.dtype == torch.float32
    assert logits(made_, CASES["text"]).isfinite().all()
    x = torch.randn(9, 128)  # of the same routes: those of rounded layers may differ
    ids = torch.stack([torch.randperm(mixtures.COUNT)[:2] for _ in range(9)]).int()
    right, found = (each.experts(x, ids, torch.ones(9, 2)) for each in (exact.decoder.layers[0].mlp, layer))
    assert 0 < (found - right).norm() / right.norm() < {"int8": 0.02, "int5": 0.1, "int4": 0.2}[weights]


@pytest.mark.parametrize("form", ["whole", "apart"])
@pytest.mark.sample("whole")
def test_a_predictor_with_experts_guesses_and_changes_nothing(form: Form, made: Any) -> None:
    folder = made(Options(predictor=True, mtp_form=form))
    plain, ours = load(folder), load(folder, predictor=True)
    assert hasattr(ours.mtp.layers[0].mlp, "experts")
    right = tokens(run(Engine(plain, CONFIG), request("a", PICTURE))["a"])
    guessing = EngineConfig(num_blocks=64, block_size=4, max_model_len=160, speculation="mtp")
    here = Engine(ours, guessing)
    assert tokens(run(here, request("a", PICTURE))["a"]) == right


def test_what_is_missing_or_of_another_size_is_named(made: Any, tmp_path: Path) -> None:
    folder = made(Options())
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    whole = state.pop(name)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks tensor 'model\.language_model\.layers\.2\.mlp\.experts"
    ):
        load(tmp_path)
    save_file(state | {name: whole[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts"):
        load(tmp_path)


def test_routers_that_dont_normalise_are_refused() -> None:
    values = mixtures.config(Options("qwen3_vl_moe"))
    values["text_config"]["norm_topk_prob"] = False
    with pytest.raises(UnsupportedModel, match="norm_topk_prob False"):
        parse_config(values, "config.json")

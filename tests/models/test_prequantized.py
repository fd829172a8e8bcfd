"""Pre-quantized 4-bit checkpoints on our engine: each weight as stored, and strict about the rest."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import snugvl
from snugvl.checkpoint.read import facts_of
from snugvl.core.messages import user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import CheckpointError, DoesNotFit, RequestError, SnugvlError, UnsupportedModel
from snugvl.layers.linear import Linear
from snugvl.models import tensor_files
from snugvl.models.loader import Storage, load_model
from snugvl.models.prequantized import move_awq
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests import prequantized, qwen2_5_vl, text_checkpoints
from tests.inputs import pieces
from tests.models.forward import Prompt, logits
from tests.planner.machines import GIB, machine
from tests.text_checkpoints import QWEN2, Text

CPU = torch.device("cpu")
PROMPT = Prompt([3 + (37 * i + i * i) % 300 for i in range(20)])
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 384, "rope_theta": 1e6, "head_dim": 32}
TEXT = Text(QWEN2, "qwen2", SIZES)  # with biases beside the queries, keys and values
WHOLE_BLOCKS = Text(QWEN2, "qwen2", SIZES | {"num_key_value_heads": 4})  # of 128 rows, each of its matrices
CUT_BLOCKS = Text(QWEN2, "qwen2", SIZES | {"num_key_value_heads": 2})  # keys and values have 64
Q = "model.layers.1.self_attn.q_proj"


class Pair(NamedTuple):
    packed: Path
    wide: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """By form: a 4-bit text model, and the same in float32."""
    root = tmp_path_factory.mktemp("pre-quantized")
    source = text_checkpoints.write(pieces.write(root / "plain"), TEXT)

    def made(form: str) -> Pair:
        folder = root / form.replace(" ", "_").replace(",", "")
        pair = Pair(folder / "packed", folder / "wide")
        prequantized.write(source, *pair, prequantized.FORMS[form])
        return pair

    return cache(made)


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, dtype=torch.float32, device=CPU, **options)


@pytest.mark.parametrize("form", prequantized.FORMS)
def test_weights_logits_and_bytes_are_those_of_the_float32_model(
    form: str, pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 2048)  # many pieces for each matrix
    pair = pairs(form)
    packed, wide = load(pair.packed), load(pair.wide)
    twins = dict(wide.named_modules())
    seen = 0
    for name, module in packed.named_modules():
        if isinstance(module, Linear):
            assert module.format == ("int4" if "layers" in name else "bf16")
            assert torch.equal(module.weights.wide(torch.float32), twins[name].weight)
            seen += module.format == "int4"
    assert seen == 4 * TEXT.config["num_hidden_layers"]
    theirs = AutoModelForCausalLM.from_pretrained(pair.wide, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT.ids])).logits[0]
    torch.testing.assert_close(logits(packed, PROMPT), expected, atol=1e-4, rtol=0)
    model = inventory(facts_of(str(pair.packed), offline=True))
    distinct = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
    assert weight_bytes(model, Settings("native", "int4", float32=True)) == sum(distinct.values())


@pytest.mark.parametrize(
    ("strategy", "weights"), [("block", "fp8"), ("block", "bf16"), ("channel", "bf16"), ("channel", "int8")]
)
def test_compressed_tensors_fp8_is_what_its_scales_say(strategy: str, weights: Any, tmp_path: Path) -> None:
    """llm-compressor's FP8_BLOCK stays FP8, as Qwen's own; FP8_DYNAMIC, with scales of rows, is made wide or
    rounded again."""
    source = text_checkpoints.write(pieces.write(tmp_path / "plain"), WHOLE_BLOCKS)
    prequantized.write_fp8(source, tmp_path / "packed", tmp_path / "wide", strategy)
    packed = load(tmp_path / "packed", storage=Storage(weights))
    assert packed.decoder.layers[0].mlp.down_proj.format == weights
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT.ids])).logits[0]
    near = 0.1 if weights == "int8" else 1e-5
    assert (logits(packed, PROMPT) - expected).norm() < near * expected.norm()
    facts = facts_of(str(tmp_path / "packed"), offline=True)
    distinct = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
    planned = weight_bytes(inventory(facts), Settings("native", weights, float32=True))
    assert planned == sum(distinct.values())
    found = solve([Candidate(facts)], machine(8 * GIB), Wishes(backend="native")).choice
    assert found is not None
    asked = solve([Candidate(facts)], machine(8 * GIB), Wishes(backend="native", weights="fp8"))
    told = [each.text for each in asked.refusals]
    assert told == [] if strategy == "block" else "isn't in blocks of 128 × 128" in told[0]
    kept = "fp8" if strategy == "block" else "bf16"
    assert (found.settings.weights, found.option.stored_quality) == (kept, "fp8")


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_fp8_blocks_that_end_within_a_joined_matrix_are_made_wide(weights: Any, tmp_path: Path) -> None:
    """The rows of queries, keys and values together are whole blocks; those of keys alone aren't."""
    source = text_checkpoints.write(pieces.write(tmp_path / "plain"), CUT_BLOCKS)
    prequantized.write_fp8(source, tmp_path / "packed", tmp_path / "wide", "block")
    packed = load(tmp_path / "packed", storage=Storage(weights))
    layer = packed.decoder.layers[0]
    assert (layer.self_attn.qkv_proj.rows, layer.self_attn.qkv_proj.format) == (256, "bf16")
    assert layer.mlp.down_proj.format == weights
    torch.testing.assert_close(
        logits(packed, PROMPT), logits(load(tmp_path / "wide"), PROMPT), atol=1e-4, rtol=0
    )
    model = inventory(facts_of(str(tmp_path / "packed"), offline=True))
    if weights == "bf16":
        distinct = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
        assert weight_bytes(model, Settings("native", "bf16", float32=True)) == sum(distinct.values())
    asked = solve([Candidate(model.facts)], machine(8 * GIB), Wishes(backend="native", weights=weights))
    told = [each.text for each in asked.refusals]
    assert told == [] if weights == "bf16" else "blocks of 128 × 128, each within one matrix" in told[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "tensor"}, "strategy 'tensor'"),
        ({"strategy": "block", "block_structure": "128x128"}, "block_structure '128x128'"),
        ({"symmetric": False}, "symmetric False"),
    ],
)
def test_other_fp8_is_refused_by_name_before_a_download(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = text_checkpoints.write(pieces.write(tmp_path / "plain"), WHOLE_BLOCKS)
    prequantized.write_fp8(source, tmp_path / "packed", tmp_path / "wide", "channel")
    config = json.loads((tmp_path / "packed/config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=words):
        load(tmp_path / "packed")
    facts = facts_of(str(tmp_path / "packed"), offline=True)
    (refused,) = solve([Candidate(facts)], machine(8 * GIB), Wishes(backend="native")).refusals
    assert words in refused.text
    assert "does not run the" not in refused.text


@pytest.mark.parametrize("form", [form for form in prequantized.FORMS if "128" not in form])
def test_from_a_folder_to_an_answer(form: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(form)
    request = snugvl.Request(
        messages=(user("the quick brown fox"),), sampling=SamplingParams(max_tokens=16, ignore_eos=True)
    )
    with snugvl.load(pair.packed, device="cpu", dtype="float32") as model:
        assert model.capabilities.weights == "int4"
        packed = "".join(delta.text for delta in model.backend.submit(request))
    with snugvl.load(pair.wide, device="cpu", dtype="float32") as model:
        assert "".join(delta.text for delta in model.backend.submit(request)) == packed
    with pytest.raises(RequestError, match="stored in int4"):
        snugvl.load(pair.packed, device="cpu", weights="bf16")
    with pytest.raises(UnsupportedModel, match="pre-quantized weights stay int4, not int8"):
        load(pair.packed, storage=Storage("int8"))


def test_a_vision_language_model_as_the_hub_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-VL-AWQ: older names, a vision tower that isn't quantised."""
    monkeypatch.setitem(qwen2_5_vl.TEXT, "intermediate_size", 128)
    (tmp_path / "plain").mkdir()
    source = qwen2_5_vl.write(tmp_path / "plain", placeholders=qwen2_5_vl.PLACEHOLDERS)
    prequantized.write(
        source, tmp_path / "packed", tmp_path / "wide", prequantized.FORMS["awq"], skip=("visual",)
    )
    packed, wide = load(tmp_path / "packed"), load(tmp_path / "wide")
    kinds = {module.format for module in packed.decoder.layers.modules() if isinstance(module, Linear)}
    assert kinds == {"int4"}
    torch.testing.assert_close(logits(packed, PROMPT), logits(wide, PROMPT), atol=1e-5, rtol=0)
    for name, value in packed.tower.state_dict().items():
        assert torch.equal(value, wide.tower.state_dict()[name])
    model = inventory(facts_of(str(tmp_path / "packed"), offline=True))
    distinct = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
    assert weight_bytes(model, Settings("native", "int4", float32=True)) == sum(distinct.values())


def test_layers_left_out_of_the_quantisation_stay_wide(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    source = pairs("awq").wide
    prequantized.write(
        source, tmp_path / "packed", tmp_path / "wide", prequantized.FORMS["awq"], skip=("layers.1.", "down")
    )
    packed, wide = load(tmp_path / "packed"), load(tmp_path / "wide")
    assert packed.decoder.layers[1].mlp.gate_up_proj.format == "bf16"
    assert packed.decoder.layers[0].mlp.down_proj.format == "bf16"
    assert packed.decoder.layers[0].mlp.gate_up_proj.format == "int4"
    torch.testing.assert_close(logits(packed, PROMPT), logits(wide, PROMPT), atol=1e-4, rtol=0)
    model = inventory(facts_of(str(tmp_path / "packed"), offline=True))
    distinct = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
    assert weight_bytes(model, Settings("native", "int4", float32=True)) == sum(distinct.values())


Change = Callable[[dict[str, torch.Tensor]], Any]
PROBLEMS: dict[str, tuple[str, Change, type[SnugvlError], str]] = {
    "no scales": ("awq", lambda s: s.pop(f"{Q}.scales"), CheckpointError, r"q_proj\.qweight' has no scales"),
    "no zero points": ("awq", lambda s: s.pop(f"{Q}.qzeros"), CheckpointError, "has no qzeros beside it"),
    "no codes": (
        "awq",
        lambda s: s.pop(f"{Q}.qweight"),
        CheckpointError,
        rf"lacks tensor '{Q}\.weight'",
    ),
    "codes of another shape": (
        "awq",
        lambda s: s.update({f"{Q}.qweight": torch.zeros(16, 128, dtype=torch.int32)}),
        CheckpointError,
        r"q_proj\.qweight' is I32 \[16, 128\], expected I32 \[128, 16\] for 128 x 128 in groups of 64",
    ),
    "scales of other groups": (
        "awq",
        lambda s: s.update({f"{Q}.scales": torch.ones(1, 128, dtype=torch.float16)}),
        CheckpointError,
        r"q_proj\.scales' is F16 \[1, 128\], expected F16 or BF16 \[2, 128\]",
    ),
    "wide scales": (
        "awq",
        lambda s: s.update({f"{Q}.scales": torch.ones(2, 128)}),
        CheckpointError,
        r"scales' is F32 \[2, 128\]",
    ),
    "a foreign matrix": (
        "awq",
        lambda s: s.update(
            {f"router.{part}": s[f"{Q}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}
        ),
        CheckpointError,
        r"'router\.qweight' does not belong",
    ),
    "a part of a matrix": (
        "awq",
        lambda s: (
            [s.pop(f"{Q}.{part}") for part in ("qweight", "qzeros", "scales")]
            and s.update({f"{Q}.weight": torch.zeros(128, 128)})
        ),
        UnsupportedModel,
        r"k_proj\.qweight' has 4 bits in groups of 64 and F16 scales, but '.*q_proj\.weight' none; .*int4",
    ),
    "a head": (
        "awq",
        lambda s: (
            s.pop("lm_head.weight") is not None
            and s.update(
                {
                    "lm_head.qweight": torch.zeros(128, 48, dtype=torch.int32),
                    "lm_head.qzeros": torch.zeros(2, 48, dtype=torch.int32),
                    "lm_head.scales": torch.ones(2, 384, dtype=torch.float16),
                }
            )
        ),
        UnsupportedModel,
        r"'lm_head\.qweight' is 4-bit outside of the decoder's layers: use the 16-bit checkpoint",
    ),
    "no scales (compressed)": (
        "compressed",
        lambda s: s.pop(f"{Q}.weight_scale"),
        CheckpointError,
        r"q_proj\.weight_packed' has no weight_scale beside it",
    ),
    "no zero points (compressed)": (
        "compressed",
        lambda s: s.pop(f"{Q}.weight_zero_point"),
        CheckpointError,
        "has no weight_zero_point beside it",
    ),
    "zero points that aren't packed": (
        "compressed, symmetric, 128",
        lambda s: s.update({f"{Q}.weight_zero_point": torch.zeros(128, 1, dtype=torch.int8)}),
        CheckpointError,
        r"weight_zero_point' is I8 \[128, 1\], expected I32 \[16, 1\]",
    ),
    "another shape": (
        "compressed",
        lambda s: s.update({f"{Q}.weight_shape": torch.tensor([128, 120])}),
        CheckpointError,
        r"weight_shape' says \[128, 120\], but its matrix is of \[128, 128\]",
    ),
    "codes by column": (
        "compressed",
        lambda s: s.update({f"{Q}.weight_packed": s[f"{Q}.weight_packed"].T.contiguous()}),
        CheckpointError,
        r"weight_packed' is I32 \[16, 128\], expected I32 \[128, 16\]",
    ),
    "columns in another order": (
        "gptq",
        lambda s: s.update({f"{Q}.g_idx": s[f"{Q}.g_idx"].flip(0)}),
        UnsupportedModel,
        r"q_proj\.g_idx' has columns in the order of activations.*--weights int4",
    ),
    "columns in another order (compressed)": (
        "compressed",
        lambda s: s.update({f"{Q}.weight_g_idx": torch.arange(128, dtype=torch.int32) % 4}),
        UnsupportedModel,
        r"q_proj\.weight_g_idx' has columns in the order of activations.*--weights int4",
    ),
    "an order of another length": (
        "gptq",
        lambda s: s.update({f"{Q}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        CheckpointError,
        r"g_idx' is I32 \[64\], expected I32 \[128\]",
    ),
    "a bias where there is none": (
        "gptq",
        lambda s: s.update({"model.layers.0.mlp.down_proj.bias": torch.ones(128)}),
        CheckpointError,
        r"down_proj\.bias' isn't zero, but this network has no such bias",
    ),
    "codes as AWQ has them": (
        "gptq",
        lambda s: s.update({f"{Q}.qweight": torch.zeros(128, 16, dtype=torch.int32)}),
        CheckpointError,
        r"qweight' is I32 \[128, 16\], expected I32 \[16, 128\]",
    ),
    "a norm": (
        "awq",
        lambda s: (
            s.pop("model.norm.weight") is not None
            and s.update(
                {f"model.norm.{part}": s[f"{Q}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}
            )
        ),
        UnsupportedModel,
        r"'model\.norm\.qweight' is 4-bit; our engine keeps it wide",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_bad_files_are_named(case: str, pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    form, change, kind, message = PROBLEMS[case]
    folder = Path(shutil.copytree(pairs(form).packed, tmp_path / "copy"))
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(kind, match=message):
        load(folder)


def test_plain_files_under_a_4_bit_configuration_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs("awq").wide, tmp_path / "copy"))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = prequantized.FORMS["awq"].config
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"no 4-bit tensor, but its config\.json names 'awq'"):
        load(folder)


def scheme(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """compressed-tensors' only scheme with changes."""
    values = prequantized.FORMS["compressed"].config["config_groups"]["group_0"]
    return {"config_groups": {"group_0": values | changes | {"weights": values["weights"] | weights}}}


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("awq", {"bits": 3}, "'awq' with bits 3, .* 4 bits in groups of 32, 64 or 128.*--weights int4"),
        ("awq", {"group_size": 16}, "group_size 16"),
        ("awq", {"group_size": -1}, "group_size -1"),
        ("awq", {"version": "GEMV"}, "version 'gemv'"),
        ("gptq", {"bits": 8}, "'gptq' with bits 8"),
        ("gptq", {"group_size": -1}, "group_size -1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic \{'\+:\.\*down"),
        ("gptq", {"desc_act": True}, "desc_act True.* without desc_act and .*: .*--weights int4"),
        (
            "auto-round",
            {"packing_format": "auto_round"},
            "packing_format 'auto_round'; auto_round:auto_gptq and",
        ),
        ("auto-round", {"bits": 8}, "'gptq' with bits 8"),
        ("auto-round", {"act_bits": 8}, "'auto-round' with .*act_bits 8"),
        ("auto-round", {"extra_config": {"a": {"bits": 8}}}, "extra_config {'a': {'bits': 8"),
        ("auto-round", {"extra_config": {"a": {"group_size": 32}}}, "extra_config {'a': {.*'group_size': 32"),
        ("compressed", {"format": "marlin-24"}, "'compressed-tensors' with format 'marlin-24'"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits': 8}"),
        ("compressed", {"config_groups": {}}, r"config_groups \[\]"),
        ("compressed", scheme({"num_bits": 8}), "num_bits 8"),
        ("compressed", scheme({"strategy": "channel"}), "strategy 'channel'"),
        ("compressed", scheme({"group_size": 256}), "group_size 256"),
        ("compressed", scheme({"actorder": "group"}), "actorder 'group'.* columns of a group together"),
        ("compressed", scheme({}, input_activations={"num_bits": 8}), "input_activations {'num_bits': 8}"),
    ],
)
def test_other_layouts_are_refused_by_name(
    form: str, changes: dict[str, Any], message: str, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs(form).packed, tmp_path / "copy"))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)
    try:
        assert not facts_of(str(folder), offline=True).native  # which a plan says before a download
    except (CheckpointError, UnsupportedModel):
        assert "desc_act" not in changes  # others are refused for every engine


def test_moving_codes_needs_no_more_than_planned() -> None:
    from snugvl.planner.engines.native.footprint import PREQUANTIZED_BYTES
    from tests.planner.trace import Trace

    words, out = torch.zeros(512, 1024, dtype=torch.int32), torch.zeros(8192, 64, dtype=torch.int32)
    trace = Trace()
    trace.keep(words)
    trace.keep(out)
    with torch.inference_mode(), trace:
        move_awq(words, out)
    assert 0 < trace.peak <= PREQUANTIZED_BYTES * words.nbytes // 2


@pytest.mark.parametrize("form", prequantized.FORMS)
def test_a_plan_takes_our_engine_with_the_weights_as_they_are(
    form: str, pairs: Callable[[str], Pair]
) -> None:
    facts = facts_of(str(pairs(form).packed), offline=True)
    choice = require(solve([Candidate(facts)], machine(8 * GIB), Wishes(backend="native")))
    assert (choice.option.engine, choice.settings.weights) == ("native", "int4")
    with pytest.raises(DoesNotFit, match="bf16"):
        require(solve([Candidate(facts)], machine(8 * GIB), Wishes(backend="native", weights="bf16")))


def test_a_plan_sends_a_4_bit_head_to_another_engine(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pairs("awq").packed, tmp_path / "copy"))
    state = load_file(folder / "model.safetensors")
    PROBLEMS["a head"][1](state)
    save_file(state, folder / "model.safetensors")
    plan = solve([Candidate(facts_of(str(folder), offline=True))], machine(8 * GIB), Wishes(backend="native"))
    assert plan.choice is None
    assert [refusal.text for refusal in plan.refusals] == [
        "our engine reads pre-quantized integers of the decoder's layers alone"
    ]

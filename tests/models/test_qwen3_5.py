"""Qwen3.5 on our network against Hugging Face transformers on the same weights, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from snugvl.checkpoint.families import parse_config
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.weights import FormatName
from snugvl.models.linear_attention import PIECE, GatedDeltaNet, runs
from snugvl.models.loader import Storage, load_model, open_checkpoint
from snugvl.models.networks import Qwen35
from tests import checkpoints, hybrid
from tests.checkpoints import IMAGE, VIDEO
from tests.models.forward import Prompt, logits
from tests.models.test_qwen3_vl import CASES, image, prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid.write(tmp_path_factory.mktemp("hybrid"), hybrid.Options(predictor=True))


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen35:
    made = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(made, Qwen35)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Qwen3_5ForConditionalGeneration:
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Qwen3_5ForConditionalGeneration:
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)


def oracle(model: Qwen3_5ForConditionalGeneration, case: Prompt, *, video: bool = False) -> torch.Tensor:
    kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in case.ids]
    inputs = {"input_ids": torch.tensor([case.ids]), "mm_token_type_ids": torch.tensor([kinds])}
    if case.grids:
        kind = "video" if video else "image"
        name = "pixel_values_videos" if video else "pixel_values"
        inputs |= {name: case.patches.to(model.dtype), f"{kind}_grid_thw": torch.tensor(case.grids)}
    with torch.inference_mode():
        result: torch.Tensor = model(**inputs).logits[0].float()
    return result


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, model: Qwen35, exact: Qwen3_5ForConditionalGeneration) -> None:
    """In float32 transformers' own logits are up to 1.1e-4 from its own in float64, ours up to 8e-5, or
    1.05e-4 on another processor, whose sums come in another order."""
    right = oracle(exact, CASES[name])
    assert right.abs().max() > 0.5  # random weights must not make the comparison trivial
    torch.testing.assert_close(logits(model, CASES[name]), right, atol=2e-4, rtol=0)


def test_video_frames_equal_transformers(model: Qwen35, theirs: Qwen3_5ForConditionalGeneration) -> None:
    frame = image((1, 4, 4), VIDEO)
    case = Prompt([1, 9, *frame, 10, *frame, 2], [(2, 4, 4)], torch.randn(32, 1536))
    torch.testing.assert_close(logits(model, case), oracle(theirs, case, video=True), atol=1e-4, rtol=1e-4)


def test_hundreds_of_tokens_equal_transformers(
    model: Qwen35, theirs: Qwen3_5ForConditionalGeneration
) -> None:
    """Several chunks of 64, and more than one piece of 256, whose float32 sums come in another order."""
    case = prompt(*[(7 * n) % 290 for n in range(300)], (1, 8, 6), 5)
    torch.testing.assert_close(logits(model, case), oracle(theirs, case), atol=2e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 1, 13, 19], [39, 1]])
def test_chunks_of_a_prefill_equal_the_whole(chunks: list[int], model: Qwen35) -> None:
    """Up to 3e-5 apart: a state sums in float32, in the order of the cuts. In float64 the cuts don't show."""
    case = prompt(1, (1, 8, 8), 2, (1, 4, 10), 3, 4)
    case = Prompt([*case.ids, *range(20, 20 + sum(chunks) - len(case.ids))], case.grids, case.patches)
    torch.testing.assert_close(logits(model, case, chunks), logits(model, case), atol=1e-4, rtol=0)


def test_an_untied_head_and_value_heads_of_their_own(tmp_path: Path) -> None:
    folder = hybrid.write(tmp_path, hybrid.Options(tied=False, value_heads=2))
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, dtype=torch.float32, device=CPU)
    case = CASES["one image"]
    torch.testing.assert_close(logits(ours, case), oracle(theirs, case), atol=1e-4, rtol=0)


def test_fp8_blocks_equal_transformers_on_dequantised_weights(tmp_path: Path) -> None:
    folder = hybrid.write(tmp_path, hybrid.Options(fp8=True))
    theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**hybrid.config())).eval()
    theirs.load_state_dict(checkpoints.dequantised(folder), strict=False)
    theirs.tie_weights()
    ours = load_model(folder, dtype=torch.float32, device=CPU)
    case = CASES["image last"]
    torch.testing.assert_close(logits(ours, case), oracle(theirs, case), atol=1e-4, rtol=0)


def test_bf16_stays_close_to_transformers_in_bf16(folder: Path) -> None:
    ours = load_model(folder, dtype=torch.bfloat16, device=CPU)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    right = oracle(theirs, CASES["text"])
    assert (logits(ours, CASES["text"]) - right).norm() / right.norm() < 2e-2


def test_without_its_tower_it_reads_the_same_text(folder: Path, model: Qwen35) -> None:
    blind = load_model(folder, dtype=torch.float32, device=CPU, language_only=True)
    assert blind.tower is None
    assert torch.equal(logits(blind, CASES["text"]), logits(model, CASES["text"]))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_decides_how_much_is_forgotten_stays_wide(weights: FormatName, tmp_path: Path) -> None:
    folder = hybrid.write(tmp_path, hybrid.Options(hidden=128))
    made = load_model(folder, dtype=torch.float32, device=CPU, storage=Storage(weights))
    layer = made.decoder.layers[0].linear_attn
    assert (layer.in_proj_qkvz.format, layer.in_proj_ba.weight.dtype) == (weights, torch.float32)
    assert logits(made, CASES["text"]).isfinite().all()


def test_projections_are_one_matrix_where_both_are_wide(folder: Path, model: Qwen35) -> None:
    joined, apart = (
        each.decoder.layers[0].linear_attn for each in (model, open_checkpoint(folder, torch.float32).model)
    )
    assert joined.in_proj is not None
    assert not hasattr(joined, "in_proj_qkvz")
    assert joined.in_proj.rows == apart.in_proj_qkvz.rows + apart.in_proj_ba.rows
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    stored = load_file(folder / "model.safetensors")
    prefix = "model.language_model.layers.0.linear_attn"
    assert torch.equal(
        joined.in_proj.weight, torch.cat([stored[f"{prefix}.{name}.weight"] for name in names])
    )


def test_a_batch_is_cut_into_runs() -> None:
    long = PIECE + 5
    found = list(runs((1, 1, 3, 1, long, 1)))
    assert [(r.rows.start, r.rows.stop, r.sequences.start, r.sequences.stop, r.single) for r in found] == [
        (0, 2, 0, 2, True),
        (2, 5, 2, 3, False),
        (5, 6, 3, 4, True),
        (6, 6 + PIECE, 4, 5, False),
        (6 + PIECE, 6 + long, 4, 5, False),
        (6 + long, 7 + long, 5, 6, True),
    ]
    assert [(r.rows, r.single) for r in runs((1,) * 4)] == [(slice(0, 4), True)]


def test_guesses_are_runs_of_their_own() -> None:
    found = list(runs((1, 5, 2, 3), unsure=(0, 3, 1, 0)))
    assert [(r.rows.start, r.rows.stop, r.sequences.start, r.single, r.sure) for r in found] == [
        (0, 1, 0, True, True),
        (1, 3, 1, False, True),
        (3, 6, 1, False, False),
        (6, 7, 2, False, True),
        (7, 8, 2, False, False),
        (8, 11, 3, False, True),
    ]


def change(values: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    for key in way:
        values = values[key]
    values[last] = value


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("architectures", ["Qwen4ForConditionalGeneration"], UnsupportedModel, "Qwen4"),
        ("text_config.hidden_act", "gelu", UnsupportedModel, "hidden_act 'gelu'; only 'silu'"),
        ("text_config.attn_output_gate", False, UnsupportedModel, "attn_output_gate False"),
        ("text_config.rope_parameters.rope_type", "yarn", UnsupportedModel, "'yarn' rotary scaling"),
        (
            "text_config.rope_parameters.mrope_interleaved",
            False,
            UnsupportedModel,
            "mrope_interleaved false; only true",
        ),
        ("text_config.rope_parameters.mrope_section", [2, 1], CheckpointError, "expected three counts"),
        ("text_config.rope_parameters.mrope_section", [2, 2, 1], CheckpointError, "half of the 8 rotated"),
        ("text_config.rope_parameters.partial_rotary_factor", 1.5, CheckpointError, "48 of 32 values"),
        ("text_config.layer_types", ["linear_attention"] * 3, CheckpointError, "3 layer_types for 4"),
        ("text_config.layer_types", ["linear_attention"] * 4, CheckpointError, "no layer has full"),
        ("text_config.layer_types", ["mamba"] * 4, CheckpointError, "unknown kind 'mamba'"),
        (
            "text_config.linear_num_key_heads",
            3,
            CheckpointError,
            "value_heads 4 is not a multiple",
        ),
        ("text_config.num_key_value_heads", 3, CheckpointError, "not a multiple of num_key_value_heads 3"),
        ("text_config.linear_conv_kernel_dim", 0, CheckpointError, "expected a positive number"),
        ("vision_config.out_hidden_size", 32, CheckpointError, "differs from the text's hidden_size 64"),
    ],
)
def test_configurations_that_are_refused(path: str, value: Any, error: type[Exception], message: str) -> None:
    values = hybrid.config()
    change(values, path, value)
    with pytest.raises(error, match=message):
        parse_config(values, "config.json")


def test_layers_by_name_and_by_interval_are_the_same() -> None:
    values = hybrid.config()
    by_interval = parse_config(values, "config.json").text.kinds
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    change(values, "text_config.layer_types", kinds)
    assert parse_config(values, "config.json").text.kinds == by_interval == ("linear",) * 3 + ("full",)


def test_foreign_tensors_are_refused_though_the_predictors_are_not(tmp_path: Path) -> None:
    folder = hybrid.write(tmp_path, hybrid.Options(predictor=True))
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mpt.fc.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"'mpt.fc.weight' does not belong"):
        load_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu_oracle.py asks the kernels there")
def test_the_kernels_in_their_place(model: Qwen35, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs of linear attention, on the layers' own weights; elsewhere in Triton's interpreter."""
    case = Prompt(list(range(40, 52)))
    right = logits(model, case)
    monkeypatch.setattr(GatedDeltaNet, "_plain", GatedDeltaNet._by_kernels)
    torch.testing.assert_close(logits(model, case, [8, 1, 1, 1, 1]), right, atol=1e-4, rtol=0)

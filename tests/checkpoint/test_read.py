"""Folders and quantised forms: read part by part, and whatever is wrong is one clear line."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.facts import TensorFact
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, CheckpointNotFound, SnugvlError, UnsupportedModel
from tests.checkpoint.conftest import write_header

HIDDEN, INTER, VOCAB = 256, 512, 1000
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
    "self_attn.v_proj": (128, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTER, HIDDEN), "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": INTER, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 2048,
}  # fmt: skip
Row = tuple[str, str, tuple[int, ...], int]
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1}


def row(name: str, dtype: str, *shape: int) -> Row:
    count = 1
    for side in shape:
        count *= side
    return name, dtype, shape, count * SIZES[dtype]


def plain() -> list[Row]:
    rows = [
        row("model.embed_tokens.weight", "BF16", VOCAB, HIDDEN),
        row("lm_head.weight", "BF16", VOCAB, HIDDEN),
    ]
    rows += [row(f"model.layers.0.{name}.weight", "BF16", HIDDEN) for name in ("input_layernorm",
             "post_attention_layernorm")]  # fmt: skip
    return [*rows, row("model.norm.weight", "BF16", HIDDEN)]


def stored(form: str, name: str, rows: int, columns: int) -> list[Row]:
    """One matrix in each form, as its own library writes it (group size 128)."""
    groups = columns // 128
    if form in ("awq", "auto-round of awq"):  # [in, out / 8]
        return [
            row(f"{name}.qweight", "I32", columns, rows // 8),
            row(f"{name}.qzeros", "I32", groups, rows // 8),
            row(f"{name}.scales", "F16", groups, rows),
        ]
    if form in ("gptq4", "gptq8"):  # [in / (32 / bits), out]
        per = 8 if form == "gptq4" else 4
        return [
            row(f"{name}.qweight", "I32", columns // per, rows),
            row(f"{name}.qzeros", "I32", groups, rows // per),
            row(f"{name}.scales", "F16", groups, rows),
            row(f"{name}.g_idx", "I32", columns),
        ]
    if form == "packed":
        return [
            row(f"{name}.weight_packed", "I32", rows, columns // 8),
            row(f"{name}.weight_scale", "BF16", rows, groups),
            row(f"{name}.weight_zero_point", "I32", rows // 8, groups),
            row(f"{name}.weight_shape", "I64", 2),
        ]
    if form == "auto-round":  # as GPTQ, without the places of columns
        return stored("gptq4", name, rows, columns)[:-1]
    if form == "int":
        return [row(f"{name}.weight", "I8", rows, columns), row(f"{name}.weight_scale", "BF16", rows, 1)]
    if form == "float":
        return [
            row(f"{name}.weight", "F8_E4M3", rows, columns),
            row(f"{name}.weight_scale", "BF16", rows, 1),
            row(f"{name}.input_scale", "F32", 1),
        ]
    return [row(f"{name}.weight", "BF16", rows, columns)]


def compressed(bits: int, kind: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "group_size": 128}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


FORMS: dict[str, tuple[dict[str, Any] | None, str | None, float]] = {
    "plain": (None, None, 2.0),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 0.5),
    "gptq4": ({"quant_method": "gptq", "bits": 4}, "int4", 0.5),
    "gptq8": ({"quant_method": "gptq", "bits": 8}, "int8", 1.0),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, "int4", 0.5),
    "auto-round of awq": (
        {
            "quant_method": "auto_round",
            "bits": 4,
            "group_size": 128,
            "packing_format": "auto_round:auto_awq",
            "extra_config": {"lm_head": {"bits": 16}},
        },
        "int4",
        0.5,
    ),
    "packed": (compressed(4, "int"), "int4", 0.5),
    "int": (compressed(8, "int"), "int8", 1.0),
    "float": (compressed(8, "float"), "fp8", 1.0),
}


def write(folder: Path, form: str = "plain", **changes: Any) -> Path:
    quantization = FORMS[form][0]
    config = CONFIG | ({"quantization_config": quantization} if quantization else {}) | changes
    (folder / "config.json").write_text(json.dumps(config))
    rows = plain()
    for name, shape in MATRICES.items():
        rows += stored(form, f"model.layers.0.{name}", *shape)
    write_header(folder / "model.safetensors", rows)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_part_by_part(form: str, tmp_path: Path) -> None:
    facts = facts_of(str(write(tmp_path, form)))
    _, kind, each = FORMS[form]
    assert facts.quantization == kind
    matrices = [tensor for tensor in facts.tensors if tensor.role == "linear"]
    assert len(matrices) == len(MATRICES)
    assert sum(t.nbytes for t in matrices) == each * sum(
        rows * columns for rows, columns in MATRICES.values()
    )
    beside = sum(len(stored(form, "x", 256, 256)) - 1 for _ in MATRICES)
    assert sum(tensor.role == "scale" for tensor in facts.tensors) == beside
    assert all(tensor.loaded for tensor in facts.tensors if tensor.role != "scale")
    assert facts.native == (form in ("plain", "awq", "auto-round", "auto-round of awq"))


def test_experts_stored_one_by_one_are_the_same_model(tmp_path: Path) -> None:
    """4-bit mixtures have a tensor for each expert; the configuration knows them as one."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
              "out_hidden_size": HIDDEN, "num_position_embeddings": 16,
              "deepstack_visual_indexes": []}  # fmt: skip
    text = CONFIG | {"num_experts": 2, "moe_intermediate_size": 128, "head_dim": 64}
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text,
              "vision_config": vision, "quantization_config": compressed(4, "int")}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1 << 24}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    from snugvl.checkpoint.assemble import network_of

    rows: list[Row] = []
    for tensor in network_of(config, images, "x").tensors:
        if tensor.role != "expert":
            rows.append(row(tensor.name, "BF16", *tensor.shape))
            continue
        experts = tensor.name.rpartition(".")[0]
        for index in range(2):
            if tensor.name.endswith("down_proj"):
                rows += stored("packed", f"{experts}.{index}.down_proj", HIDDEN, 128)
            else:
                rows += stored("packed", f"{experts}.{index}.gate_proj", 128, HIDDEN)
                rows += stored("packed", f"{experts}.{index}.up_proj", 128, HIDDEN)
    write_header(tmp_path / "model.safetensors", rows)
    facts = facts_of(str(tmp_path))
    expert = [tensor for tensor in facts.tensors if tensor.role == "expert"]
    assert len(expert) == 6
    assert sum(tensor.nbytes for tensor in expert) == 2 * 3 * 128 * HIDDEN // 2
    write_header(tmp_path / "model.safetensors", [r for r in rows if ".1.up_proj" not in r[0]])
    with pytest.raises(CheckpointError, match=r"gate_up_proj has .* elements, but config.json asks for"):
        facts_of(str(tmp_path))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 3}, "3-bit integers"),
        (
            {"quant_method": "bitsandbytes"},
            "is 'bitsandbytes'; fp8, compressed-tensors, awq, gptq, auto-round and snugvl",
        ),
        ({"quant_method": "gptq"}, "has no 'bits'"),
        ({"quant_method": "auto-round", "bits": 2}, "2-bit integers"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "x"}, "packing_format 'x'"),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 2}}},
            "modules of 2 bits beside 4",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": [2]}}},
            r"modules of \[2\] bits beside 4",
        ),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": ["x"]}, "packing_format"),
        ({"bits": 4}, "has no 'quant_method'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            "names no kind of weights; one kind can be read",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "has no 'weights'"),
        (compressed(4, "float"), "4-bit float weights"),
        (7, "expected dict"),
    ],
)
def test_a_quantisation_we_cannot_read_is_named(quantization: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        facts_of(str(write(tmp_path, quantization_config=quantization)))


def test_a_missing_tensor_and_a_wrong_size_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    rows = plain()
    write_header(tmp_path / "model.safetensors", rows)
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.0\.self_attn.* \(7 of 12"):
        facts_of(str(tmp_path))
    write(tmp_path, hidden_size=HIDDEN * 2, head_dim=64)
    with pytest.raises(
        CheckpointError, match=r"has 256,000 elements, but config\.json asks for \[1000, 512\]"
    ):
        facts_of(str(tmp_path))


def test_what_no_network_has_is_kept_but_not_loaded(tmp_path: Path) -> None:
    write(tmp_path)
    rows = [*plain(), row("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", 64)]
    for name, shape in MATRICES.items():
        rows += stored("plain", f"model.layers.0.{name}", *shape)
    write_header(tmp_path / "model.safetensors", rows)
    idle = [tensor for tensor in facts_of(str(tmp_path)).tensors if not tensor.loaded]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert idle == [TensorFact(name, "other", "F32", (64,), 256, loaded=False)]


def test_tied_heads(tmp_path: Path) -> None:
    assert facts_of(str(write(tmp_path, tie_word_embeddings=True))).tied  # stored all the same
    write(tmp_path)
    rows = [r for r in plain() if r[0] != "lm_head.weight"]
    for name, shape in MATRICES.items():
        rows += stored("plain", f"model.layers.0.{name}", *shape)
    write_header(tmp_path / "model.safetensors", rows)
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight"):
        facts_of(str(tmp_path))


def _break(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "nonsense config":
        (folder / "config.json").write_bytes(b"\xff{")
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif how == "2^60":
        weights.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    elif how == "empty":
        weights.write_bytes(b"")


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("no config", CheckpointError, r"has no config\.json"),
        ("nonsense config", CheckpointError, "is not valid JSON"),
        ("no weights", CheckpointError, "has no weights"),
        ("truncated", CheckpointError, "truncated"),
        ("2^60", CheckpointError, "1,152,921,504,606,846,976 bytes"),
        ("empty", CheckpointError, "only 0 bytes; it is truncated"),
    ],
)
def test_a_broken_folder_is_one_line(how: str, kind: type[SnugvlError], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    _break(tmp_path, how)
    with pytest.raises(kind, match=message) as caught:
        facts_of(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "/no/such/folder"])
def test_names_that_are_nothing(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="use 'pocket', a folder, or a Hub id"):
        facts_of(name, offline=True)


def test_the_catalogue_answers_without_anything_slow() -> None:
    code = (
        "import sys; from snugvl.checkpoint.read import facts_of; "
        "facts_of('Qwen/Qwen3-VL-4B-Instruct-FP8', offline=True); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch", "transformers", "numpy", "PIL", "huggingface_hub", "httpx2", "tokenizers", "pydantic"}
    assert not slow & set(run.stdout.split())


def test_an_unknown_architecture_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, architectures=["SomethingForCausalLM"])
    with pytest.raises(UnsupportedModel, match="SomethingForCausalLM, whose tensors, cache and image tokens"):
        facts_of(str(tmp_path))


def test_image_settings_of_either_file_are_read(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    images = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    first = facts_of(str(tmp_path))
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    second = facts_of(str(tmp_path))
    assert first.vision == second.vision
    assert first.native
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no preprocessor_config.json beside it"):
        facts_of(str(tmp_path))

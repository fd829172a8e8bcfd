"""GGUF files on our own engine: every value as ggml itself reads it, and what answers come of them."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from PIL import Image
from training.gguf_export import rewrite
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import snugvl
from snugvl.backends.native.loading import load_engine
from snugvl.checkpoint import gguf_folder
from snugvl.checkpoint.gguf_facts import gguf_facts
from snugvl.checkpoint.gguf_files import file_material, gguf_files
from snugvl.checkpoint.gguf_folder import folder_of
from snugvl.checkpoint.gguf_network import FACTORS
from snugvl.core.messages import Picture, Text, user
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.errors import CheckpointError, RequestError, UnsupportedModel
from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.layers.linear import Linear
from snugvl.models import tensor_files
from snugvl.models.loader import load_model
from tests import gguf_models
from tests.checkpoints import IMAGE
from tests.gguf_models import Pair
from tests.models.forward import Prompt, logits
from tests.text_checkpoints import LLAMA3

CPU = torch.device("cpu")
TYPES: tuple[GgmlType, ...] = tuple(LAYOUTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 4096)  # many pieces for each matrix


def mixed(name: str) -> GgmlType | None:
    """All types; queries and keys are of one, values of another; gate and up differ in the last layer."""
    if name.endswith("norm.weight"):
        return None
    if name.startswith("blk."):
        layer, part = int(name.split(".")[1]), name.split(".")[2]
        shared = {"attn_q": 0, "attn_k": 0, "attn_v": 2, "attn_output": 1, "ffn_down": 4}
        return TYPES[(3 * layer + shared.get(part, 5 if part == "ffn_up" and layer == 3 else 3)) % len(TYPES)]
    return "Q6_K" if name == "output.weight" else "Q5_K"


def loaded(pair: Pair, **options: Any) -> tuple[Any, Any]:
    files = gguf_files(str(pair.model))
    assert files is not None
    assert files.projector == pair.projector
    return tuple(
        load_model(folder, dtype=torch.float32, device=CPU, **options)
        for folder in (folder_of(files), pair.wide)
    )


def same_weights(ours: torch.nn.Module, wide: torch.nn.Module) -> set[str]:
    """Every tensor means the same, to the bit; the formats that were met."""
    twins, met = dict(wide.named_modules()), set()
    for name, module in ours.named_modules():
        if isinstance(module, Linear):
            assert torch.equal(module.weights.wide(torch.float32), twins[name].weight), name
            met |= {part.type for part in module.parts} or {"plain"}
            if module.bias is not None:
                assert torch.equal(module.bias, twins[name].bias), name
        elif isinstance(getattr(module, "weight", None), torch.Tensor):
            assert torch.equal(module.weight, twins[name].weight), name
    return met


def test_a_qwen3_vl_sees_as_its_float32_values_do(tmp_path: Path) -> None:
    pair = gguf_models.qwen3_vl(tmp_path, mixed, tower=lambda name: "Q8_0" if "ffn" in name else None)
    ours, wide = loaded(pair)
    assert same_weights(ours, wide) == {*TYPES, "plain"}
    generator = torch.Generator().manual_seed(1)
    ids = [5, 7, 302, *[IMAGE] * 6, 303, *range(40, 60)]
    prompt = Prompt(ids, [(1, 4, 6)], torch.randn(24, 1536, generator=generator))
    torch.testing.assert_close(logits(ours, prompt), logits(wide, prompt), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "kind", "tied"),
    [("LlamaForCausalLM", "llama", False), ("Qwen3ForCausalLM", "qwen3", True)],
)
def test_text_models(architecture: str, kind: str, tied: bool, tmp_path: Path) -> None:
    pair = gguf_models.text_model(tmp_path, architecture, kind, mixed, tied=tied)
    ours, wide = loaded(pair)
    same_weights(ours, wide)
    prompt = Prompt([3 + (37 * i + i * i) % 250 for i in range(20)])
    torch.testing.assert_close(logits(ours, prompt), logits(wide, prompt), atol=2e-4, rtol=1e-4)


def test_llama_3_turns_by_the_files_own_factors(tmp_path: Path) -> None:
    """transformers computes its frequencies from the configuration, llama.cpp stores what divides them."""
    pair = gguf_models.text_model(tmp_path, "LlamaForCausalLM", "llama", lambda _: "Q6_K")
    config = json.loads((pair.wide / "config.json").read_text()) | {"rope_scaling": dict(LLAMA3)}
    (pair.wide / "config.json").write_text(json.dumps(config))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    plain = config.get("rope_theta", 10000.0) ** (-torch.arange(0, 64, 2) / 64)
    factors = {FACTORS: (plain / theirs.inv_freq).float().numpy()}
    assert len(set(factors[FACTORS].tolist())) > 2
    file = tmp_path / "scaled.gguf"
    rewrite(pair.model, file, lambda each: (each.data, each.tensor_type), more=factors)
    ours, wide = loaded(Pair(file, None, pair.wide))
    prompt = Prompt([3 + (37 * i + i * i) % 250 for i in range(80)])
    expected = logits(wide, prompt)
    torch.testing.assert_close(logits(ours, prompt), expected, atol=2e-4, rtol=1e-4)
    unscaled, _ = loaded(Pair(pair.model, None, pair.wide))
    assert (logits(unscaled, prompt) - expected).abs().max() > 5e-3


def test_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    whole = gguf_models.text_model(tmp_path, "Qwen3ForCausalLM", "qwen3", mixed)
    parts = tmp_path / "parts"
    parts.mkdir()
    rewrite(whole.model, parts / "model.gguf", lambda each: (each.data, each.tensor_type), split=9)
    firsts = sorted(parts.iterdir())
    assert len(firsts) == 3
    ours, wide = loaded(Pair(firsts[0], None, whole.wide))
    same_weights(ours, wide)


def test_from_a_file_to_an_answer_about_a_picture(tmp_path: Path) -> None:
    """The plan is to the byte, and the answer that of the same values in a folder."""
    pair = gguf_models.qwen3_vl(tmp_path, mixed, tied=True)
    files = gguf_files(str(pair.model))
    assert files is not None
    for path in folder_of(files).iterdir():
        if path.name not in ("config.json", "gguf.json"):
            shutil.copy(path, pair.wide)
    picture = Picture(Image.linear_gradient("L").convert("RGB"))
    request = snugvl.Request(
        messages=(user(Text("look: "), picture),), sampling=SamplingParams(max_tokens=12, ignore_eos=True)
    )
    answers = []
    for model in (pair.model, pair.wide):
        options = LoadOptions(str(model), device="cpu", dtype="float32", context=512, backend="native")
        made = load_engine(options)
        assert made.weights == {name: made.planned[name] for name in made.weights}
        said = "F32" if model == pair.model else "fp32"  # what the file says of itself
        assert made.backend.capabilities.weights == said
        answers.append("".join(delta.text for delta in made.backend.submit(request)))
        made.backend.close()
    assert answers[0] == answers[1]
    with pytest.raises(RequestError, match="the file is"):
        snugvl.load(pair.model, device="cpu", weights="bf16")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3vl"])
def test_a_tensor_that_all_layers_lack_is_missed_by_the_plan(architecture: str, tmp_path: Path) -> None:
    """As the start does, which asks for a tensor by what the network is made of."""
    if architecture == "qwen3vl":
        pair = gguf_models.qwen3_vl(tmp_path, lambda _: None)
    else:
        kind = f"{architecture.capitalize()}ForCausalLM"
        pair = gguf_models.text_model(tmp_path, kind, architecture, lambda _: None)
    files = gguf_files(str(pair.model))
    assert files is not None
    material = file_material("m", files)
    assert gguf_facts("m", material).native
    for lost in ("attn_q.weight", "ffn_up.weight", "output_norm.weight"):
        kept = tuple(tensor for tensor in material.tensors if not tensor.name.endswith(lost))
        with pytest.raises(
            CheckpointError, match=r"lacks the tensor model\..*\.weight \(\d+ of \d+ that the"
        ):
            gguf_facts("m", replace(material, tensors=kept))


def refused(path: Path) -> str:
    files = gguf_files(str(path))
    assert files is not None
    with pytest.raises(UnsupportedModel, match="--backend llamacpp") as found:
        folder_of(files)
    return str(found.value)


def test_what_our_engine_does_not_read_is_named(tmp_path: Path) -> None:
    pair = gguf_models.text_model(tmp_path, "LlamaForCausalLM", "llama", lambda _: None)
    other = tmp_path / "other.gguf"

    def write(kind: gguf.GGMLQuantizationType, name: str) -> Path:
        def change(tensor: Any) -> tuple[Any, Any]:
            mine = tensor.name == name
            return (gguf.quants.quantize(tensor.data, kind), kind) if mine else (tensor.data, None)

        rewrite(pair.model, other, change)
        return other

    assert "blk.1.ffn_up.weight is TQ2_0" in refused(
        write(gguf.GGMLQuantizationType.TQ2_0, "blk.1.ffn_up.weight")
    )
    half = write(gguf.GGMLQuantizationType.Q8_0, "blk.1.ffn_up.weight")
    with pytest.raises(UnsupportedModel, match=r"'blk.1.ffn_up.weight' is Q8_0, but not what"):
        loaded(Pair(half, None, pair.wide))


def test_a_cache_that_can_not_be_written_costs_one_folder_while_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load left another one in the folder for temporary files."""
    pair = gguf_models.qwen3_vl(tmp_path, mixed, tied=True)
    files = gguf_files(str(pair.model))
    assert files is not None
    (tmp_path / "cache").write_text("no folder")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(gguf_folder, "_unkept", {})
    made = {folder_of(files) for _ in range(3)}
    assert made == set(temporary.iterdir())
    assert len(made) == 1
    assert (made.pop() / "config.json").is_file()
    gguf_folder._unkept.clear()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "gguf.json", "digest"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: bytes(len(data))])
def test_a_folder_that_was_damaged_is_made_anew(
    name: str, damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine may leave files empty, or zeros; each start failed at them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    pair = gguf_models.qwen3_vl(tmp_path, mixed, tied=True)
    files = gguf_files(str(pair.model))
    assert files is not None
    folder = folder_of(files)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / name).write_bytes(damage(whole[name]))
    assert folder_of(files) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    shutil.rmtree(folder)
    folder.write_text("a file in its place")
    assert folder_of(files) == folder
    assert folder.is_dir()


def test_a_folder_that_is_only_half_written_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = gguf_models.qwen3_vl(tmp_path, mixed, tied=True)
    files = gguf_files(str(pair.model))
    assert files is not None
    write = gguf_folder._write

    def half(folder: Path, documents: Any) -> None:
        write(folder, {"config.json": documents["config.json"]})
        raise MemoryError("no more")

    monkeypatch.setattr(gguf_folder, "_write", half)
    with pytest.raises(MemoryError):
        folder_of(files)
    assert not list((tmp_path / "cache/snugvl/gguf").iterdir())

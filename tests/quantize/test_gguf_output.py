"""`snugvl quantize --format gguf`: what its files mean to our engine and llama.cpp, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from training.gguf_export import rewrite

from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_facts import cut_named
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.gguf_folder import GGUF, folder_of
from snugvl.checkpoint.read import facts_of
from snugvl.engine.engine import Engine
from snugvl.layers.ggml import LAYOUTS
from snugvl.layers.linear import Linear
from snugvl.models.loader import load_model
from snugvl.quantize import gguf_output, grids, passes, rounding
from snugvl.quantize.gguf_output import block_grids
from snugvl.quantize.grids import BLOCKS, Grid
from snugvl.quantize.rounding import Moments, Rounded, rounded
from tests import checkpoints, gguf_models, hybrid, text_checkpoints
from tests.command import Run
from tests.engine.toy import run, tokens
from tests.ggml_blocks import reference
from tests.models.forward import Prompt, logits
from tests.models.test_gguf_qwen3_5 import ANSWERS
from tests.models.test_mixtures import CONFIG, request
from tests.text_checkpoints import LLAMA3

CPU = torch.device("cpu")
MODELS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def grid_of(kind: Any) -> Grid:
    layout = LAYOUTS[kind]
    return Grid(layout.low + layout.high, layout.group, kind)


def source(root: Path, name: str) -> Path:
    """A checkpoint folder with all that the command reads."""
    if name == "qwen3vl":
        pair = gguf_models.qwen3_vl(root, lambda _: None, tied=True)
    elif name == "qwen35":
        options = hybrid.Options(predictor=True, tied=False, value_dim=16)
        pair = gguf_models.written(root, hybrid.write(root / "source", options))
    else:
        architecture, kind = MODELS[name]
        values = {"rope_scaling": LLAMA3} if name == "llama" else {}
        pair = gguf_models.text_model(root, architecture, kind, lambda _: None, **values)
    files = gguf_files(str(pair.model))
    assert files is not None
    for path in folder_of(files).iterdir():
        if path.name not in ("config.json", GGUF):
            (pair.wide / path.name).write_bytes(path.read_bytes())
    return pair.wide


def read(out: Path) -> Path:
    """The folder of small files that our engine makes of a GGUF."""
    files = gguf_files(str(out))
    assert files is not None
    return folder_of(files)


def loaded(folder: Path) -> Any:
    return load_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.sample(
    "False-Q4_1",
    "True-Q8_0",
    "False-Q5_1",
    "False-Q5_0",
    "False-Q4_K",
    "False-Q4_0",
    "False-Q3_K",
    "False-Q6_K",
    "False-Q5_K",
)
def test_blocks_mean_what_was_rounded_to_ggmls_own_reader(kind: Any, *, compensate: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(24, 512, generator=chance) * 0.03
    values[3], values[4, :32] = 0, 0.5  # nothing at all, and a group that lies above 0
    moments = Moments(512, CPU)
    moments.add(torch.randn(1024, 512, generator=chance) * (1 + 9 * (torch.arange(512) % 31 == 0)))
    made = rounded(values, grid_of(kind), moments, compensate=compensate)
    raw = made.blocks().numpy()
    assert raw.shape == (24, 512 // LAYOUTS[kind].block * LAYOUTS[kind].nbytes)
    assert torch.equal(reference(raw, kind), made.values())
    step = made.lines.scale.abs().repeat_interleave(made.grid.group, 1)
    assert ((made.values() - values).abs() <= 16 * step).all()
    most = {3.4375: 0.25, 4.5: 0.13, 5.0: 0.1, 5.5: 0.07, 6.0: 0.05, 6.5625: 0.03, 8.5: 0.01}[
        made.grid.held_bits
    ]
    assert (made.values() - values).norm() < most * values.norm()
    assert not made.values()[3].any()


@pytest.mark.parametrize("kind", ["Q3_K", "Q4_K", "Q6_K", "Q4_0", "Q4_1"])
@pytest.mark.sample("Q3_K", "Q4_0")
def test_descent_in_blocks_loses_less_with_every_round(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = torch.Generator().manual_seed(1)
    values, moments = torch.randn(32, 256, generator=chance) * 0.05, Moments(256, CPU)
    mixing = torch.eye(256) + 0.1 * torch.randn(256, 256, generator=chance)
    moments.add(torch.randn(2048, 256, generator=chance) @ mixing)
    lost = []
    for rounds in (0, 1, 2, 3):
        monkeypatch.setattr(rounding, "ROUNDS", rounds)
        beside = rounded(values, grid_of(kind), moments, compensate=True).values() - values
        lost.append(float(((beside @ rounding._damped(moments)) * beside).sum()))
    assert lost[1] < 0.99 * lost[0]
    assert lost[1] >= lost[2] >= lost[3]
    plain = rounded(values, grid_of(kind), moments, compensate=False).values() - values
    assert lost[3] < float(((plain @ rounding._damped(moments)) * plain).sum())


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
def test_lines_that_are_sought_from_several_starts_lose_less(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    lost = []
    for starts in ((0.0,), grids.STARTS):
        monkeypatch.setattr(grids, "STARTS", starts)
        moments = Moments(512, CPU)
        moments.add(torch.eye(512))
        lost.append(
            float((rounded(values, grid_of(kind), moments, compensate=False).values() - values).norm())
        )
    assert lost[1] < 0.985 * lost[0]


def test_columns_in_another_order_are_rounded_as_neighbours_there() -> None:
    chance = torch.Generator().manual_seed(1)
    values, order = torch.randn(16, 256, generator=chance), torch.randperm(256, generator=chance)
    x, lacking = torch.randn(1024, 256, generator=chance), torch.randn(1024, 16, generator=chance)
    plain, turned = Moments(256, CPU, rows=16), Moments(256, CPU, rows=16)
    plain.add(x, lacking)
    turned.add(x[:, order], lacking)
    made = rounded(values, grid_of("Q4_K"), plain, compensate=True, order=order)
    there = rounded(values[:, order], grid_of("Q4_K"), turned, compensate=True)
    assert torch.equal(made.blocks(), there.blocks())
    assert torch.equal(made.values()[:, order], there.values())


def test_three_bits_are_taken_where_four_have_no_room() -> None:
    assert [grid.block for grid in block_grids(512, 4.5)] == ["Q4_K", "Q5_K", "Q6_K", "Q8_0"]
    assert [grid.block for grid in block_grids(512, 4.4)] == ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
    assert block_grids(288, 3.5)[0].block == "Q4_0"


# Families of the same orders of rows; `eight_bits` below has more.
@pytest.mark.parametrize("name", [*MODELS, "qwen3vl", "qwen35"])
@pytest.mark.sample("qwen35")
def test_our_engine_reads_what_was_rounded(
    quantize: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every matrix to the bit, in as many bits as were wished for; all else as it was, but for 8 bits."""
    bits = 3.8 if name == "qwen3vl" else 5.4
    wide, out = source(tmp_path / "made", name), tmp_path / "my model"
    given: list[Rounded] = []

    def watched(*args: Any, **kwargs: Any) -> Rounded:
        made = rounded(*args, **kwargs)
        given.extend([made] if kwargs["compensate"] else [])
        return made

    monkeypatch.setattr(passes, "rounded", watched)
    with_ = (files / "0.png", files / "a.txt") if name == "qwen3vl" else (files / "a.txt",)
    asked = [word for each in with_ for word in ("--with", each)]
    ran = quantize(out, *asked, "--bits", str(bits), "--format", "gguf", "--json", model=wide)
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    sees = read_config(wide).vision is not None
    assert {each.name for each in out.iterdir()} == {
        "my model.gguf", "SHA256SUMS", *(["mmproj-my model.gguf"] if sees else [])
    }  # fmt: skip
    assert bits - 0.3 < made["bits"] <= bits
    ours = loaded(read(out))
    # Our engine keeps the file's order of columns, too.
    values = [
        sorted_rows(each.values() if each.order is None else each.values()[:, each.order]) for each in given
    ]
    met, kinds = 0, set()
    for module in ours.decoder.layers.modules():
        if isinstance(module, Linear) and module.parts:
            mine = sorted_rows(module.weights.wide(torch.float32))
            kinds |= {part.type for part in module.parts}
            met += any(mine.shape == each.shape and torch.equal(mine, each) for each in values)
    assert met == len(given) == made["matrices"]
    assert len(kinds) > 1
    assert ("Q3_K" in kinds) == (bits < 4.5)
    facts = facts_of(str(out))
    assert facts.native, facts.gguf


@pytest.mark.parametrize("name", [*MODELS, "qwen3vl", "qwen35"])
@pytest.mark.sample("llama", "qwen2", "qwen3vl", "qwen35")  # qwen3vl has the decoder of qwen3
def test_in_eight_bits_it_computes_what_the_checkpoint_does(quantize: Run, tmp_path: Path, name: str) -> None:
    """Norms, orders of heads, the tower and all else beside the matrices are where they belong."""
    wide, out = source(tmp_path / "made", name), tmp_path / "out"
    ran = quantize(out, "--bits", "8.5", "--format", "gguf", model=wide)
    assert ran.code == 0, ran.err
    ours, exact = loaded(read(out)), loaded(wide)
    ids = [3 + (37 * i + i * i) % 250 for i in range(24)]
    prompts = [Prompt(ids)]
    if exact.tower is not None:
        pixels = torch.randn(24, exact.config.vision.patch_dim, generator=torch.Generator().manual_seed(1))
        prompts.append(Prompt([5, 302, *[checkpoints.IMAGE] * 6, 303, *ids], [(1, 4, 6)], pixels))
    for prompt in prompts:
        found, wanted = logits(ours, prompt), logits(exact, prompt)
        assert (found - wanted).norm() < 0.15 * wanted.norm(), "random weights make much of little"


def test_an_fp8_checkpoint_becomes_one_and_no_table_is_stored_twice(quantize: Run, tmp_path: Path) -> None:
    """A tied head that its files store all the same stays away."""
    wide = source(tmp_path / "made", "qwen3vl")
    state = load_file(wide / "model.safetensors")
    matrices = {name: each for name, each in state.items() if "language_model" in name and "proj" in name}
    state |= checkpoints.quantised(matrices)
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"].clone()
    save_file(state, wide / "model.safetensors")
    config = json.loads((wide / "config.json").read_text()) | {"quantization_config": dict(checkpoints.FP8)}
    (wide / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    ran = quantize(out, "--bits", "8.5", "--format", "gguf", model=wide)
    assert ran.code == 0, ran.err
    assert not any(each.name == "output.weight" for each in gguf.GGUFReader(out / "out.gguf").tensors)
    ids = Prompt([3 + (37 * i + i * i) % 250 for i in range(24)])
    found, wanted = (logits(loaded(each), ids) for each in (read(out), wide))
    assert (found - wanted).norm() < 0.15 * wanted.norm()


def sorted_rows(values: torch.Tensor) -> torch.Tensor:
    """Rows in one order, whichever heads stand where."""
    unlike = torch.randn(values.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values[(values.double() @ unlike).argsort()]


@pytest.mark.parametrize("name", [*MODELS, "qwen35"])
@pytest.mark.sample("qwen35")
def test_llama_cpp_answers_the_same(quantize: Run, files: Path, tmp_path: Path, name: str) -> None:
    """The blocks' values in float32, as llama.cpp rounds activations beside blocks; those load there, too."""
    pytest.importorskip("xllamacpp")
    out = tmp_path / "out"
    ran = quantize(
        out,
        "--with",
        files / "a.txt",
        "--bits",
        "5.4",
        "--format",
        "gguf",
        model=source(tmp_path / "made", name),
    )
    assert ran.code == 0, ran.err
    wide, prompt = tmp_path / "wide.gguf", [3 + (37 * i + i * i) % 250 for i in range(24)]
    rewrite(out / "out.gguf", wide, lambda each: (gguf.quants.dequantize(each.data, each.tensor_type), None))
    ours = tokens(run(Engine(loaded(read(out / "out.gguf")), CONFIG), request("a", Prompt(prompt)))["a"])[:24]
    end = gguf_models.SPECIAL["<|im_end|>"]  # llama.cpp is told to go on without it
    ours = ours[: ours.index(end)] if end in ours else ours
    for file in (wide, out / "out.gguf"):
        given = json.dumps({"model": str(file), "prompt": prompt})
        made = subprocess.run([sys.executable, "-c", ANSWERS], input=given, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-2000:]
        theirs = json.loads(made.stdout.strip().splitlines()[-1])
        assert len(theirs) == 24
        assert file != wide or theirs[: len(ours)] == ours
    assert len(set(ours)) > 8


def test_nothing_is_left_where_the_disk_is_full(
    quantize: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def full(*_: Any) -> None:
        assert any(place.iterdir()), "the header is there"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_output.GgufWriter, "finish", full)
    ran = quantize(place / "out", "--format", "gguf", model=source(tmp_path / "made", "qwen3"))
    assert ran.code == 1
    assert f"{place / 'out'}: No space left" in ran.err
    assert not any(place.iterdir())


def test_text_is_cut_as_the_tokenizer_says() -> None:
    """By llama.cpp's names; what it has none for is refused."""
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, byte]}
    model = {"type": "BPE", "ignore_merges": False}
    assert cut_named({"model": model, "pre_tokenizer": steps, "normalizer": None}) == "smollm"
    assert cut_named({"model": model, "pre_tokenizer": byte}) == "gpt-2"
    assert cut_named({"model": model, "pre_tokenizer": digits}) is None
    assert cut_named({"model": {**model, "ignore_merges": True}, "pre_tokenizer": byte}) is None
    assert cut_named({"model": {"type": "Unigram"}, "pre_tokenizer": byte}) is None


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--format", "gguf"), 4, "cuts text in a way that no GGUF can name"),
        (("--format", "gguf", "--group", "32"), 2, "--group has no place beside --format gguf"),
        (("--format", "gguf", "--weights", "int4"), 2, "--format gguf has no place beside --weights"),
        (("--format", "onnx"), 2, "'onnx' is not one of 'snugvl', 'gguf'"),
    ],
)
def test_what_cannot_be_a_gguf_is_refused(
    quantize: Run, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    ran = quantize(tmp_path / "out", *args, model="pocket")
    assert ran.code == code, ran.err
    assert message in " ".join(ran.err.replace("│", " ").split()), ran.err
    assert not (tmp_path / "out").exists()


def test_out_is_a_folder(quantize: Run, tmp_path: Path) -> None:
    ran = quantize(tmp_path / "mine.gguf", "--format", "gguf")
    assert ran.code == 2
    assert "OUT is a folder" in " ".join(ran.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("phi-3", "Phi3ForCausalLM can't be written as a GGUF"),
        ("mistral", "MistralForCausalLM can't be written as a GGUF"),
        ("qwen2.5", "a GGUF of qwen2 has no windows"),
        ("llama, linear", "a GGUF of llama has no this scaling"),
    ],
)
def test_families_that_have_no_gguf_are_refused(
    quantize: Run, tmp_path: Path, tiny_whole: Path, name: str, message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_whole.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    text_checkpoints.write(model, text_checkpoints.MODELS[name])
    ran = quantize(tmp_path / "out", "--format", "gguf", model=model)
    assert ran.code == 4, ran.err
    assert message in " ".join(ran.err.split()), ran.err

"""`snugvl quantize`: what it writes, how it is read again, what it refuses."""

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from snugvl.layers.linear import Linear
from snugvl.models.loader import load_model
from snugvl.quantize import writing
from tests import checkpoints
from tests.checkpoint import gguf_samples
from tests.command import Run

CPU = torch.device("cpu")


def test_what_is_not_rounded_stays_as_it_was(
    quantize: Run, files: Path, tiny_whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    ran = quantize(out, "--with", files, "--bits", "5.5", "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["bits"] <= 5.5
    assert made["matrices"] == 16
    assert made["costs"].keys() == {
        f"layers.{layer}.{name}"
        for layer in range(4)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "tokenizer.json").read_bytes() == (tiny_whole / "tokenizer.json").read_bytes()
    state = {name: each for path in out.glob("*.safetensors") for name, each in load_file(path).items()}
    plain = load_file(tiny_whole / "model.safetensors")
    matrices = {name for name in plain if name.split(".")[-2] in checkpoints.LINEARS and "visual" not in name}
    norms = {name for name in plain if name.endswith("_layernorm.weight") and "visual" not in name}
    assert matrices.isdisjoint(state)
    assert all(
        torch.equal(state[name], value) for name, value in plain.items() if name not in matrices | norms
    )
    assert len(norms) == 8
    assert all(state[name].dtype == plain[name].dtype for name in norms)


READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.sample("True")
def test_columns_of_many_sizes_are_made_alike(
    quantize: Run, files: Path, tiny_whole: Path, tmp_path: Path, *, given: bool
) -> None:
    """Norms, and the rows that SwiGLU multiplies with, make up for it."""
    source = Path(shutil.copytree(tiny_whole, tmp_path / "source"))
    (name,) = source.glob("*.safetensors")
    state, chance = load_file(name), torch.Generator().manual_seed(0)
    for norm in [each for each in state if each.endswith("_layernorm.weight") and "visual" not in each]:
        layer, kind, _ = norm.rsplit(".", 2)
        sizes = 2.0 ** torch.randint(-4, 5, state[norm].shape, generator=chance)
        state[norm] = (state[norm] / sizes).to(state[norm])
        for each in READERS[kind]:
            weight = state[f"{layer}.{each}.weight"]
            state[f"{layer}.{each}.weight"] = (weight * sizes).to(weight)
    for down in [each for each in state if each.endswith("mlp.down_proj.weight") and "visual" not in each]:
        sizes = 2.0 ** torch.randint(-4, 5, state[down].shape[1:], generator=chance)
        up = down.replace("down_proj", "up_proj")
        state |= {down: (state[down] * sizes).to(state[down]), up: (state[up] / sizes[:, None]).to(state[up])}
    save_file(state, name, metadata={"format": "pt"})
    out = tmp_path / "out"
    ran = quantize(out, *(("--with", files / "a.txt") if given else ()), "--bits", "5.5", model=source)
    assert ran.code == 0, ran.err
    made, exact = (load_model(each, dtype=torch.float32, device=CPU).decoder.layers for each in (out, source))
    for layers in zip(made, exact, strict=True):
        first, second = ({name: each.get_submodule(name).weight for name in READERS} for each in layers)
        assert not any(torch.equal(first[name], second[name]) for name in READERS)
        x = torch.randn(32, len(first["input_layernorm"]), generator=chance)
        for compute in (
            lambda each, x: each.self_attn.qkv_proj(x, norm=each.input_layernorm),
            lambda each, x: each.mlp(x, each.post_attention_layernorm, add=False),
        ):
            ours, theirs = (compute(each, x) for each in layers)
            assert (ours - theirs).norm() < 0.5 * theirs.norm()


def test_what_was_written_can_be_checked(quantize: Run, tmp_path: Path, tiny_whole: Path) -> None:
    """By the line that the command prints, which ends with 1 when a bit has changed."""
    source = Path(shutil.copytree(tiny_whole, tmp_path / "source"))
    (source / "SHA256SUMS").write_text("of other files")
    out = tmp_path / "the new one"
    ran = quantize(out, "--weights", "int4", "--group", "32", model=source)
    assert ran.code == 0, ran.err
    *_, check, serve = (line.partition(" with: ")[2] for line in ran.out.splitlines())
    assert shlex.split(serve) == ["snugvl", "serve", str(out)]
    assert subprocess.run(check, shell=True, check=False).returncode == 0
    listed = {line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in out.iterdir()} - {"SHA256SUMS"}
    shard = next(out.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    told = subprocess.run(check, shell=True, check=False, capture_output=True, text=True)
    assert told.returncode == 1
    assert f"{shard.name}: FAILED" in told.stdout


def test_fp8_and_random_tokens_and_few_bits(quantize: Run, tmp_path: Path, tiny_whole: Path) -> None:
    """An FP8 checkpoint without anything of the user's: 4 bits, near what its blocks mean."""
    source = Path(shutil.copytree(tiny_whole, tmp_path / "fp8"))
    values = json.loads((tiny_whole / "config.json").read_text())
    marks = tuple(values[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end"))
    checkpoints.write(source, checkpoints.Options(vocab=512, placeholders=marks, fp8=True))
    out = tmp_path / "out"
    ran = quantize(out, "--bits", "4.75", model=source)
    assert ran.code == 0, ran.err
    assert "random tokens" in ran.err
    assert re.search(r"16 matrices: \d+ in 4 bits, \d+ in \d bits", ran.out)
    names = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert not any(name.endswith("scale_inv") for name in names)
    made = load_model(out, dtype=torch.float32, device=CPU).decoder.layers
    exact = load_model(source, dtype=torch.float32, device=CPU).decoder.layers
    linears = [each for each in made.modules() if isinstance(each, Linear)]
    twins = [each for each in exact.modules() if isinstance(each, Linear)]
    for ours, theirs in zip(linears, twins, strict=True):
        wide = theirs.weights.wide(torch.float32)
        assert (ours.weights.wide(torch.float32) - wide).norm() < 0.2 * wide.norm()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "snugvl"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # `timeout` and systemd send the second
@pytest.mark.sample("15")
def test_nothing_is_left_of_a_run_that_ends_early(
    quantize: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # or it would end the tests
    foreground = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
    place = tmp_path / "place"
    place.mkdir()

    def interrupted(*_: Any, **__: Any) -> None:
        assert any(place.iterdir()), "shards are there"
        signal.raise_signal(number)

    monkeypatch.setattr(writing.Shards, "copy", interrupted)
    try:
        ran = quantize(place / "out", "--with", files / "a.txt", "--bits", "4.75")
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, foreground)
    assert ran.code == 130
    assert "interrupted; nothing was written" in ran.err
    assert not any(place.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.Shards, "copy", full)
    ran = quantize(place / "out", "--with", files / "a.txt", "--bits", "4.75")
    assert ran.code == 1
    assert f"{place / 'out'}: No space left" in ran.err
    assert not any(place.iterdir())


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--bits", "4.2"), 3, r"4.2 bits a weight can't be reached"),
        (("--bits", "8.9"), 3, r"8.9 bits a weight can't be reached"),
        (("--group", "48"), 2, "--group must be 32, 64 or 128, not 48"),
        (("--with", "nowhere.txt"), 3, "nowhere.txt can't be read: No such file"),
        (("--with", "nowhere.png"), 3, "nowhere.png"),
        (("--with", "SHORT"), 3, "the texts have fewer than 16 tokens"),
        (("--with", "BINARY"), 3, "is not text in UTF-8"),
        (("--with", "EMPTY"), 3, "no pictures in"),
        (("--memory", "200MiB"), 5, "needs .* at once"),
        (("--weights", "int4", "--bits", "4.5"), 2, "--bits has no place beside --weights"),
        (("--weights", "int4", "--with", "SHORT"), 2, "--with has no place beside --weights"),
        (("--weights", "int4", "--group", "128"), 4, "no matrix whose columns divide into groups of 128"),
        (("--weights", "int5", "--group", "32", "--memory", "1MiB"), 5, "in int5 needs .* is available"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    quantize: Run, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    short, binary, empty = tmp_path / "short.txt", tmp_path / "binary.txt", tmp_path / "empty"
    short.write_text("a b")
    binary.write_bytes(b"\xff\xfe\x00")
    empty.mkdir()
    paths = {"SHORT": short, "BINARY": binary, "EMPTY": empty}
    ran = quantize(tmp_path / "out", *(paths.get(each, each) for each in args))
    assert ran.code == code, ran.err
    assert re.search(message, ran.err.replace("\n", " ")), ran.err
    assert not (tmp_path / "out").exists()


def test_models_and_places_that_cannot_be(
    quantize: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert quantize(out, model=tmp_path / "nowhere").code == 4
    gguf = tmp_path / "model.gguf"
    ran = quantize(out, model=gguf_samples.model(gguf))
    assert ran.code == 4, ran.err
    first = quantize(out, "--bits", "4.75")
    assert first.code == 0, first.err
    again = quantize(out, "--bits", "4.75")
    assert again.code == 3
    assert "is there already" in again.err
    twice = quantize(tmp_path / "twice", model=out)
    assert twice.code == 4
    assert "has 4 bits already" in twice.err
    blocked = quantize(files / "a.txt" / "out")
    assert blocked.code == 1
    assert "is not a folder that may be written to" in blocked.err
    monkeypatch.setattr(writing, "free_bytes", lambda _: 1 << 10)
    full = quantize(tmp_path / "full")
    assert full.code == 5
    assert "of disk space, and only 1 KiB are free" in full.err.replace("1.0 KiB", "1 KiB"), full.err
    assert not (tmp_path / "full").exists()

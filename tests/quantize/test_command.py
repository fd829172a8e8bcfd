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

from snugvl.checkpoint.read import facts_of
from snugvl.layers.linear import Linear
from snugvl.models.loader import load_model, targets_of
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from snugvl.quantize import writing
from tests import checkpoints
from tests.checkpoint import gguf_samples
from tests.command import Run
from tests.models.forward import Prompt, logits

CPU = torch.device("cpu")
PROMPT = Prompt(list(range(10, 40)))


def meant(folder: Path) -> dict[str, torch.Tensor]:
    """Plain weights of what is stored, unpacked here from the format's definition."""
    state: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    for base in [name.removesuffix("_packed") for name in state if name.endswith("weight_packed")]:
        packed, scale = state.pop(f"{base}_packed"), state.pop(f"{base}_scale").float()
        rows, columns = state.pop(f"{base}_shape").tolist()
        bits = packed.shape[1] * 32 // columns
        codes = unpacked(packed, bits)
        zero = torch.full_like(scale, 128)
        if bits == 4:
            zero = unpacked(state.pop(f"{base}_zero_point").T, 4).T.float()
        wide = (codes.view(rows, scale.shape[1], -1) - zero[..., None]) * scale[..., None]
        state[base] = wide.reshape(rows, columns)
    return state


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits)
    return ((packed.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def test_what_is_written_is_read_as_it_is_meant(
    quantize: Run, files: Path, tiny_whole: Path, tmp_path: Path
) -> None:
    """Two widths: the same logits as plain weights of the same values, and the bytes of the plan."""
    out = tmp_path / "new" / "out"
    ran = quantize(out, "--with", files, "--bits", "5.5", "--format", "compressed-tensors", "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["bits"] <= 5.5
    eights = {name for name, bits in made["widths"].items() if bits == 8}
    assert 0 < len(eights) < made["matrices"] == 16
    assert made["costs"].keys() == {
        f"layers.{layer}.{name}"
        for layer in range(4)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "tokenizer.json").read_bytes() == (tiny_whole / "tokenizer.json").read_bytes()
    state, plain = meant(out), load_file(tiny_whole / "model.safetensors")
    assert state.keys() == plain.keys()
    matrices = [name for name in plain if name.split(".")[-2] in checkpoints.LINEARS and "visual" not in name]
    for name, value in plain.items():
        if name in matrices:
            assert (state[name] - value).norm() < 0.2 * value.norm()
        else:
            assert torch.equal(state[name], value)
    wide = Path(shutil.copytree(tiny_whole, tmp_path / "wide"))
    save_file({name: value.float().contiguous() for name, value in state.items()}, wide / "model.safetensors")
    packed, exact = (load_model(each, dtype=torch.float32, device=CPU) for each in (out, wide))
    formats = {
        f"layers.{each}": linear.format
        for each, linear in packed.decoder.layers.named_modules()
        if isinstance(linear, Linear)
    }
    assert {name for name, kind in formats.items() if kind == "int8"} == eights
    torch.testing.assert_close(logits(packed, PROMPT), logits(exact, PROMPT), atol=1e-4, rtol=0)
    held = {id(tensor): tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers())}
    model = inventory(facts_of(str(out), offline=True))
    assert weight_bytes(model, Settings("native", "int4", float32=True)) == sum(held.values())
    linears = {id(target.linear): target.linear for _, target in targets_of(packed)}
    mine = [each for each in linears.values() if each is not None and each.format != "bf16"]
    weights = sum(each.rows * each.columns for each in mine if each.columns)
    decoder = [each for each in mine if each.format in ("int4", "int8")]
    assert sum(8 * each.weights.nbytes for each in decoder) / weights == pytest.approx(made["bits"])


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
    ran = quantize(out, "--bits", "4.75", "--format", "compressed-tensors", model=source)
    assert ran.code == 0, ran.err
    assert "random tokens" in ran.err
    assert re.search(r"16 matrices: \d+ in 4 bits, \d+ in 8 bits", ran.out)
    state, exact = meant(out), checkpoints.dequantised(source)
    assert not any(name.endswith("scale_inv") for name in state)
    for name, value in exact.items():
        if name in state and "layers" in name and value.dim() == 2:
            assert (state[name] - value.float()).norm() < 0.2 * value.float().norm()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "compressed-tensors"
    )


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
    assert ran.code == 3
    assert "can't be written: No space left" in ran.err
    assert not any(place.iterdir())


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--bits", "4.2"), 3, r"4.2 bits a weight can't be had"),
        (("--bits", "8.9"), 3, r"8.9 bits a weight can't be had"),
        (("--group", "48"), 2, "--group is 32, 64 or 128, not 48"),
        (("--with", "nowhere.txt"), 3, "nowhere.txt can't be read: No such file"),
        (("--with", "nowhere.png"), 3, "nowhere.png"),
        (("--with", "SHORT"), 3, "the texts have fewer than 16 tokens"),
        (("--with", "BINARY"), 3, "is no text in UTF-8"),
        (("--with", "EMPTY"), 3, "no pictures in"),
        (("--memory", "200MiB"), 5, "needs .* at once"),
        (("--weights", "int4", "--bits", "4.5"), 2, "--bits has no place beside --weights"),
        (("--weights", "int4", "--with", "SHORT"), 2, "--with has no place beside --weights"),
        (
            ("--weights", "int4", "--format", "compressed-tensors"),
            2,
            "--format has no place beside --weights",
        ),
        (("--weights", "int4", "--group", "128"), 4, "no matrix whose columns divide into groups of 128"),
        (("--weights", "int5", "--group", "32", "--memory", "1MiB"), 5, "in int5 needs .* can be had"),
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
    assert blocked.code == 3
    assert "is no folder that may be written to" in blocked.err
    monkeypatch.setattr(writing, "free_bytes", lambda _: 1 << 10)
    full = quantize(tmp_path / "full")
    assert full.code == 5
    assert "on the disk, and 1 KiB are free" in full.err.replace("1.0 KiB", "1 KiB"), full.err
    assert not (tmp_path / "full").exists()

"""Strict loading: what is missing, foreign or truncated is named with its file; memory stays bounded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import snugvl
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.models.loader import load_model
from snugvl.planner.inventory import inventory
from tests import checkpoints

CPU = torch.device("cpu")
POCKET = Path(snugvl.__file__).parent / "pocket"
State = dict[str, torch.Tensor]
Q = "model.language_model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[State], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def load(folder: Path) -> None:
    load_model(folder, dtype=torch.float32, device=CPU)


def test_fused_parameters_hold_their_parts_in_order(tiny: Path) -> None:
    model = load_model(tiny, dtype=torch.float32, device=CPU)
    state = load_file(tiny / "model.safetensors")
    layer = "model.language_model.layers.2."
    fused = model.get_parameter(layer + "self_attn.qkv_proj.weight")
    parts = [state[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(fused, torch.cat(parts))


def test_elements_are_counted_without_the_network(tiny: Path, tiny_untied: Path, tmp_path: Path) -> None:
    for name, folder in (("tied", tiny), ("untied", tiny_untied)):
        model = load_model(folder, dtype=torch.float32, device=CPU)
        whole = Path(shutil.copytree(folder, tmp_path / name))
        shutil.copy(POCKET / "preprocessor_config.json", whole)  # how pictures become tokens: facts need it
        counted = inventory(facts_of(str(whole), offline=True)).parameters
        assert counted == sum(p.numel() for p in model.parameters())


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, lambda state: state.__delitem__(Q))
    with pytest.raises(CheckpointError, match=f"lacks tensor '{Q}'"):
        load(copy)


def test_a_foreign_tensor_is_named_with_its_file(copy: Path) -> None:
    edit(copy, lambda state: state.update({"model.layers.0.router": torch.ones(2)}))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'model\.layers\.0\.router'.*belong"
    ):
        load(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    edit(copy, lambda state: state.update({Q: torch.ones(64, 65)}))
    with pytest.raises(CheckpointError, match=r"q_proj.*\[64, 65\].*\[64, 64\]"):
        load(copy)


def test_a_transposed_tensor_of_equal_size_is_refused(copy: Path) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    edit(copy, lambda state: state.update({name: state[name].T.contiguous()}))
    with pytest.raises(CheckpointError, match=r"down_proj.*\[96, 64\].*\[64, 96\]"):
        load(copy)


def test_an_integer_tensor_is_refused(copy: Path) -> None:
    edit(copy, lambda state: state.update({Q: torch.ones(64, 64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"q_proj.* is I8"):
        load(copy)


def test_a_truncated_file_is_refused_before_memory_is_taken(copy: Path) -> None:
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"truncated"):
        load(copy)


def test_a_file_that_shrinks_while_it_is_read_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugvl.models import loader

    check = loader.check_names

    def check_then_truncate(*args: object) -> None:
        check(*args)  # type: ignore[arg-type]
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    monkeypatch.setattr(loader, "check_names", check_then_truncate)
    with pytest.raises(CheckpointError, match="ends early"):
        load(copy)


def test_a_missing_shard_is_named(tiny_untied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_untied, tmp_path / "copy"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors \(1 of 3"):
        load(folder)


def test_fp8_without_its_scale_is_refused(tiny_fp8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_fp8, tmp_path / "copy"))
    edit(folder, lambda state: state.__delitem__(Q + "_scale_inv"))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' has no scale_inv"):
        load(folder)


def test_fp8_with_a_scale_of_the_wrong_shape_is_refused(tiny_fp8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_fp8, tmp_path / "copy"))
    edit(folder, lambda state: state.update({Q + "_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(CheckpointError, match=r"\[1, 1\], expected \[2, 2\] scales for blocks of 32x32"):
        load(folder)


def test_fp8_without_a_quantization_config_is_refused(tiny_fp8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_fp8, tmp_path / "copy"))
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="names no fp8 quantization"):
        load(folder)


def test_the_head_that_fp8_files_store_is_ignored_when_tied(tiny_fp8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_fp8, tmp_path / "copy"))
    edit(folder, lambda state: state.update({"lm_head.weight": torch.zeros(checkpoints.VOCAB, 64)}))
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert not hasattr(model, "lm_head")


PEAK = """
import resource, sys, threading, time, torch, psutil
from pathlib import Path
from snugvl.models import loader, tensor_files
tensor_files.CHUNK_BYTES = 1 << 20
process, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)
loader.load_model(Path(sys.argv[2]), dtype=torch.float32, device=torch.device("cpu"))  # torch's own imports
before = process.memory_info().rss
thread = threading.Thread(target=watch); thread.start()
model = loader.load_model(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
done = True; thread.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
largest = max(p.numel() * p.element_size() for p in model.parameters())
print(peak - before - size, largest)
"""


@pytest.mark.slow
def test_loading_takes_no_more_than_the_model_and_two_of_its_largest_tensors(
    tiny: Path, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "wide")
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["vocab_size"] = 400_000  # 98 MiB of embedding
    (folder / "config.json").write_text(json.dumps(values))
    name = "model.language_model.embed_tokens.weight"
    edit(folder, lambda state: state.update({name: torch.zeros(400_000, 64)}))
    output = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(tiny)], capture_output=True, text=True, check=True
    ).stdout
    beyond, largest = (int(value) for value in output.split())
    assert beyond <= 2 * largest
    assert beyond <= 48 << 20  # and in fact far less: pieces, never whole tensors

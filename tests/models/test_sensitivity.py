"""Weights of few bits are rounded for what comes into them."""

import json
import os
import threading
from hashlib import sha256
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from transformers import AutoModelForCausalLM

from snugvl.layers.kernels import rows
from snugvl.layers.linear import Linear
from snugvl.layers.weights import FormatName, to_few_bits
from snugvl.models import readers, sensitivity
from snugvl.models.loader import OpenCheckpoint, Storage, load_model, open_checkpoint
from snugvl.models.tensor_files import TensorFiles
from tests import hybrid, text_checkpoints
from tests.text_checkpoints import MODELS

CPU = torch.device("cpu")
PARTS = {
    "self_attn.qkv_proj": "self_attn.q_proj",
    "self_attn.o_proj": "self_attn.o_proj",
    "mlp.gate_up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}


def loaded(folder: Path, kind: FormatName, monkeypatch: pytest.MonkeyPatch) -> dict[str, Linear]:
    """The decoder's matrices, that still know what they were rounded for."""
    with monkeypatch.context() as patch:
        patch.setattr(sensitivity, "forget", lambda _: None)
        model = load_model(folder, dtype=torch.float32, device=CPU, storage=Storage(kind, group=32))
    return {name: each for name, each in model.decoder.layers.named_modules() if isinstance(each, Linear)}


def test_the_squares_are_those_of_transformers_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    found = loaded(folder, "int5", monkeypatch)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: dict[str, Any] = {}
    for name, module in theirs.model.layers.named_modules():
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args}))
    with torch.inference_mode():
        theirs(torch.tensor([sensitivity.some_ids(theirs.config.vocab_size)]))
    assert len(found) == 4 * theirs.config.num_hidden_layers
    for name, linear in found.items():
        layer, part = name.split(".", 1)
        expected = inputs[f"{layer}.{PARTS[part]}"][0][0].square().mean(0)
        assert linear.squares is not None
        assert torch.allclose(linear.squares, expected, rtol=1e-3, atol=1e-6), name
        assert linear.format == "int5"


@pytest.mark.parametrize("recurrent", [False, True])
def test_inputs_are_weighed_without_kernels(
    recurrent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a first start would wait until they are compiled."""

    class Elsewhere(torch.Tensor):
        is_cuda = True

    def on_gpu(model: Any, wide: Any, embedded: torch.Tensor, ready: Any) -> None:
        weigh(model, wide, embedded.as_subclass(Elsewhere), ready)

    weigh = sensitivity.weigh_inputs
    if recurrent:
        folder = hybrid.write(tmp_path, hybrid.Options(hidden=128))
    else:
        folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    wanted = loaded(folder, "int4", monkeypatch)
    monkeypatch.setattr(rows, "normed", lambda *_: pytest.fail("a kernel's norm"))
    monkeypatch.setattr(rows, "rotation", lambda *_: pytest.fail("a kernel's rotation"))
    monkeypatch.setattr(sensitivity, "weigh_inputs", on_gpu)
    found = loaded(folder, "int4", monkeypatch)
    assert any(linear.squares is not None for linear in found.values())
    for place, linear in found.items():
        theirs = wanted[place].squares
        assert (linear.squares is None) == (theirs is None) == (linear.format != "int4"), place
        assert linear.squares is None or torch.equal(linear.squares, theirs), place
        assert linear.squares is None or type(linear.squares) is torch.Tensor


def test_inputs_are_weighed_in_a_thread_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies: on a GPU a thread that lives keeps the library's handle, and its memory."""
    threads: list[threading.Thread] = []
    weigh = sensitivity.weigh_inputs
    monkeypatch.setattr(
        sensitivity,
        "weigh_inputs",
        lambda *given: (threads.append(threading.current_thread()), weigh(*given)),
    )
    loaded(text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), "int4", monkeypatch)
    assert [thread.is_alive() for thread in threads] == [False]
    assert threading.current_thread() not in threads


def test_layers_are_read_by_the_same_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its buffer: page-locked memory takes milliseconds to be had."""
    made: list[object] = []

    class Counted(TensorFiles):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(readers, "TensorFiles", Counted)
    folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    found = loaded(folder, "int4", monkeypatch)
    assert len({name.partition(".")[0] for name in found}) > 1, "layers"
    assert len(made) == 2, "one that weighs inputs, and one that loads: a CPU has one thread"


def codes(folder: Path, kept: Path, kind: FormatName = "int4", group: int = 32) -> dict[str, torch.Tensor]:
    """The weights of a start."""
    storage = Storage(kind, group=group)
    model = load_model(folder, dtype=torch.float32, device=CPU, storage=storage, kept=kept)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_later_start_weighs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what the first has kept; of another type of weights, too, as inputs are the same."""
    folder, kept = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), tmp_path / "cache" / "inputs"
    first, fine = codes(folder, kept), codes(folder, tmp_path / "other", "int5")
    (file,) = kept.iterdir()
    monkeypatch.setattr(sensitivity, "weigh_inputs", lambda *_: pytest.fail("inputs were weighed"))
    assert same(codes(folder, kept), first)
    assert same(codes(folder, kept, "int5"), fine)
    assert [*kept.iterdir()] == [file]


@pytest.mark.parametrize(
    "harm", ["a bit", "half of it", "nothing left", "another network's", "the checkpoint's", "the config's"]
)
@pytest.mark.sample("a bit", "nothing left", "the checkpoint's")
def test_what_is_broken_or_anothers_is_weighed_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), tmp_path / "inputs"
    first = codes(folder, kept)
    (file,) = kept.iterdir()
    raw = bytearray(file.read_bytes())
    if harm == "a bit":
        raw[-1] ^= 1
    elif harm == "half of it":
        del raw[len(raw) // 2 :]
    elif harm == "nothing left":
        raw.clear()
    elif harm == "another network's":
        whole = save({name: squares[1:] for name, squares in load(bytes(raw[32:])).items()})
        raw = bytearray(sha256(whole).digest() + whole)
    elif harm == "the config's":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
        first = codes(folder, tmp_path / "elsewhere")
    else:
        weights = folder / "model.safetensors"
        os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    file.write_bytes(raw)
    weighed: list[object] = []
    weigh = sensitivity.weigh_inputs
    monkeypatch.setattr(sensitivity, "weigh_inputs", lambda *given: (weighed.append(given), weigh(*given)))
    assert same(codes(folder, kept), first)
    assert len(weighed) == 1
    assert same(codes(folder, kept), first)
    assert len(weighed) == 1, "and kept again"


def test_a_folder_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an image, or another user's."""
    folder, kept = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), tmp_path / "inputs"
    first = codes(folder, kept)

    def touch(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "touch", touch)
    monkeypatch.setattr(sensitivity, "weigh_inputs", lambda *_: pytest.fail("inputs were weighed"))
    assert same(codes(folder, kept), first)


def test_formats_that_round_other_matrices_keep_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), tmp_path / "inputs"
    made = {group: codes(folder, kept, group=group) for group in (32, 64)}
    assert len([*kept.iterdir()]) == 2, "some columns aren't a multiple of 64"
    monkeypatch.setattr(sensitivity, "weigh_inputs", lambda *_: pytest.fail("inputs were weighed"))
    for group in (32, 64, 32):
        assert same(codes(folder, kept, group=group), made[group])


def test_a_folder_that_cannot_be_written_costs_the_time(tmp_path: Path) -> None:
    folder, kept = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"]), tmp_path / "a file"
    kept.write_text("in the way")
    assert same(codes(folder, kept), codes(folder, tmp_path / "inputs"))


def test_few_checkpoints_squares_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last."""
    monkeypatch.setattr(sensitivity, "KEEP", 2)
    kept, folders = tmp_path / "inputs", [tmp_path / name for name in "abc"]
    for when, folder in enumerate(folders):
        codes(text_checkpoints.write(folder, MODELS["qwen3"]), kept)
        for file in kept.iterdir():
            os.utime(file, ns=(file.stat().st_atime_ns, min(file.stat().st_mtime_ns, 1000 + when)))
        if when == 1:
            codes(folders[0], kept)  # which makes it the one that was used last
    monkeypatch.setattr(sensitivity, "weigh_inputs", lambda *_: pytest.fail("inputs were weighed"))
    assert len([*kept.iterdir()]) == 2
    for folder in (folders[0], folders[2]):
        codes(folder, kept)


def test_weights_are_rounded_for_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    wide = load_model(folder, dtype=torch.float32, device=CPU)
    for name, linear in loaded(folder, "int4", monkeypatch).items():
        exact = wide.decoder.layers.get_submodule(name).weight
        made = to_few_bits(exact, "int4", 32, linear.squares)
        assert torch.equal(linear.weight, made.data), name
    model = load_model(folder, dtype=torch.float32, device=CPU, storage=Storage("int4", group=32))
    assert all(each.squares is None for each in model.modules() if isinstance(each, Linear))


def test_a_large_input_makes_its_column_exact_at_the_others_cost() -> None:
    chance = torch.Generator().manual_seed(1)
    values, x = (torch.randn(64, 256, generator=chance) for _ in range(2))
    x[:, 70] *= 50
    for kind in ("int4", "int6"):
        plain = to_few_bits(values, kind, 64).wide(torch.float32)  # type: ignore[arg-type]
        fitted = to_few_bits(values, kind, 64, x.square().mean(0)).wide(torch.float32)  # type: ignore[arg-type]
        error, before = ((each - values) @ x.T for each in (fitted, plain))
        assert error.norm() < 0.45 * before.norm()
        assert (fitted - values).norm() < 1.7 * (plain - values).norm()


@pytest.mark.parametrize(
    ("name", "kind", "rounds"),
    [
        ("qwen3", "int4", torch.float32),
        ("qwen3, bf16", "int4", torch.bfloat16),
        ("qwen3, fp8", "int5", torch.float32),
        ("qwen3", "int8", None),
        ("qwen3, fp8", "fp8", None),
    ],
)
def test_what_is_rounded_is_known_before_it_is_read(
    name: str, kind: FormatName, rounds: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is compiled meanwhile, for the type of the values that come."""
    folder = text_checkpoints.write(tmp_path / "model", MODELS[name.removesuffix(", bf16")])
    if name.endswith("bf16"):
        for path in folder.glob("*.safetensors"):
            save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path)
    given: set[torch.dtype] = set()

    def noted(values: torch.Tensor, *args: Any) -> Any:
        given.add(values.dtype)
        return to_few_bits(values, *args)

    monkeypatch.setattr("snugvl.layers.linear.to_few_bits", noted)
    storage = Storage(kind, group=32 if kind.startswith("int") and rounds else None)
    assert open_checkpoint(folder, torch.float32, storage).rounds == rounds
    load_model(folder, dtype=torch.float32, device=CPU, storage=storage)
    assert given == ({rounds} if rounds else set())


@pytest.mark.parametrize(("kind", "dtype"), [("int4", torch.float32), ("int8", None), ("bf16", None)])
def test_a_gpu_compiles_what_rounds_while_inputs_are_weighed(
    kind: FormatName, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the values and groups that come. Where that fails it fails again, and says so then."""
    folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    rounded: list[tuple[torch.dtype, int, str, int]] = []

    def fail(values: torch.Tensor, kind: str, group: int) -> None:
        rounded.append((values.dtype, values.shape[1], kind, group))
        raise RuntimeError("no compiler")

    monkeypatch.setattr("snugvl.models.loader.to_few_bits", fail)
    opened = open_checkpoint(folder, torch.float32, Storage(kind, group=32 if dtype else None))
    opened.begin_rounding(torch.device("meta")).join()
    assert rounded == ([] if dtype is None else [(dtype, 32, kind, 32)])
    opened.begin_rounding(CPU).join()
    assert len(rounded) == (dtype is not None), "a CPU has nothing to compile"


def test_it_is_compiled_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    fill, begin, weigh = readers.Readers.fill, OpenCheckpoint.begin_rounding, OpenCheckpoint.weigh_inputs
    weighed = threading.Event()

    def compiling(opened: OpenCheckpoint, device: torch.device) -> Thread:
        said.append("begins")
        begin(opened, device).join()
        late = Thread(target=lambda: (weighed.wait(), sleep(0.1), said.append("is there")))
        late.start()
        return late

    monkeypatch.setattr(OpenCheckpoint, "begin_rounding", compiling)
    monkeypatch.setattr(OpenCheckpoint, "weigh_inputs", lambda *given: (weigh(*given), weighed.set()))
    monkeypatch.setattr(readers.Readers, "fill", lambda *given: (said.append("reads"), fill(*given)))
    folder = text_checkpoints.write(tmp_path / "model", MODELS["qwen3"])
    load_model(folder, dtype=torch.float32, device=CPU, storage=Storage("int4", group=32))
    assert said[0] == "begins"
    assert said[1] == "reads", "to weigh inputs, meanwhile"
    assert said[-2:] == ["is there", "reads"]

"""A broken checkpoint on the command line: one line that names the file, exit code 4, no traceback."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from snugvl.checkpoint.locate import locate

PICTURE = Path(__file__).parent.parent.parent / "examples" / "images" / "shapes.png"


def lose_a_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.language_model.layers.3.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1_000_000])


def not_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<html>404</html>")


def foreign(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


BROKEN = {
    lose_a_tensor: "lacks the tensor model.language_model.layers.3.mlp.up_proj.weight",
    truncate: "truncated",
    not_weights: "model.safetensors",
    foreign: "LlamaForCausalLM",
    broken_tokenizer: "tokenizer.json",
    no_template: "template",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_checkpoint_is_one_line(break_it: Callable[[Path], None], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(locate("pocket"), tmp_path / "copy"))
    break_it(folder)
    command = [sys.executable, "-m", "snugvl.cli", "caption", "--model", str(folder), str(PICTURE)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 4
    assert run.stdout == ""
    assert run.stderr.startswith("snugvl: ")
    assert BROKEN[break_it] in run.stderr
    assert str(folder) in run.stderr
    assert run.stderr.count("\n") == 1

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
from snugvl.cli.app import run
from tests.cli.conftest import NOTE

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
    foreign: "not of this model",
    broken_tokenizer: "tokenizer.json",
    no_template: "template",
}


def broken(tmp_path: Path, break_it: Callable[[Path], None]) -> Path:
    folder = Path(shutil.copytree(locate("pocket"), tmp_path / "copy"))
    break_it(folder)
    return folder


def is_one_line(stderr: str, folder: Path, reason: str) -> bool:
    *before, said = stderr.splitlines(keepends=True)
    named = said.startswith("snugvl: ") and str(folder) in said
    return named and reason in said and before in ([], [NOTE])  # a copy of pocket says what it is for


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_checkpoint_is_one_line(
    break_it: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken(tmp_path, break_it)
    assert run(["caption", "--model", str(folder), "--device", "cpu", str(PICTURE)]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert is_one_line(printed.err, folder, BROKEN[break_it]), printed.err


def test_nothing_else_prints_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = broken(tmp_path, lose_a_tensor)
    command = [sys.executable, "-m", "snugvl", "caption", "--model", str(folder), str(PICTURE)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 4
    assert ran.stdout == ""
    assert is_one_line(ran.stderr, folder, BROKEN[lose_a_tensor]), ran.stderr

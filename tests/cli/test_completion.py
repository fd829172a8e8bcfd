"""The shell's completion of models and cards, asked as bash asks: by the function that it is taught."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

BASH = shutil.which("bash")
# What bash does when TAB is pressed: it runs the function of the command, which fills COMPREPLY.
PRESS_TAB = """
eval "$(env _SNUGVL_COMPLETE=source_bash snugvl)"
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p snugvl | sed -E 's/.*-F ([^ ]+) .*/\\1/') snugvl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

pytestmark = pytest.mark.skipif(BASH is None, reason="no bash")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A `snugvl` to find by its name, and a cache with one model."""
    (tmp_path / "hub" / "models--owner--eyes" / "snapshots" / "c1").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "snugvl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m snugvl "$@"\n')
    program.chmod(0o755)
    return tmp_path


def tab(home: Path, *words: str) -> list[str]:
    """What completes the last of `words`."""
    assert BASH is not None
    typed = " ".join(shlex.quote(word) for word in ("snugvl", *words))
    environment = {
        **os.environ,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_CACHE": str(home / "hub"),
    }
    done = subprocess.run(
        [BASH, "--norc", "-c", PRESS_TAB.format(words=typed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("command", [("rm",), ("serve",), ("caption", "a.png", "--model")])
@pytest.mark.sample("command0")
def test_models_that_are_here(home: Path, command: tuple[str, ...]) -> None:
    assert tab(home, *command, "") == ["pocket", "owner/eyes"]
    assert tab(home, *command, "own") == ["owner/eyes"]
    assert tab(home, *command, "nothing/") == []


@pytest.mark.parametrize("command", ["plan", "pull"])
@pytest.mark.sample("pull")
def test_models_of_the_catalogue(home: Path, command: str) -> None:
    found = tab(home, command, "Qwen/Qwen3-VL-2B-I")
    assert "Qwen/Qwen3-VL-2B-Instruct-FP8" in found
    assert all(name.startswith("Qwen/Qwen3-VL-2B-I") for name in found)


def test_cards(home: Path) -> None:
    found = tab(home, "plan", "--gpu", "rtx-506")
    assert set(found) >= {"rtx-5060", "rtx-5060-ti"}
    assert all(name.startswith("rtx-506") for name in found)
    assert tab(home, "plan", "--gpu", "no") == ["none"]


def test_commands(home: Path) -> None:
    assert tab(home, "do") == ["doctor"]

"""What only a process of its own can show: start-up, pipes, Ctrl+C."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import batch
from snugvl.version import __version__
from tests.cli.conftest import NOTE
from tests.patience import PATIENCE_S, until

FAKE = [sys.executable, "-m", "tests.cli.fake_main"]
REAL = [sys.executable, "-m", "snugvl"]


def shell(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        Image.new("RGB", (10 + number, 10)).save(folder / f"{number:02}.png")
    return folder


@pytest.mark.parametrize("args", [["--help"], ["caption", "--help"], ["detect", "-h"], ["--version"], []])
def test_help_imports_nothing_slow(args: list[str]) -> None:
    code = (
        "import sys\nfrom snugvl.cli.app import run\n"
        f"assert run({args!r}) == 0\n"
        "slow = {'torch', 'transformers', 'PIL', 'numpy', 'rich'} & set(sys.modules)\n"
        "slow |= {name for name in sys.modules if name.startswith('snugvl.checkpoint.')}\n"
        "assert not slow, slow"
    )
    ran = shell([sys.executable, "-c", code])
    assert ran.returncode == 0, ran.stderr


def test_version_and_help_name_everything() -> None:
    assert shell([*REAL, "--version"]).stdout == f"snugvl {__version__}\n"
    text = shell([*REAL, "--help"]).stdout
    assert all(command in text for command in ("caption", "ask", "scene", "detect"))


def test_piped_output_is_plain(many: Path) -> None:
    ran = shell([*FAKE, "caption", str(many)], FORCE_COLOR="1", TERM="xterm-256color")
    assert ran.returncode == 0
    assert "\x1b" not in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[0] == f"{many}/00.png: A picture of 10x10."
    assert ran.stderr == NOTE


def test_standard_input_and_shell_pipes(many: Path) -> None:
    command = f"cat {many}/03.png | {' '.join(FAKE)} ask - 'Size?'"
    assert shell(["bash", "-c", command]).stdout == "Size? 13x10!\n"


@pytest.mark.parametrize("command", ["caption", "caption --json"])
@pytest.mark.sample("caption --json")
def test_a_closed_pipe_ends_quietly(many: Path, command: str) -> None:
    line = f"set -o pipefail; {' '.join(FAKE)} {command} {many} | head -1"
    # Forty answers take half a minute: `head` ends before the last of them, however busy the machine is.
    ran = shell(["bash", "-c", line], FAKE_DELAY="0.2")
    assert (ran.returncode, ran.stderr) == (141, NOTE)
    assert ran.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("caption", "nothing.png"), ("plan", "--gpu", "nothing"), ("plan", "--nothing"), ("ps",)]
)
def test_a_closed_pipe_of_messages_ends_quietly_too(words: tuple[str, ...], tmp_path: Path) -> None:
    """As with `2>&1 | head -1`: the first line that can't be printed ends the command."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with os.fdopen(writer, "wb") as closed:
        ran = subprocess.run(
            [*REAL, *words], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=closed
        )
    assert (ran.returncode, ran.stdout) == (141, b"")


TYPERS = pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("--help",), {}),
        (("plan", "--help"), {}),
        (("--show-completion", "bash"), {}),
        ((), {"_SNUGVL_COMPLETE": "complete_bash", "COMP_WORDS": "snugvl p", "COMP_CWORD": "1"}),
    ],
)


@TYPERS
def test_what_typer_prints_into_a_closed_pipe(words: tuple[str, ...], variables: dict[str, str]) -> None:
    """It ended with 1, and said "Broken pipe" where a shell had asked for completions."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ran = subprocess.run(
            [*REAL, *words], env=os.environ | variables, stdout=closed, stderr=subprocess.PIPE
        )
    assert (ran.returncode, ran.stderr) == (141, b"")


@TYPERS
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_typer_prints_on_a_full_disk(words: tuple[str, ...], variables: dict[str, str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run([*REAL, *words], env=os.environ | variables, stdout=full, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (1, b"snugvl: standard output: No space left on device\n")


def interrupted(command: list[str], done: Callable[[], bool], **environment: str) -> tuple[int, str]:
    """Starts `command`, presses Ctrl+C once `done`; its exit code and standard error."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # Started in a shell's background, the suite would hand down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(done)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    return process.returncode, error


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(many: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    command = [*FAKE, "caption", str(many), "-o", str(file)]
    code, error = interrupted(
        command, lambda: file.exists() and file.read_text().count("\n") >= 3, FAKE_DELAY="0.1"
    )
    assert code == 130
    assert error.startswith(NOTE)
    assert error.count("\n") == 2
    assert "--resume" in error
    done = [json.loads(line) for line in file.read_text().splitlines()]
    assert 3 <= len(done) < 40
    assert all("result" in record for record in done)
    assert shell([*command, "--resume"]).returncode == 0
    images = [json.loads(line)["image"] for line in file.read_text().splitlines()]
    assert images == [str(path) for path in sorted(many.iterdir())]


def test_ctrl_c_on_one_image(many: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    environment = {"FAKE_ANSWER": "word " * 5000, "FAKE_DELAY": "0.05", "FAKE_READY": str(ready)}
    result = interrupted([*FAKE, "caption", str(many / "00.png")], ready.exists, **environment)
    assert result == (130, NOTE + "snugvl: interrupted\n")


def test_ctrl_c_still_writes_a_coco_file(many: Path, tmp_path: Path) -> None:
    file, drawn = tmp_path / "out.json", tmp_path / "drawn"
    command = [*FAKE, "detect", str(many), "--format", "coco", "-o", str(file), "--draw", str(drawn)]
    enough = batch.IN_FLIGHT + 4  # more than can be waiting, so some have been taken
    code, _ = interrupted(
        command, lambda: drawn.exists() and len(list(drawn.iterdir())) >= enough, FAKE_DELAY="0.05"
    )
    assert code == 130
    assert 0 < len(json.loads(file.read_text())["images"]) < 40

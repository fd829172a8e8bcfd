"""Bad input: one line that says what to do, the documented exit code, never a traceback."""

import errno
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from PIL import Image
from typer.main import get_command

from snugvl import errors, load
from snugvl.bench import result
from snugvl.checkpoint.section import read_json
from snugvl.cli import quantize
from snugvl.cli.app import app, run
from snugvl.cli.chat import _turns
from snugvl.core.folders import leave_removed_folder
from snugvl.hardware import calibration
from snugvl.hardware.machine import replay
from snugvl.planner.report import document
from snugvl.server.settings import checked, read_keys
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.tasks.fake import FakeBackend

Run = Callable[..., Ran]


def bomb(path: Path) -> None:
    """A PNG whose header says 30,000×30,000, with data that inflates to as much."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(1_000_000), 9)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def truncated_jpeg(path: Path) -> None:
    Image.effect_noise((200, 200), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:2000])


def pages_of_a_scanner(path: Path) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue", "green")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


CORPUS: dict[str, Callable[[Path], object]] = {
    "random.bin": lambda path: path.write_bytes(os.urandom(500)),
    "text.png": lambda path: path.write_text("this is not a picture"),
    "empty.jpg": lambda path: path.write_bytes(b""),
    "truncated.jpg": truncated_jpeg,
    "bomb.png": bomb,
    "pages.tif": pages_of_a_scanner,
    "missing.png": lambda path: None,
    "new\nline \x1b[31m.png": lambda path: path.write_text("text"),
}


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("command", ["caption", "ask", "scene", "detect"])
@pytest.mark.sample(
    "caption-text.png",
    "detect-random.bin",
    "ask-missing.png",
    "scene-empty.jpg",
    "caption-truncated.jpg",
    "caption-bomb.png",
    "caption-new\\nline \\x1b[31m.png",
    "caption-pages.tif",
)
def test_each_bad_file_is_one_line(
    snugvl: Run, backend: FakeBackend, tmp_path: Path, name: str, command: str
) -> None:
    CORPUS[name](tmp_path / name)
    ran = snugvl(command, tmp_path / name, *(["What?"] if command == "ask" else []))
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("snugvl: ")
    assert ran.err.count("\n") == 1
    assert name[:3] in ran.err
    assert ran.err.isprintable() or ran.err.strip("\n").isprintable()
    assert backend.requests == []
    assert backend.closed == 0  # no model was loaded for it


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("empty", "no pictures in empty: it is empty"),
        ("*.nothing", "no file matches"),
        ("only-below", "add --recursive"),
        ("https://example.org/a.png", "curl -s URL | snugvl caption -"),
        ("", "the name of the picture is empty; give a path"),
    ],
)
def test_arguments_that_mean_no_picture(
    snugvl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "only-below" / "deep").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "only-below" / "deep" / "a.png")
    ran = snugvl("caption", argument)
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert message in ran.err


def test_a_single_failure_has_its_record_and_leaves_no_document(
    snugvl: Run, pictures: Path, tmp_path: Path
) -> None:
    record = json.loads(snugvl("detect", pictures / "notes.txt", "--json").out)
    assert list(record) == ["image", "task", "model", "params", "error"]
    assert record["error"]["type"] == "ImageError"
    file = tmp_path / "coco.json"
    assert snugvl("detect", pictures / "notes.txt", "--format", "coco", "-o", file).code == 3
    assert not file.exists()


LOADING = [
    name for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    if any("--device" in parameter.opts for parameter in command.params)
]  # fmt: skip


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.parametrize("value", ["nonsense", "cuda:x", "cuda:", "CPU", "mps", "cuda:-1", ""])
@pytest.mark.sample(
    *(f"nonsense-{command}" for command in LOADING),
    *(f"{value}-caption" for value in ("cuda:x", "cuda:", "CPU", "mps", "cuda:-1", "")),
)
def test_a_device_that_is_none_is_a_usage_error_wherever_a_device_is_said(
    snugvl: Run, pictures: Path, backend: FakeBackend, tmp_path: Path, command: str, value: str
) -> None:
    """Without a GPU `serve --device nonsense` once served."""
    words = {
        "detect": [pictures / "a.png", "--object", "cup"], "ask": [pictures / "a.png", "What?"],
        "serve": ["pocket"], "bench": ["pocket"], "chat": [], "quantize": ["pocket", tmp_path / "out"],
        "compare": ["pocket", pictures / "a.png"],
    }.get(command, [pictures / "a.png"])  # fmt: skip
    ran = snugvl(command, *words, "--device", value)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert f"device {value!r} is unknown; use auto, cpu, cuda or cuda:N" in ran.err
    assert f"(see snugvl {command} --help)" in ran.err
    assert backend.requests == []


def test_a_machine_is_described_to_a_plan_and_no_device(snugvl: Run) -> None:
    ran = snugvl("plan", "pocket", "--device", "nonsense")
    assert (ran.code, ran.err) == (2, "snugvl: No such option: --device (see snugvl plan --help)\n")


def test_arguments_that_have_no_place_are_named(snugvl: Run) -> None:
    ran = snugvl("top", "http://127.0.0.1:1")
    assert (ran.code, ran.err) == (
        2,
        "snugvl: too many arguments: http://127.0.0.1:1; a server is named with --server http://127.0.0.1:1 "
        "(see snugvl top --help)\n",
    )


def test_no_server_is_answered_with_the_option_that_names_one(snugvl: Run) -> None:
    ran = snugvl("top", "--server", "http://127.0.0.1:1")
    assert "no server answers at http://127.0.0.1:1 (" in ran.err
    assert "; start one with `snugvl serve --port 1`, or name one with --server URL" in ran.err
    assert "Errno" not in ran.err


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["models"], "list"),
        (["run"], "chat"),
        (["download"], "pull"),
        (["help"], "--help"),
        (["version"], "--version"),
        (["config", "list"], "show"),
        (["config", "rm"], "unset"),
    ],
)
def test_what_other_programs_call_a_command(snugvl: Run, words: list[str], ours: str) -> None:
    ran = snugvl(*words)
    assert (ran.code, ran.err.split(" (")[0]) == (
        2,
        f"snugvl: No such command '{words[-1]}'. Did you mean '{ours}'?",
    )


@pytest.mark.parametrize("word", ["stop", "kill", "shutdown", "down", "restart"])
def test_what_would_stop_a_server_says_how_one_is_stopped(snugvl: Run, word: str) -> None:
    ran = snugvl(word)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"snugvl: No such command '{word}'. A server ends with Ctrl+C where it runs, ")
    assert "kill PID in the background (snugvl ps shows the PID)" in ran.err
    assert "Did you mean" not in ran.err


def test_one_dash_of_two_and_a_file_that_begins_with_one(snugvl: Run) -> None:
    ran = snugvl("plan", "-gpu", "x")
    assert ran.err == "snugvl: No such option: -g. Did you mean --gpu? (see snugvl plan --help)\n"
    ran = snugvl("caption", "-5.png")
    assert ran.code == 2
    assert ran.err.startswith("snugvl: No such option: -5.png; a file of that name is given as ./-5.png (see")


def test_a_server_with_options_of_loading_says_what_to_leave_out(snugvl: Run) -> None:
    ran = snugvl("caption", "x.png", "--server", "http://127.0.0.1:9", "--device", "cuda")
    assert (ran.code, "leave it out, or leave out --server" in ran.err) == (2, True)


def test_more_held_than_there_is_names_the_option(snugvl: Run) -> None:
    ran = snugvl("plan", "pocket", "--gpu", "RTX 3060", "--vram", "8GiB", "--held", "12GiB")
    assert (ran.code, "--held 12.00 GiB is more than the GPU has" in ran.err) == (2, True), ran.err


def test_a_log_that_is_no_text(snugvl: Run, tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.webp")
    ran = snugvl("doctor", "--log", tmp_path / "a.webp")
    assert ran == Ran(3, "", f"snugvl: {tmp_path / 'a.webp'} isn't a text file; name the log of an engine\n")


def test_an_empty_key_is_called_empty() -> None:
    with pytest.raises(errors.InputError, match="API key 1 is empty; give one"):
        checked([""])


def test_a_picture_where_a_command_belongs(snugvl: Run) -> None:
    named = "No such command 'x/a.png'; to describe that: snugvl caption x/a.png"
    assert snugvl("x/a.png") == Ran(2, "", f"snugvl: {named} (see snugvl --help)\n")


@pytest.mark.parametrize("command", sorted(get_command(app).commands))  # type: ignore[attr-defined]
def test_an_unknown_option_is_not_answered_with_a_guess(snugvl: Run, command: str) -> None:
    """`--frobnicate` was once answered with "Possible options: --format", --force or --once."""
    for option in ("--frobnicate", "--xyzzy"):
        said = f"snugvl: No such option: {option} (see snugvl {command} --help)\n"
        assert snugvl(command, option) == Ran(2, "", said)


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("detect", "--objects", "--object"),
        ("caption", "--detial", "--detail"),
        ("caption", "--temp", "--temperature"),
        ("serve", "--max_pixels", "--max-pixels"),
    ],
)
def test_a_misspelled_option_is_named(snugvl: Run, command: str, typed: str, meant: str) -> None:
    said = f"snugvl: No such option: {typed}. Did you mean {meant}? (see snugvl {command} --help)\n"
    assert snugvl(command, typed) == Ran(2, "", said)


TREE = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.SnugvlError)
]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_leaves_with_its_exit_code(
    snugvl: Run, backend: FakeBackend, pictures: Path, kind: type[errors.SnugvlError]
) -> None:
    backend._script = lambda _: kind("what is\nwrong")
    ran = snugvl("caption", pictures / "a.png")
    lead = f"{pictures}/a.png: " if issubclass(kind, errors.ImageError) else ""
    more = "; say it with --api-key KEY or SNUGVL_API_KEY" if kind is errors.Unauthorized else ""
    assert ran == Ran(kind.exit_code, "", f"{NOTE}snugvl: {lead}what is wrong{more}\n")


@pytest.mark.parametrize("answer", ["I see two cups.", ""])
def test_an_answer_of_the_wrong_kind(snugvl: Run, backend: FakeBackend, pictures: Path, answer: str) -> None:
    backend._script = lambda _: answer
    ran = snugvl("detect", pictures / "a.png", "--json")
    assert ran.code == 6
    assert '"type": "OutputError"' in ran.out
    assert f'"text": "{answer}"' in ran.out


class NoTask(RuntimeError):
    """What an event loop says that got no socket, whose error stays behind it."""

    def __init__(self) -> None:
        super().__init__("Cannot close a running event loop")
        self.__context__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("error", "code", "way"),
    [
        (MemoryError(), 5, "ulimit -v"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), 5, "ulimit -v"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            5,
            "-v",
        ),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 5, "ulimit -v"),
        (RuntimeError("can't start new thread"), 1, "ulimit -u"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), 1, "ulimit -n"),
        (NoTask(), 1, "ulimit -n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_system_refuses_is_no_bug(
    snugvl: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, way: str
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr("snugvl.cli.session.load_model", refuse)
    ran = snugvl("chat", "--quiet")
    assert (ran.code, ran.err.count("\n")) == (code, 1)
    assert ran.err.startswith("snugvl: the system ")
    assert way in ran.err


def test_a_bug_is_one_line_and_how_to_see_more(
    snugvl: Run, backend: FakeBackend, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend._script = lambda _: ZeroDivisionError("a bug")
    ran = snugvl("caption", pictures / "a.png", "--quiet")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "unexpected ZeroDivisionError: a bug" in ran.err
    assert "SNUGVL_DEBUG=1" in ran.err
    monkeypatch.setenv("SNUGVL_DEBUG", "1")
    assert "Traceback" in snugvl("caption", pictures / "a.png").err


def test_a_place_that_cannot_be_written(snugvl: Run, pictures: Path) -> None:
    ran = snugvl("caption", pictures / "a.png", "-o", pictures / "notes.txt" / "out.jsonl", "--quiet")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "notes.txt" in ran.err


def test_standard_input_without_a_pipe(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Keyboard())
    ran = snugvl("caption", "-")
    assert (ran.code, "nothing is piped" in ran.err) == (2, True)


def test_the_real_loader_speaks_through_the_same_door(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no-model").mkdir()
    assert run(["caption", str(pictures / "a.png"), "-m", str(tmp_path / "no-model")]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_no_traceback_in_a_process_of_its_own(pictures: Path) -> None:
    command = [sys.executable, "-m", "tests.cli.fake_main", "caption", str(pictures / "a.png"), "--quiet"]
    environment = {**os.environ, "FAKE_BUG": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)


def test_a_context_that_is_too_short_is_answered_about_the_context(
    snugvl: Run, backend: FakeBackend, pictures: Path
) -> None:
    said = "the prompt has 80 tokens, at most 49 fit; send smaller pictures (max_pixels)"
    backend._script = lambda _: errors.RequestTooLarge(said)
    ran = snugvl("caption", pictures / "a.png", "--context", "50", "--quiet")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert ran.err.endswith(
        "at most 49 fit; send smaller pictures (--max-pixels), or give a larger --context\n"
    )
    assert snugvl("caption", pictures / "a.png", "--quiet").err.endswith("smaller pictures (--max-pixels)\n")


def test_a_current_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's linear algebra ends the process there, with an exit code of its own."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["list"]) == errors.InputError.exit_code
    assert "the current folder can't be found" in capsys.readouterr().err
    with pytest.raises(errors.InputError, match="cd to one that is there"):
        load("pocket")
    leave_removed_folder()  # as an engine that is started again does
    assert Path.cwd() == Path("/")


@pytest.mark.parametrize("context", ["8k", "8,192", "1e4", "128Ki"])
def test_a_number_with_a_suffix_is_told_how_it_is_written(
    context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "pocket", "--context", context]) == 2
    assert f"'{context}' is not a whole number in digits alone, such as 8192" in capsys.readouterr().err


def noted(path: Path) -> None:
    """Measurements that can't be read are left out, with a note."""
    raise errors.InputError(calibration.load(path).note)


@pytest.mark.parametrize(
    "read",
    [read_keys, document.read, result.load, _turns, read_json, replay, quantize._text, noted],
    ids=["keys", "plan", "benchmark", "conversation", "config", "machine", "data", "measurements"],
)
def test_a_file_without_end_is_not_read_for_ever(read: Callable[[Path], object]) -> None:
    kinds = (errors.InputError, errors.CheckpointError, OSError)
    with pytest.raises(kinds, match=r"it has more than [\d,]+ bytes"):
        read(Path("/dev/zero"))

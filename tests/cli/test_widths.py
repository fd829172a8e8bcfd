"""What a terminal of 60, 80 or 120 columns shows: no word is broken, nothing is cut, no line is too wide."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from snugvl.bench.report import print_to_terminal, report
from snugvl.cli import chat as chat_module
from snugvl.cli import compare, quantize, top
from snugvl.core.wrapping import NARROWEST, Wrap, wrapped
from snugvl.fidelity.results import Figures
from snugvl.quantize.setup import WrittenCheckpoint
from tests.bench import results
from tests.cli.test_top import MEMORY, view_of
from tests.command import Ran
from tests.tasks.fake import FakeBackend

Run = Callable[..., Ran]
RECORDINGS = Path(__file__).parents[1] / "hardware" / "recordings"
LOGS = RECORDINGS.parents[1] / "diagnose" / "logs"
WIDTHS = [60, 80, 120]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"[█░]+")
LONG = (
    "The picture shows two blue squares, which stand on the right, a large red circle and a triangle.\n\n"
    "- see https://example.org/a/very/long/path/to/some/page/that/is/wider/than/a/terminal/of/sixty/columns\n"
    "- 这是一张画有两个蓝色正方形、一个红色大圆形和一个绿色大三角形的图片，背景是白色的，没有其他任何东西。\n"
)


def words(text: str) -> list[str]:
    """All words, the bars left out; a command's backslash at the end of a line belongs to none."""
    text = re.sub(r"(?<=\w)-\n +", "-", text)  # click breaks --help after hyphens
    return BAR.sub("", CODES.sub("", text).replace(" \\\n", " ").replace("\n  # ", "  # ")).split()


def fits(text: str, width: int) -> bool:
    """Whether no line is too wide, but for one that is a single word."""
    lines = CODES.sub("", text).replace("\r", "").split("\n")
    return all(cell_len(line.rstrip()) <= width or len(line.split()) == 1 for line in lines)


def on_a_terminal(width: int, *args: str) -> str:
    """What `snugvl ARGS` writes to a pseudo terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("COLUMNS", "SNUGVL_"))
    }
    command = [sys.executable, "-m", "snugvl", *args]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment):
        os.close(its)
        pieces = []
        while piece := _read(ours):
            pieces.append(piece)
    os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize(
    ("args", "widths"),
    [
        (("plan", "--machine", f"{RECORDINGS}/rtx5060-wsl2.json", "--offline", "--verbose"), WIDTHS[:1]),
        (("plan", "--machine", f"{RECORDINGS}/rtx5060-wsl2.json", "--offline"), WIDTHS[:1]),
        (("doctor", "--machine", f"{RECORDINGS}/rtx5060-wsl2.json"), WIDTHS[:1]),
        (("serve", "no/model"), WIDTHS[:1]),
        (("doctor", "--log", f"{LOGS}/thread_llamacpp_gguf_key.log"), WIDTHS[:1]),
        (("doctor", "--log", f"{LOGS}/vllm033_q4bfp8_overfree_5060_wsl2.log"), WIDTHS[:1]),
    ],
    ids=["all of a plan", "plan", "doctor", "an error", "a diagnosis", "a diagnosis with a command"],
)
@pytest.mark.sample("all of a plan", "a diagnosis with a command")
def test_a_pseudo_terminal(args: tuple[str, ...], widths: list[int]) -> None:
    wide = on_a_terminal(1000, *args)
    assert len(words(wide)) > 5
    for width in widths:
        text = on_a_terminal(width, *args)
        assert fits(text, width), text
        assert words(text) == words(wide)
        assert not re.search(
            r"■\s*$", CODES.sub("", text), re.MULTILINE
        )  # a colour and its name are together


@pytest.mark.parametrize("width", WIDTHS[:1])
def test_answers_as_they_come(
    snugvl: Run,
    backend: FakeBackend,
    pictures: Path,
    piped: Callable[[bytes], None],
    terminal: None,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    backend._script = lambda _: LONG
    latin = [word for word in LONG.split() if word.isascii()]
    picture = str(pictures / "a.png")
    piped(f"/help\n/image {picture}\nWhat?\n".encode())
    for args in (
        ("chat",),
        ("caption", picture),
        ("ask", picture, "What?"),
        ("caption", picture, picture[:-5] + "b.jpg"),
    ):
        ran = snugvl(*args)
        assert ran.code == 0
        shown = words(ran.out)
        assert fits(ran.out, width), ran.out
        assert all(word in shown for word in latin)
        assert "".join(LONG.split()) in "".join(shown)
        assert fits(ran.err, width), ran.err
    assert all(word in words(snugvl("chat").out or chat_module.HELP) for word in chat_module.HELP.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_bench(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    levels = [results.run(clients, memory=results.memory()) for clients in (1, 2, 4, 8, 16, 32, 64, 128)]
    found = report(results.result(*levels))
    texts = []
    for columns in (width, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        file = Terminal()
        print_to_terminal(found, file)
        texts.append(file.getvalue())
    assert fits(texts[0], width), texts[0]
    assert "…" not in texts[0]
    assert set(words(texts[0])) == set(words(texts[1]))


@pytest.mark.parametrize("width", WIDTHS)
def test_top(width: int) -> None:
    load = replace(MEMORY.load, planned_blocks=50, encoder_queries=8, encoder_hits=6, shortages=1)
    texts = []
    for columns in (width, 1000):
        console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system="truecolor")
        console.print(top.frame(view_of(replace(MEMORY, load=load)), console))
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert fits(texts[0], width), texts[0]
    assert words(texts[0]) == words(texts[1])


@pytest.mark.parametrize("width", [NARROWEST, *WIDTHS])
@pytest.mark.parametrize("command", ["", "serve", "caption", "plan", "bench", "config", "config set"])
@pytest.mark.sample(
    "-60", "-80", "-120", "serve-60", "caption-60", "plan-80", "bench-60", "config-120", "-40", "serve-40"
)
def test_help(width: int, command: str, monkeypatch: pytest.MonkeyPatch, snugvl: Run) -> None:
    texts = []
    for columns in (width, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        texts.append(snugvl(*command.split(), "--help").out)
    assert fits(texts[0], width), texts[0]
    assert "..." not in re.sub(r"\S\.\.\.", "", texts[0])
    assert not re.search(r"[a-z]\.\.\.$", texts[0], re.MULTILINE)
    assert sorted(words(texts[0])) == sorted(words(texts[1]))
    assert not re.search(r"<=|>=|<int|<float|<str", texts[0])


def test_the_last_lines_of_quantize(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROWEST))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    made = WrittenCheckpoint(4.25, 196, 3, {f"layer {i}": 4 for i in range(196)}, 2 << 30, 60.0)
    quantize._show(Path("a folder/qwen3-vl-2b-instruct"), made)
    text = capsys.readouterr().out
    assert fits(text, NARROWEST), text
    assert text.endswith("serve it with:\n  snugvl serve \\\n    'a folder/qwen3-vl-2b-instruct'\n")


def test_the_table_of_compare() -> None:
    row = Figures("fp32, fp8 KV cache", 4, 0, 80, 0.00123, 0.00012, 0.981, 3, 0, 0.75)
    rows = [row, replace(row, variant="int4", iou=None)]
    lines = compare._table(rows, NARROWEST)
    assert lines[:6] == [
        "fp32, fp8 KV cache",
        "  KL, nats a token: 0.00123 ± 0.00012",
        "  likeliest token: 98.10%",
        "  same answers: 3 of 4",
        "  boxes' IoU: 0.750",
        "int4",
    ]
    assert len(compare._table(rows, 200)) == len(compare._table(rows, None)) == 3


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_of_any_size_come_to_the_same_lines(size: int) -> None:
    wrap = Wrap(NARROWEST, 2)
    pieces = [LONG[at : at + size] for at in range(0, len(LONG), size)]
    assert "".join(map(wrap.feed, pieces)) + wrap.end() == wrapped(LONG, NARROWEST, 2)
    assert wrapped(LONG, None) == LONG

# ruff: noqa: F811 (fixtures)
"""`snugvl top`: what a frame shows, and a server that comes and goes."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from snugvl import Client
from snugvl.bench.measure import free_port
from snugvl.cli import top
from snugvl.cli.top import DEFAULT_SERVER, ServerWatch, Throughput, View, first_tokens
from snugvl.client import DEFAULT_URL, Memory
from snugvl.core import memory_kinds
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Health, Load
from snugvl.server.settings import ServerSettings
from tests.client.conftest import GIB, LEDGER, ScriptedEngine, engine, listening, scripted, unused_url  # noqa: F401
from tests.command import Ran
from tests.patience import PATIENCE_S
from tests.server.live import live

Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine is no server that doesn't answer."""
    monkeypatch.setattr("snugvl.cli.top.PATIENCE_S", PATIENCE_S)


LOAD = Load(running=2, waiting=1, free_blocks=30, num_blocks=40, block_size=16, generated_tokens=100)
MEMORY = Memory(1000.0, LEDGER, LOAD, Health("ready", "pocket is ready"))


# Names of rows in the ledgers of our engine, of transformers and of vLLM, the longest among them.
OURS = (
    "text weights",
    "encoder outputs",
    "recurrent state",
    "image inputs",
    "CUDA context and libraries",
    "activations and libraries",
)


def lines_of(view: View, width: int = 80, colour: bool = False) -> list[str]:
    file = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=file, width=width, color_system=system, force_terminal=colour, highlight=False)
    console.print(top.frame(view, console))
    return file.getvalue().splitlines()


def view_of(memory: Memory | None = MEMORY, **options: object) -> View:
    return View("http://127.0.0.1:8000", memory, Throughput(41.26, 0.214), **options)  # type: ignore[arg-type]


def test_the_default_server_is_the_clients() -> None:
    assert DEFAULT_SERVER == DEFAULT_URL


def test_a_frame_says_it_all() -> None:
    assert [line.rstrip() for line in lines_of(view_of())] == [
        "snugvl top  http://127.0.0.1:8000  ready",
        "running 2   waiting 1   tokens/s 41.3   first token 0.21 s   KV used 25%",
        "",
        "NVIDIA GeForce RTX 5060: 8.00 GiB, the engine takes at most 7.00 GiB",
        "W" * 40 + "V" * 10 + "k" * 8 + "K" * 2 + "v" * 2 + "#" * 10 + "." * 8,
        "",
        "                    planned  measured  share",
        "W text weights     4.00 GiB  4.00 GiB  50.0%",
        "V vision weights   1.00 GiB  1.00 GiB  12.5%",
        "k KV cache         1.00 GiB  1.00 GiB  12.5%",
        "K   in use                    256 MiB   3.1%",
        "v workspace         512 MiB   256 MiB   3.1%",
        "# other processes            1.00 GiB  12.5%",
        ". free                        768 MiB   9.4%",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_a_frame_is_never_wider_than_the_terminal(width: int, colour: bool) -> None:
    long = replace(LEDGER, device="NVIDIA " * 20, rows=(*LEDGER.rows, LedgerRow("a long name " * 9, 1, 1)))
    health = Health("restarting", "it crashed " * 20, 0.5, 3)
    memory = replace(MEMORY, ledger=long, health=health)
    for trouble in (None, "gone " * 50):
        lines = lines_of(view_of(memory, trouble=trouble), width, colour)
        assert len(lines) > 12
        assert max(cell_len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= width


def test_nothing_is_cut_at_sixty_columns() -> None:
    """Every component that an engine of ours reports, and every fact, on lines of at most 60."""
    rows = [LedgerRow(name, GIB, GIB // 3) for name in OURS]
    memory = replace(
        MEMORY,
        ledger=replace(LEDGER, device="NVIDIA GeForce RTX 4070 Ti SUPER", rows=(*LEDGER.rows, *rows)),
        load=replace(LOAD, planned_blocks=50, encoder_queries=8, encoder_hits=6, shortages=1, faults=2),
        health=Health("restarting", "the engine's process died and is started again; 2 more tries", 0.5, 3),
    )
    lines = lines_of(view_of(memory), 60)
    assert any(line.startswith(("KV used ", "first token ")) or "   KV used 25%" in line for line in lines)
    assert max(map(cell_len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    wide = " ".join(" ".join(lines_of(view_of(memory), 200)).split())
    bar = re.compile(r"\b[A-Za-z.#]{58,}")
    assert bar.sub("", text).split() == bar.sub("", wide).split()


@pytest.mark.parametrize("height", [12, 16, 24])
def test_a_low_terminal_loses_no_memory(height: int) -> None:
    rows = [LedgerRow(name, None, (GIB >> 8) * number) for number, name in enumerate(OURS)]
    ledger = replace(LEDGER, rows=(*LEDGER.rows, *rows))
    console = Console(file=io.StringIO(), width=60, height=height)
    frame = top.frame(view_of(replace(MEMORY, ledger=ledger)), console, height)
    lines = console.render_lines(frame)
    assert len(lines) <= height
    text = "\n".join("".join(part.text for part in line) for line in lines)
    assert "free" in text
    assert ("smaller parts" in text) == (height < 24)
    whole = top.parts(ledger)
    fewer = top.fewer(whole, height - 10)
    assert sum(part.nbytes for part in fewer) == sum(part.nbytes for part in whole)


def test_memory_that_nothing_explains_is_shown() -> None:
    ledger = Ledger(
        "GPU", (LedgerRow("weights", None, 2 * GIB, kind=Kind.WEIGHTS),), 8 * GIB, 4 * GIB, 3 * GIB
    )
    pieces = {part.label: part.nbytes for part in top.parts(ledger)}
    assert pieces == {"weights": 2 * GIB, "not told apart": GIB, "other processes": GIB, "free": 4 * GIB}
    assert sum(pieces.values()) == ledger.total_bytes


@pytest.mark.parametrize("sizes", [[], [0], [1, 1, 1], [5, 0, 3], [10**12, 1, 7]])
def test_the_bar_is_always_full(sizes: list[int]) -> None:
    assert sum(memory_kinds.shares(sizes, 80)) == (80 if sum(sizes) else 0)


def test_a_server_without_an_engine_yet() -> None:
    health = Health("starting", "loading the weights", 0.4)
    text = "\n".join(lines_of(view_of(Memory(None, None, Load(), health))))
    assert "starting 40%" in text
    assert "loading the weights" in text
    assert "KV used –" in text
    assert "no memory to show" in text


def test_what_other_programs_need_and_what_was_found_encoded() -> None:
    load = replace(LOAD, planned_blocks=50, encoder_queries=8, encoder_hits=6, shortages=1)
    load = replace(load, draft_method="mtp", drafted_tokens=8, accepted_tokens=5)
    text = " ".join(" ".join(lines_of(view_of(replace(MEMORY, load=load)))).split())
    assert (
        "KV lent to other programs 20% picture cache hits 75% drafts accepted (mtp) 62% out of memory 1"
    ) in text
    assert "lent" not in "".join(lines_of(view_of(MEMORY)))


def test_once_prints_one_frame(snugvl: Run, scripted: str) -> None:
    for args in (("--once",), ()):
        ran = snugvl("top", "--server", scripted, *args)
        assert (ran.code, ran.err) == (0, "")
        assert "text weights" in ran.out
        assert "\x1b" not in ran.out


def test_json_is_what_the_server_says(snugvl: Run, scripted: str) -> None:
    ran = snugvl("top", "--server", scripted, "--json")
    assert ran.code == 0
    with Client(scripted) as client:
        assert json.loads(ran.out) == client.get("/memory")


def test_errors_are_one_line(snugvl: Run, unused_url: str) -> None:
    for args in (("--once",), ("--json",), ()):
        ran = snugvl("top", "--server", unused_url, *args)
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert f"no server answers at {unused_url}" in ran.err
    ran = snugvl("top", "--server", "nonsense", "--once")
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_the_key_comes_from_the_option_or_the_environment(
    snugvl: Run,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with live(engine, ServerSettings(api_keys=("secret",))) as base:
        assert snugvl("top", "--server", base, "--once").code == 3
        assert snugvl("top", "--server", base, "--once", "--api-key", "secret").code == 0
        monkeypatch.setenv("SNUGVL_API_KEY", "secret")
        monkeypatch.setenv("SNUGVL_SERVER", base)
        assert snugvl("top", "--once").code == 0


def test_speed_is_what_was_generated_between_readings(engine: ScriptedEngine, scripted: str) -> None:
    with Client(scripted) as client:
        watch = ServerWatch(client, scripted)

        def speed(at: float, generated: int) -> float | None:
            engine.at, engine.load = at, replace(LOAD, generated_tokens=generated)
            return watch.look().pace.tokens_per_s

        assert speed(0, 100) is None
        assert speed(0, 100) is None  # the same snapshot again
        assert speed(0.5, 110) == 20
        assert speed(1.0, 110) == 10
        assert speed(100.0, 209) == 1  # what is long ago no longer counts
        assert speed(100.5, 5) is None  # a new engine
        assert speed(101.0, 10) == 10


def test_time_to_first_token_is_of_the_latest_requests() -> None:
    text = (
        "# TYPE snugvl_time_to_first_token_seconds histogram\n"
        'snugvl_time_to_first_token_seconds_bucket{le="+Inf"} 4.0\n'
        "snugvl_time_to_first_token_seconds_count 4.0\nsnugvl_time_to_first_token_seconds_sum 2.0\n"
    )
    assert first_tokens(text) == (2.0, 4.0)
    assert first_tokens("") == (0.0, 0.0)


def test_the_first_token_of_a_real_request_is_seen(scripted: str) -> None:
    from PIL import Image

    with Client(scripted) as client:
        watch = ServerWatch(client, scripted)
        assert watch.look().pace.first_token_s is None
        client.caption(Image.new("RGB", (8, 8)))
        seen = watch.look().pace.first_token_s
        assert seen is not None
        assert 0 < seen < 60
        assert watch.look().pace.first_token_s == seen  # nothing new: the last one stays


def test_a_server_that_goes_and_comes_back(engine: ScriptedEngine) -> None:
    with live(engine) as there, Client(there) as client:
        said = json.dumps(client.get("/memory")).encode()
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with Client(base, timeout=PATIENCE_S, max_retries=0) as client:
        watch = ServerWatch(client, base)
        with listening(port) as server:
            server.says(200, said)
            server.says(200, b"", Content_Type="text/plain")
            assert watch.look_again().trouble is None
        gone = watch.look_again()
        with listening(port) as server:
            server.says(200, said)
            server.says(200, b"", Content_Type="text/plain")
            assert watch.look_again() == View(base, gone.memory)
    with listening() as odd, Client(odd.url) as client:
        odd.says(200, said)
        assert "is it a snugvl server" in (ServerWatch(client, odd.url).look_again().trouble or "")
    assert gone.memory is not None  # the last reading stays on the screen
    assert gone.memory.ledger == LEDGER
    text = "\n".join(lines_of(gone, 200))
    assert "trying again" in text
    assert "snugvl serve" in text
    assert "ready" not in text


@pytest.mark.slow
def test_on_a_terminal_until_ctrl_c(scripted: str) -> None:
    """A real terminal of 80 columns: frames come, Ctrl+C leaves without a word, the screen is given back."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-m", "snugvl", "top", "--server", scripted],
        stdin=follower, stdout=follower, stderr=subprocess.PIPE, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(follower)
    seen = b""
    for piece in pieces(leader):
        seen += piece
        if seen.count(b"text weights") >= 2:
            break
    process.send_signal(signal.SIGINT)
    for piece in pieces(leader):
        seen += piece
    _, errors = process.communicate(timeout=PATIENCE_S)
    os.close(leader)
    assert (process.returncode, errors) == (0, b"")
    assert b"\x1b[?1049h" in seen  # another screen
    assert b"\x1b[?1049l" in seen  # and back
    assert b"\x1b[?25h" in seen  # the cursor is visible again


def pieces(terminal: int) -> Iterator[bytes]:
    """What is written to a terminal, until it is closed or nobody has patience any more."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # closed by the process
            return
        if not piece:
            return
        yield piece

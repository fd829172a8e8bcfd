# ruff: noqa: F811 (fixtures)
"""`--server`: the same commands on a running server."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from snugvl import errors
from snugvl.cli import batch, session
from snugvl.server.settings import ServerSettings
from tests.client.conftest import ScriptedEngine, engine, pocket, scripted, unused_url, url  # noqa: F401
from tests.command import Ran
from tests.patience import PATIENCE_S
from tests.server.live import live
from tests.tasks.fake import images_of, prompt_of

Run = Callable[..., Ran]
EXAMPLES = Path(__file__).parents[2] / "examples" / "images"
NO_MODEL = session.load_model  # before a fixture replaces it: the real one, which connects to servers


@pytest.fixture
def snugvl(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line as it is: what --server connects to is no fake."""
    monkeypatch.setattr(session, "load_model", NO_MODEL)
    for name in ("SNUGVL_SERVER", "SNUGVL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return snugvl


@pytest.mark.parametrize("terminal_too", [False, True])
def test_each_command_prints_the_servers_answer(
    request: pytest.FixtureRequest, snugvl: Run, scripted: str, pictures: Path, terminal_too: bool
) -> None:
    if terminal_too:
        request.getfixturevalue("terminal")
    at = ("--server", scripted, "--quiet")
    assert snugvl("caption", pictures / "a.png", *at) == Ran(0, "A picture of 10x50.\n", "")
    assert snugvl("ask", pictures / "a.png", "How many?", *at) == Ran(0, "How many? 10x50!\n", "")
    assert snugvl("scene", pictures / "a.png", *at).out.startswith("Two cups on a table.\nSetting: indoors\n")
    assert [line.split() for line in snugvl("detect", pictures / "a.png", *at).out.splitlines()] == [
        ["red", "circle", "1", "10", "3", "20"],
        ["cup", "5", "25", "9", "50"],
    ]


def test_a_real_model_says_the_same_here_and_there(snugvl: Run, url: str) -> None:
    picture = EXAMPLES / "shapes.png"
    for command in (
        ("caption", picture),
        ("ask", picture, "How many squares are there?"),
        ("detect", picture),
    ):
        here = snugvl(*command, "--device", "cpu", "--json")
        there = snugvl(*command, "--server", url, "--json")
        assert here.code == there.code == 0
        one, two = (json.loads(ran.out) | {"seconds": 0} for ran in (here, there))
        assert one == two


def test_what_is_chosen_reaches_the_server(
    snugvl: Run, engine: ScriptedEngine, scripted: str, pictures: Path
) -> None:
    args = ("--max-tokens", 9, "--temperature", 0.5, "--seed", 4, "--max-pixels", 4096, "--object", "red cup")
    assert snugvl("detect", pictures / "a.png", "--server", scripted, *args).code == 0
    (request,) = engine.backend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 4)
    assert request.messages[0].content[0].max_pixels == 4096
    assert "red cup" in prompt_of(request)


def test_a_picture_is_sent_as_it_is(
    snugvl: Run, engine: ScriptedEngine, scripted: str, tmp_path: Path
) -> None:
    drawn = Image.new("RGB", (40, 30), "white")
    drawn.paste("red", (7, 5, 21, 18))
    drawn.save(tmp_path / "a.jpg", quality=50)
    assert snugvl("caption", tmp_path / "a.jpg", "--server", scripted).code == 0
    seen = images_of(engine.backend.requests[0])[0]
    assert seen.tobytes() == Image.open(tmp_path / "a.jpg").convert("RGB").tobytes()


def test_standard_input_and_several_images_together(
    snugvl: Run, scripted: str, pictures: Path, piped: Callable[[bytes], None]
) -> None:
    piped((pictures / "a.png").read_bytes())
    ran = snugvl("ask", "-", pictures / "b.jpg", "Size?", "--together", "--server", scripted)
    assert ran == Ran(0, "Size? 10x50 and 20x50!\n", "")


def test_a_batch_asks_several_at_once_and_keeps_the_order(
    snugvl: Run, engine: ScriptedEngine, scripted: str, tmp_path: Path
) -> None:
    for number in range(20):
        Image.new("RGB", (8 + number, 8)).save(tmp_path / f"{number:02}.png")
    (tmp_path / "07.png").write_text("not a picture")
    lock, running, most = threading.Lock(), 0, 0
    several = threading.Event()

    def script(request: object) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                several.set()
        several.wait(PATIENCE_S)  # the first waits for a second
        with lock:
            running -= 1
        return f"{images_of(request)[0].width}"

    engine.backend._script = script
    ran = snugvl("caption", tmp_path, "--server", scripted, "--json")
    records = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 7
    texts = [record.get("result", {}).get("text") for record in records]
    assert texts == [None if number == 7 else str(8 + number) for number in range(20)]
    assert records[7]["error"]["type"] == "ImageError"
    assert "07.png" in ran.err
    assert 2 <= most <= batch.IN_FLIGHT


def test_records_name_the_served_model_and_resume_by_it(
    snugvl: Run, engine: ScriptedEngine, pictures: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    with live(engine, ServerSettings(names=("eyes", "other"))) as base:
        assert snugvl("caption", pictures, "--server", base, "-o", file).code == 0
        assert {json.loads(line)["model"] for line in file.read_text().splitlines()} == {"eyes"}
        ran = snugvl("caption", pictures, "--server", base, "-o", file, "--resume")
        assert (ran.code, "nothing to do" in ran.err) == (0, True)
        ran = snugvl("caption", pictures, "--server", base, "-o", file, "--resume", "-m", "other")
        assert (ran.code, "the same work only" in ran.err) == (3, True)
        ran = snugvl("caption", pictures / "a.png", "--server", base, "-m", "wrong")
        assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
        assert "'eyes' or 'other'" in ran.err


def test_the_environment_says_which_server_and_key(
    snugvl: Run, engine: ScriptedEngine, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(engine, ServerSettings(api_keys=("secret",))) as base:
        monkeypatch.setenv("SNUGVL_SERVER", base)
        ran = snugvl("caption", pictures / "a.png")
        assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
        monkeypatch.setenv("SNUGVL_API_KEY", "secret")
        assert snugvl("caption", pictures / "a.png").code == 0
        assert "secret" not in snugvl("caption", "--help").out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--device", "cpu"], "--device"),
        (["--dtype", "float16"], "--dtype"),
        (["--tower", "streamed"], "--tower"),
        (["--embedding", "cpu"], "--embedding"),
        (["--context", "512"], "--context"),
        (["--device", "cuda", "--context", "512"], "--device and --context"),
        (["--backend", "transformers", "--trust-remote-code"], "--backend and --trust-remote-code"),
    ],
)
@pytest.mark.parametrize("command", ["caption", "ask", "scene", "detect"])
@pytest.mark.sample(
    "caption-args5---device and --context",
    "detect-args0---device",
    "scene-args6---backend and --trust-remote-code",
    "ask-args2---tower",
    "scene-args4---context",
    "ask-args3---embedding",
    "ask-args1---dtype",
)
def test_what_belongs_to_a_loaded_model_is_a_usage_error(
    snugvl: Run, unused_url: str, pictures: Path, command: str, args: list[str], named: str
) -> None:
    question = ["What?"] if command == "ask" else []
    ran = snugvl(command, pictures / "a.png", *question, "--server", unused_url, *args)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"snugvl: Invalid value: {named} can't be chosen") or named in ran.err


def test_nobody_there_is_one_line(snugvl: Run, unused_url: str, pictures: Path) -> None:
    ran = snugvl("caption", pictures, "--server", unused_url)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert f"no server answers at {unused_url}" in ran.err


def test_a_missing_picture_is_told_before_the_server_is_asked_about_it(
    snugvl: Run, engine: ScriptedEngine, scripted: str, tmp_path: Path
) -> None:
    ran = snugvl("caption", tmp_path / "missing.png", "--server", scripted)
    assert (ran.code, "doesn't exist" in ran.err) == (3, True)
    assert engine.backend.requests == []


@pytest.mark.parametrize(
    "error", [errors.DeadlineExceeded("late"), errors.OutputError("x"), errors.ImageError("bad")]
)
def test_exit_codes_are_those_of_a_loaded_model(
    snugvl: Run, engine: ScriptedEngine, scripted: str, pictures: Path,
    error: errors.SnugvlError,
) -> None:  # fmt: skip
    engine.backend._script = lambda _: error
    ran = snugvl("scene", pictures / "a.png", "--server", scripted, "--quiet")
    assert (ran.code, ran.out, ran.err.count("\n")) == (error.exit_code, "", 1)


def test_boxes_are_drawn_over_the_picture_that_was_sent(snugvl: Run, scripted: str, pictures: Path) -> None:
    target = pictures / "boxes.png"
    assert snugvl("detect", pictures / "a.png", "--server", scripted, "--draw", target).code == 0
    drawn = Image.open(target).convert("RGB")
    width, height = drawn.size  # small pictures are drawn larger
    assert width * 5 == height
    assert drawn.tobytes() != Image.open(pictures / "a.png").convert("RGB").tobytes()
    ran = snugvl("detect", pictures / "a.png", "--server", scripted, "--draw", "-")
    assert (ran.code, "not to standard output" in ran.err) == (3, True)


def test_a_url_is_left_to_the_server_and_can_not_be_drawn_on(
    snugvl: Run, engine: ScriptedEngine, scripted: str, tmp_path: Path
) -> None:
    ran = snugvl("caption", "http://127.0.0.1:9/a.png", "--server", scripted, "--quiet")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert "127.0.0.1" in ran.err  # the server's own refusal of a private address
    ran = snugvl("detect", "https://example.org/a.png", "--server", scripted, "--draw", tmp_path / "b.png")
    assert (ran.code, "is a URL, not a file" in ran.err) == (3, True)
    assert engine.backend.requests == []


@pytest.mark.slow
def test_ctrl_c_ends_the_requests_that_run(pictures: Path) -> None:
    """A server that never answers: an interrupted batch leaves at once, and closes its connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "snugvl", "caption", str(pictures), "--server", address, "-m", "x"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    connection, _ = listener.accept()
    assert connection.recv(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("snugvl: interrupted after 0 of 5 images")
    connection.settimeout(PATIENCE_S)
    while connection.recv(65536):
        pass  # what was sent before; then the end
    connection.close()
    listener.close()


@pytest.mark.parametrize("command", [("caption",), ("ask", "-q", "What?"), ("scene",), ("detect",)])
def test_a_lone_file_that_a_server_refuses_is_named(
    snugvl: Run, scripted: str, pictures: Path, command: tuple[str, ...]
) -> None:
    name = str(pictures / "notes.txt")
    ran = snugvl(*command, name, "--server", scripted)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.splitlines()[-1].startswith(f"snugvl: {name} is not a picture that can be read")
    assert ran.err.count(name) == 1

"""`snugvl bench`: what it refuses, prints, saves and compares, and how it ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snugvl.bench.result import StartTimes, load
from snugvl.cli.bench import _keep
from snugvl.core.ledger import last_start_file, read_last_start
from tests.bench.fake import Fake, answer, refusal, serving, streamed
from tests.bench.results import result, run
from tests.command import Ran
from tests.patience import PATIENCE_S

Run = Callable[..., Ran]
SMALL = ("--levels", "1:2", "--image", "32x32", "--max-tokens", "4", "--warmup", "0")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SNUGVL_SERVER", "SNUGVL_API_KEY", "SNUGVL_MODEL"):
        monkeypatch.delenv(name, raising=False)


def test_a_foreign_server(snugvl: Run, tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    with serving(Fake()) as url:
        ran = snugvl("bench", "--server", url, *SMALL, "--json", saved)
    assert ran.code == 0, ran.err
    assert f"fake at {url}" in ran.out
    assert "time to first token, median, ms" in ran.out
    assert "snugvl: 1 client, 2 requests" in ran.err
    assert len(load(saved).records) == 2
    assert {"levels", "machine", "runs", "server", "workload"} <= set(json.loads(saved.read_text()))


def test_a_terminal(snugvl: Run, terminal: None) -> None:
    with serving(Fake()) as url:
        ran = snugvl("bench", "--server", url, *SMALL, "--quiet")
    assert ran.code == 0
    assert "time to first token, median, ms" in ran.out
    assert not ran.err


def test_pictures_differ_from_run_to_run_on_a_running_server(
    snugvl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    with serving(fake) as url:
        for moment in (1000.0, 2000.0):
            monkeypatch.setattr("snugvl.cli.bench.time.time", lambda moment=moment: moment)
            assert snugvl("bench", "--server", url, *SMALL).code == 0
    assert len({str(body["messages"]) for body in fake.requests}) == len(fake.requests) == 6


def test_two_saved_results(snugvl: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    with serving(Fake()) as url:
        for path in paths:
            assert snugvl("bench", "--server", url, *SMALL, "--json", path).code == 0
    ran = snugvl("bench", "--compare", *paths)
    assert ran.code == 0
    assert f"A: {paths[0]}, fake" in ran.out
    assert "B / A" in ran.out
    assert snugvl("bench", "--compare", paths[0], tmp_path / "none.json").code == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--levels", "8"], "'8' is not a level"),
        (["--levels", "1:8,"], "'' is not a level"),
        (["--levels", "0:8"], "at least one client"),
        (["--levels", "8:4"], "a request for each"),
        (["--levels", "1:8,1:9"], "1 clients come twice"),
        (["--levels", "-1:8"], "is not a level"),
        (["--image", "big"], "'big' is not a size"),
        (["--image", "0x5"], "is not a size"),
        (["--image", "30000x5"], "up to 20,000"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--repeat", "0"], "--repeat"),
        (["--timeout", "0"], "--timeout"),
        (["--json", "/no/such/folder/a.json"], "can't be written"),
        (["--json", "/tmp"], "can't be written"),
        (["--server", "http://127.0.0.1:1", "--context", "2048"], "--context 2048 can't be chosen"),
        (["--server", "http://127.0.0.1:1", "m", "--", "--memory", "1GiB"], "--memory 1GiB can't be chosen"),
        (["--compare", "a.json", "b.json", "--json", "c.json"], "measures nothing"),
        (["--", "--max-concurrent", "3"], "where the MODEL belongs"),
    ],
)
def test_usage(snugvl: Run, words: list[str], said: str) -> None:
    ran = snugvl("bench", *words)
    assert ran.code == 2
    assert said in ran.err
    assert not ran.out


@pytest.mark.parametrize(
    ("fake", "words", "code", "said"),
    [
        (Fake(key="k"), [], 3, "wants an API key; say it with --api-key"),
        (Fake(), ["other"], 3, "doesn't serve 'other'; it serves fake"),
        (Fake(answer=lambda body: refusal(503, "starting")), [], 1, "starting"),
    ],
)
def test_a_server_that_refuses(snugvl: Run, fake: Fake, words: list[str], code: int, said: str) -> None:
    with serving(fake) as url:
        ran = snugvl("bench", *words, "--server", url, *SMALL)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err


def test_no_server(snugvl: Run) -> None:
    ran = snugvl("bench", "--server", "http://127.0.0.1:9", *SMALL)
    assert ran.code == 1
    assert "no server answers at http://127.0.0.1:9" in ran.err
    assert snugvl("bench", "--server", "nonsense", *SMALL).code == 2


def failing(good: int) -> Fake:
    """Answers so many requests, then refuses."""
    calls = iter(range(1000))
    return Fake(
        answer=lambda body: (
            streamed(answer(body)) if next(calls) < good else refusal(500, "broken", "internal")
        )
    )


def test_all_requests_fail(snugvl: Run) -> None:
    with serving(failing(1)) as url:  # the first one finds out how the server wants to be asked
        ran = snugvl("bench", "--server", url, *SMALL)
    assert ran.code == 1
    assert "every request failed: 500 internal: broken" in ran.err
    assert "requests failed" in ran.out


def test_some_requests_fail(snugvl: Run) -> None:
    with serving(failing(2)) as url:
        ran = snugvl("bench", "--server", url, *SMALL)
    assert ran.code == 7
    assert "1 × 500 internal: broken" in ran.out


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "snugvl", "bench", *words]


def with_interrupt(handler: Any) -> Callable[[], None]:
    """What a child does about SIGINT; one in the background of a script ignores it."""
    return lambda: (signal.signal(signal.SIGINT, handler), None)[1]


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_IGN),
    ],
)
@pytest.mark.slow
@pytest.mark.sample("2-0")
def test_ctrl_c_prints_what_was_measured(
    tmp_path: Path, number: signal.Signals, handler: signal.Handlers
) -> None:
    calls = iter(range(1000))

    def slower(body: dict[str, Any]) -> Any:
        return streamed(answer(body), pause_s=0.0 if next(calls) < 3 else PATIENCE_S)

    saved = tmp_path / "a.json"
    words = ("--levels", "1:2,2:4", "--no-image", "--max-tokens", "4", "--warmup", "0", "--json", str(saved))
    with serving(Fake(answer=slower)) as url:
        process = subprocess.Popen(
            command("--server", url, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=with_interrupt(handler),
        )
        try:
            assert process.stderr is not None
            assert any("2 clients" in line for line in process.stderr)
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted: figures are of what was measured until then" in out
    assert "requests answered" in out
    assert err.splitlines() == [f"snugvl: every request's times are in {saved}", "snugvl: interrupted"]
    assert load(saved).interrupted
    assert len(load(saved).records) == 2


@pytest.mark.slow
@pytest.mark.extended
def test_no_torch_is_imported() -> None:
    script = (
        "import sys; from snugvl.cli.app import run; code = run(sys.argv[1:]);"
        "bad = [name for name in ('torch', 'transformers', 'fastapi', 'numpy') if name in sys.modules];"
        "sys.exit(str(bad) if bad else code)"
    )
    with serving(Fake()) as url:
        words = ["bench", "--server", url, *SMALL]
        ran = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_every_option_of_the_server_reaches_it(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Seen(Exception):
        """The settings are known."""

    def measurement(settings: Any, tell: object) -> None:
        seen.append(settings)
        raise Seen

    monkeypatch.setattr("snugvl.bench.measure.BenchmarkRun", measurement)
    words = (
        "--device cuda:1 --dtype bfloat16 --context 2048 --max-pixels 4096 --weights int4 --memory 7200MiB"
    )
    snugvl("bench", "a/model", *words.split(), "--levels", "2:4", "--", "--max-concurrent", "9")
    assert seen[0].serve_options == (*words.split(), "--max-concurrent", "9")
    assert (seen[0].model, seen[0].server, seen[0].levels) == ("a/model", None, ((2, 4),))
    snugvl("bench")
    assert (seen[1].model, seen[1].serve_options) == (None, ())
    assert seen[1].levels == ((1, 8), (8, 32), (32, 96))
    assert seen[1].workload.image == (1024, 1024)


@pytest.mark.slow
def test_pocket_from_its_start_to_its_end(tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    words = ("pocket", "--device", "cpu", "--levels", "1:2,2:4", "--image", "64x64", "--max-tokens", "8")
    more = ("--prompt-tokens", "40", "--json", str(saved), "--", "--max-concurrent", "8")
    ran = subprocess.run(command(*words, *more), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    found = load(saved)
    assert found.start is not None
    assert found.start.first_token_s is not None
    assert 0 < found.start.ready_s < found.start.first_token_s
    assert [record.error for record in found.records] == [None] * 6
    assert {record.output_tokens for record in found.records} == {8}
    assert {record.counted_by for record in found.records} == {"usage"}
    assert found.server.manner.ignore_eos
    memory = found.runs[-1].memory
    assert memory is not None
    assert memory.ledger is not None
    weights = memory.ledger.row("text weights")
    assert weights is not None
    assert weights.planned_bytes
    assert weights.measured_bytes
    assert "text weights" in ran.stdout
    assert found.server.command is not None
    assert found.server.command[-3:] == ("--drain", "2", "--quiet")
    port = int(found.server.url.rpartition(":")[2])
    assert not listens(port)


@pytest.mark.slow
@pytest.mark.extended
def test_a_server_that_was_started_ends_with_the_measurement() -> None:
    with subprocess.Popen(
        command("pocket", "--device", "cpu"),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=with_interrupt(signal.SIG_IGN),
    ) as process:
        try:
            assert process.stderr is not None
            assert any("loading" in line for line in process.stderr)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.terminate()
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()
    assert children
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no/such-model"], 4, "snugvl pull no/such-model"),
        (["pocket", "--context", "999999"], 5, "999,999"),
        (["pocket", "--", "--no-such-option"], 3, "--no-such-option"),
    ],
)
@pytest.mark.slow
def test_a_server_that_does_not_start(
    words: list[str], code: int, said: str, snugvl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    ran = snugvl("bench", *words)
    assert ran.code == code, ran.err
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert not ran.out


def test_the_speed_of_a_server_that_was_started_is_kept_for_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a server somewhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _keep(result(run(1)))
    assert read_last_start(last_start_file()) == {}
    _keep(result(run(1), start=StartTimes(2.0, None)))
    speed = read_last_start(last_start_file())["speed"]
    assert speed["clients"] == 1
    assert any(name.startswith("time to first token") for name in speed)
    assert any(name.startswith("decode of one request") for name in speed)

"""The load and the crash of benchmarks/, small: the scripts check what they see, and exit with 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.inputs.trials import PROCESSES
from tests.patience import PATIENCE_S

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE_S)]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_hundred_clients_at_once(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    run("server_load.py", "--requests", "200", "--concurrent", "200", "--out", str(out))
    figures = json.loads(out.read_text())
    assert figures["wrong"] == []
    assert figures["512_at_once"].keys() == {"200", "429"}
    held = figures["held"]
    pipes = 2 * PROCESSES  # of those that try grammars, which start with the first of them
    assert held["after"]["engine"]["files"] <= held["before"]["engine"]["files"] + pipes
    by_kind = {row["kind"]: row["statuses"] for row in figures["kinds"]}
    assert len(by_kind) > 30
    assert by_kind["chat, image, stream"].keys() == {"200"}
    assert by_kind["bad: bomb"].keys() == {"413"}


def test_an_engine_that_is_killed_three_times(tmp_path: Path) -> None:
    said = run("server_crash.py", "--out", str(tmp_path / "crash.json"))
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        assert f"kept: the stream of {path} ends with its error" in said
    assert "kept: 3 crashes in a row back off and say so" in said

"""`snugvl doctor --log`, and that it starts without anything slow."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.cli.app import app
from snugvl.errors import InputError

LOG = Path(__file__).parent / "logs" / "vllm033_q4bfp8_5060_wsl2.log"


def doctor(log: object, *options: str) -> None:
    """`snugvl doctor --log`; what it raises comes through."""
    app(["doctor", "--log", str(log), *options], standalone_mode=False)


def test_a_file_and_a_pipe_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor(LOG)
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOG.read_bytes())))
    doctor("-")
    assert capsys.readouterr().out == printed
    assert "Changed command" in printed


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(LOG, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["causes"][0]["kind"] == "vision_profile"
    assert data["causes"][0]["title"]
    assert data["budget"]["frame"][0]["name"] == "total"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name a log file"):
        doctor(tmp_path / "none.log")
    with pytest.raises(InputError, match="name a log file"):
        doctor(tmp_path)


def test_nothing_slow_is_imported() -> None:
    code = "import sys, snugvl.diagnose.explain; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "PIL", "pydantic"} & set(run.stdout.split())

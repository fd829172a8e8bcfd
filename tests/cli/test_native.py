"""The command line on the real engine, with random weights: what it says is noise, how it says it isn't."""

import json
from pathlib import Path

import pytest

from snugvl.cli.app import run
from tests.inputs.conftest import write_whole


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with tokenizer and template."""
    return write_whole(tmp_path_factory.mktemp("cli"))


def test_a_batch_runs_through_the_native_engine(
    whole: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ask", str(pictures), "What?", "-m", str(whole), "--max-tokens", "5", "--json"]
    code = run([*command, "--device", "cpu", "--dtype", "float32"])
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert len(records) == 5, captured.err
    assert code == (7 if any("error" in record for record in records) else 0)
    for record in records:
        if "error" in record:  # random weights may well say nothing
            assert record["error"]["type"] == "OutputError", captured.err
        else:
            assert record["usage"]["image_tokens"] > 0

"""`snugvl pull` as a user sees it."""

import json
from pathlib import Path

import pytest

from snugvl.cli.app import run
from tests.checkpoint.conftest import hub as hub
from tests.checkpoint.hub_server import FakeHub

REPO = "org/small"


@pytest.fixture
def small(hub: FakeHub, tiny: Path) -> FakeHub:
    hub.add(REPO, tiny)
    return hub


def test_prints_the_folder_and_the_next_command(small: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", REPO]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_vl"
    assert "downloaded and verified" in err
    assert f"next: snugvl serve {REPO}" in err


def test_quiet_prints_the_folder_alone(small: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", REPO, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == ""


def test_pocket_is_there_already(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "pocket"]) == 0
    out, err = capsys.readouterr()
    assert (Path(out.strip()) / "config.json").is_file()
    assert "nothing to download" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["org/none"], 4, "no model org/none on the Hub"),
        (["nonsense"], 4, "is not a Hub id"),
        ([REPO, "--revision", "nope"], 4, "no such revision"),
        ([], 2, "Missing argument"),
    ],
)
def test_errors_are_one_line_with_their_code(
    small: FakeHub, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(["pull", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_offline_is_a_clear_error(
    small: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(["pull", REPO]) == 4
    assert "the Hub can't be reached" in capsys.readouterr().err


def test_the_bar_is_drawn_for_a_terminal(
    small: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(["pull", REPO]) == 0
    assert "downloaded and verified" in capsys.readouterr().err


def test_a_model_that_no_engine_could_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own word: on a small card and little memory the 8B fits nowhere, pocket's size anywhere."""
    from snugvl.checkpoint.read import facts_of
    from snugvl.cli import machine_options
    from snugvl.cli.pull import why_not
    from snugvl.hardware.describe import describe

    small = describe(gpu="rtx-5060", os="wsl2", held="2500MiB", ram="4GiB")
    monkeypatch.setattr(machine_options, "machine_from", lambda _: small)
    refusal = why_not(facts_of("Qwen/Qwen3-VL-8B-Instruct", offline=True))
    assert refusal is not None
    assert "GiB" in refusal
    assert why_not(facts_of("Qwen/Qwen3-VL-2B-Instruct-FP8", offline=True)) is None

"""`snugvl pull` as a user sees it."""

import json
from pathlib import Path

import pytest

from snugvl.checkpoint.gguf_files import hub_id
from snugvl.checkpoint.locate import locate
from snugvl.cli.app import run
from snugvl.errors import CheckpointNotFound
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


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "/blob/main/config.json", "?library=x"])
@pytest.mark.parametrize("host", ["https://huggingface.co/", "huggingface.co/", "https://hf.co/"])
@pytest.mark.sample(
    "https://huggingface.co/-/",
    "https://hf.co/-",
    "huggingface.co/-/blob/main/config.json",
    "https://huggingface.co/-?library=x",
    "https://huggingface.co/-/tree/main",
)
def test_a_page_s_address_names_its_model(
    small: FakeHub, capsys: pytest.CaptureFixture[str], host: str, rest: str
) -> None:
    assert run(["pull", f"{host}{REPO}{rest}"]) == 0
    assert f"next: snugvl serve {REPO}\n" in capsys.readouterr().err


def test_an_address_with_a_quantisation_and_where_a_name_belongs() -> None:
    assert hub_id("hf.co/o/n-GGUF:Q4_K_M") == "o/n-GGUF:Q4_K_M"
    assert hub_id("https://huggingface.co/o/n-GGUF/blob/main/n-Q8_0.gguf") == "o/n-GGUF:Q8_0"
    for other in ("https://huggingface.co/o/n/tree/dev", "o/n", "https://example.org/o/n"):
        assert hub_id(other) == other
    with pytest.raises(CheckpointNotFound, match=r"is an address; the model's name is o/n$"):
        locate("https://huggingface.co/o/n")


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
    from snugvl.cli.models import why_not
    from snugvl.hardware.describe import describe

    small = describe(gpu="rtx-5060", os="wsl2", held="2500MiB", ram="4GiB")
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda _: small)
    refusal = why_not(facts_of("Qwen/Qwen3-VL-8B-Instruct", offline=True))
    assert refusal is not None
    assert "GiB" in refusal
    assert why_not(facts_of("Qwen/Qwen3-VL-2B-Instruct-FP8", offline=True)) is None

# ruff: noqa: F811 (fixtures)
"""Which model answers where nobody names one, and pocket, which is shown no photographs."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import NoReturn

import psutil
import pytest
from PIL import Image, ImageOps

from snugvl.checkpoint.locate import locate
from snugvl.cli import running, session
from snugvl.server.settings import ServerSettings
from snugvl.tasks.training import looks_like_a_photograph
from tests.cli.conftest import NOTE
from tests.client.conftest import ScriptedEngine, engine  # noqa: F401
from tests.command import Ran
from tests.photographs import photograph
from tests.server.live import live

Run = Callable[..., Ran]
EXAMPLES = Path(__file__).parents[2] / "examples" / "images"
NO_MODEL = session.load_model  # before a fixture replaces it: the real one, which connects to servers


@pytest.fixture
def snugvl(snugvl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line, with no server of anybody else's; what it connects to is no fake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SNUGVL_SERVER", "SNUGVL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return snugvl


@pytest.mark.parametrize("quality", [None, 50])
@pytest.mark.parametrize("name", ["garden", "shapes", "sign", "stars", "tower"])
def test_drawings_are_no_photographs(name: str, quality: int | None, tmp_path: Path) -> None:
    picture = Image.open(EXAMPLES / f"{name}.png").convert("RGB")
    if quality is not None:
        picture.save(tmp_path / "a.jpg", quality=quality)
        picture = Image.open(tmp_path / "a.jpg").convert("RGB")
    assert not looks_like_a_photograph(picture)


@pytest.mark.parametrize("size", [(400, 300), (64, 64), (3000, 2000)])
def test_photographs_are(size: tuple[int, int]) -> None:
    picture = photograph(*size)
    assert looks_like_a_photograph(picture)
    grey = ImageOps.equalize(picture.convert("L"))  # a print of good contrast
    assert looks_like_a_photograph(grey.convert("RGB"))


def test_pocket_refuses_a_photograph_and_names_what_to_pull(snugvl: Run, tmp_path: Path) -> None:
    file = tmp_path / "tree.jpg"
    photograph().save(file)
    ran = snugvl("caption", file)
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert ran.err.startswith(f"snugvl: {file} looks like a photograph. Pocket, the built-in model, can't")
    assert "snugvl pull " in ran.err or "snugvl plan" in ran.err
    assert snugvl("caption", file, "-m", "another/model").code == 0


def test_a_copy_of_pocket_refuses_it_too(snugvl: Run, tmp_path: Path) -> None:
    file, copy = tmp_path / "tree.jpg", tmp_path / "copy"
    photograph().save(file)
    copytree(locate("pocket"), copy)
    ran = snugvl("caption", file, "-m", copy)
    assert ran.code == 3
    assert "looks like a photograph" in ran.err


def test_of_several_the_photographs_are_refused(snugvl: Run, tmp_path: Path, pictures: Path) -> None:
    photograph().save(tmp_path / "tree.jpg")
    ran = snugvl("caption", pictures / "a.png", tmp_path / "tree.jpg", "--json")
    first, second = map(json.loads, ran.out.splitlines())
    assert (ran.code, "result" in first, second["error"]["type"]) == (7, True, "ImageError")
    assert ran.err.startswith(NOTE)


def test_a_server_of_ours_that_runs_answers(
    snugvl: Run, engine: ScriptedEngine, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load_model", NO_MODEL)
    engine.capabilities = replace(engine.backend.described, model="Qwen/eyes")
    with live(engine, ServerSettings(names=("eyes",))) as base:
        with running.announced(base, "Qwen/eyes", ("eyes",)):
            ran = snugvl("caption", pictures / "a.png")
            assert (ran.code, ran.out) == (0, "A picture of 10x50.\n")
            assert f"eyes answers, which runs at {base}" in ran.err
            assert snugvl("detect", pictures / "a.png", "--quiet").err == ""
            assert len(engine.backend.requests) == 2
            # What is said of loading is for a model that is loaded here.
            assert "runs at" not in snugvl("caption", pictures / "a.png", "--memory", "1KiB").err
        assert running.running() == []
    assert len(engine.backend.requests) == 2


def test_a_server_with_a_key_answers_who_has_it(
    snugvl: Run, engine: ScriptedEngine, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(names=("eyes",), api_keys=("secret",))
    with live(engine, settings) as base, running.announced(base, "Qwen/eyes", ("eyes",)):
        ran = snugvl("caption", pictures / "a.png")
        passed = f"snugvl: {base} (snugvl serve, process {os.getpid()}) is passed over: it"
        assert ran.err == f"{passed} wants an API key (--api-key KEY or SNUGVL_API_KEY)\n{NOTE}"
        ran = snugvl("caption", pictures / "a.png", "--api-key", "guess")
        assert ran.err == f"{passed} refuses this API key\n{NOTE}"
        for words, said in (
            ((), "wants an API key (--api-key KEY or SNUGVL_API_KEY)"),
            (("--api-key", "guess"), "refuses this API key"),
            (("--api-key", "secret"), "ready"),
        ):
            assert snugvl("ps", *words).out.startswith(f"{base}  {said}\n")
        monkeypatch.setattr(session, "load_model", NO_MODEL)
        assert f"runs at {base}" in snugvl("caption", pictures / "a.png", "--api-key", "secret").err


@pytest.mark.parametrize("command", [("caption", "a.png"), ("chat", "a.png"), ("top", "--once"), ("bench",)])
def test_a_key_that_is_missing_or_wrong_is_told_alike(
    snugvl: Run,
    engine: ScriptedEngine,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(pictures)
    monkeypatch.setattr(session, "load_model", NO_MODEL)
    with live(engine, ServerSettings(names=("eyes",), api_keys=("secret",))) as base:
        ran = snugvl(*command, "--server", base)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.endswith(f"{base} wants an API key; say it with --api-key KEY or SNUGVL_API_KEY\n")
        ran = snugvl(*command, "--server", base, "--api-key", "guess")
        assert "the API key is wrong; say it with --api-key KEY or SNUGVL_API_KEY" in ran.err


def test_top_finds_the_server_that_runs(
    snugvl: Run, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(engine, ServerSettings(names=("eyes",))) as base:
        with running.announced(base, "Qwen/eyes", ("eyes",)):
            assert snugvl("top", "--once").out.startswith(f"snugvl top  {base}  ready")
            ran = snugvl("top", "--once", "--server", "127.0.0.1:9")
            assert "no server answers at http://127.0.0.1:9" in ran.err
            assert ran.err.endswith(f"; one of yours runs at {base}\n")
        monkeypatch.setattr("snugvl.cli.top.DEFAULT_SERVER", "http://127.0.0.1:9")
        assert "no server answers at http://127.0.0.1:9" in snugvl("top", "--once").err


def test_an_address_needs_no_scheme(snugvl: Run, engine: ScriptedEngine, pictures: Path) -> None:
    from snugvl import Client

    with live(engine, ServerSettings(names=("eyes",))) as base:
        bare = base.removeprefix("http://")
        with Client(bare) as client:
            assert client.models() == ("eyes",)
        for address in (bare, bare.removeprefix("127.0.0.1"), f"{bare}/v1", base):
            assert snugvl("top", "--once", "--server", address).out.startswith(f"snugvl top  {base}")
    ran = snugvl("caption", pictures / "a.png", "--server", "nonsense")
    assert (ran.code, "give one such as http://127.0.0.1:8000" in ran.err) == (2, True)


def test_a_server_that_cannot_do_the_task_is_passed_over_with_the_reason(
    snugvl: Run, engine: ScriptedEngine, pictures: Path
) -> None:
    engine.capabilities = replace(engine.backend.described, images=False)
    settings = ServerSettings(names=("words",))
    with live(engine, settings) as base, running.announced(base, "words", ("words",)):
        ran = snugvl("caption", pictures / "a.png")
        assert "is passed over: it has a model that can't caption\n" in ran.err


def test_a_clock_that_is_set_and_processes_that_cant_be_seen_end_no_server(
    snugvl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process' start is counted from the system's, which moves with its clock, as WSL2's does."""

    def unseen(_: psutil.Process) -> NoReturn:
        raise psutil.NoSuchProcess(1)

    with running.announced("http://127.0.0.1:9", "m", ("m",)):
        created = psutil.Process().create_time()
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: created + 3600)
        assert [server.url for server in running.running()] == ["http://127.0.0.1:9"]
        monkeypatch.setattr(psutil.Process, "create_time", unseen)
        assert [server.url for server in running.running()] == ["http://127.0.0.1:9"]
        (record,) = running.folder().iterdir()
        kept = record.read_text()
    assert running.running() == []
    record.write_text(kept)  # as after a crash
    assert running.running() == []
    assert not record.exists()


@pytest.mark.parametrize(
    "changed", [{"pid": 2**22 + 1}, {"created": 5.0}, {"host": "elsewhere"}, {"names": 7}, {"pid": "x"}]
)
def test_records_of_others_are_no_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, object]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with running.announced("http://127.0.0.1:9", "m", ("m",)):
        (file,) = running.folder().iterdir()
        assert [server.pid for server in running.running()] == [os.getpid()]
        assert psutil.pid_exists(running.running()[0].pid)
        kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | changed))
    assert running.running() == []
    assert file.exists() == (changed == {"host": "elsewhere"})


def test_a_server_that_says_nothing_is_passed_over(
    snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(running, "AT_ONCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running.announced(url, "m", ("m",)):
            passed = f"{url} (snugvl serve, process {os.getpid()}) is passed over: it doesn't answer"
            ran = snugvl("caption", pictures / "a.png")
            assert ran == Ran(0, "A picture of 10x50.\n", f"snugvl: {passed}\n{NOTE}")


def test_else_the_best_that_is_downloaded(
    snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snugvl.checkpoint.catalogue import catalogue_facts
    from snugvl.checkpoint.read import facts_of
    from tests.planner.machines import GIB, machine

    name = "Qwen/Qwen3-VL-2B-Instruct"
    monkeypatch.setattr("snugvl.checkpoint.locate.locate", lambda model: _here(model, name))
    monkeypatch.setattr(
        "snugvl.checkpoint.read.facts_of",
        lambda model, **rest: catalogue_facts(name) if model == name else facts_of(model, **rest),
    )
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: machine(16 * GIB))
    assert snugvl("caption", pictures / "a.png").err == (
        f"snugvl: {name} answers: it is the best that is downloaded and fits\n"
    )
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: machine(GIB))
    assert snugvl("caption", pictures / "a.png").err == NOTE
    monkeypatch.setenv("SNUGVL_MODEL", "another/model")
    assert snugvl("caption", pictures / "a.png").err == ""


def _here(model: str, name: str) -> Path:
    from snugvl.errors import CheckpointNotFound

    if model not in (name, "pocket"):
        raise CheckpointNotFound(model)
    return Path(__file__).parents[2] / "src/snugvl/pocket"


def test_the_servers_refusals_name_the_picture_once_and_its_warnings_are_lines(
    snugvl: Run, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load_model", NO_MODEL)
    (tmp_path / "a.png").write_text("text")
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "b.gif", save_all=True, append_images=frames[1:])
    with live(engine, ServerSettings(names=("eyes",))) as base:
        at = ("--server", base, "-m", "eyes", "--quiet")
        ran = snugvl("caption", tmp_path / "a.png", *at)
        assert (ran.code, ran.out) == (3, "")
        file = tmp_path / "a.png"
        assert ran.err.startswith(f"snugvl: {file} is not a picture that can be read: it looks like text")
        ran = snugvl("caption", tmp_path / "b.gif", *at)
        assert ran.code == 0
        told = (
            "is animated (2 frames): only its first frame was looked at. For another, save it as a file "
            "of its own, or show all as a video to a model that reads videos"
        )
        assert ran.err == f"snugvl: {tmp_path / 'b.gif'} {told}\n"

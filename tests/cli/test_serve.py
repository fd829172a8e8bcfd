# ruff: noqa: F811 (fixtures)
"""`snugvl serve`: what it refuses before it loads anything, what it prints, what it serves."""

import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.backends.process.supervised import SupervisedEngine
from snugvl.checkpoint.locate import near
from snugvl.cli.app import run
from snugvl.cli.serve_show import LoadingProgress, ask_line, base_url, chat_line, curl_line
from snugvl.core.folders import hub_cache
from snugvl.core.service import Health
from snugvl.core.wrapping import wrapped_command
from snugvl.errors import CheckpointError
from snugvl.server.settings import ServerSettings
from tests.cli.conftest import Served
from tests.patience import PATIENCE_S
from tests.server.conftest import pocket, url  # noqa: F401
from tests.server.fake import FakeService

MIB = 1024 * 1024


pytestmark = pytest.mark.usefixtures("served")


def serve(*words: str) -> int:
    return run(["serve", "--port", "0", *words])


def test_the_plan_and_the_banner(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("pocket") == 0
    out, err = capsys.readouterr()
    port = served.settings[0].port
    assert out.startswith("pocket fits host memory")
    assert "KV cache" in out
    assert "Model    pocket\n" in out
    assert "Engine   native" in out
    assert "4,096 tokens" in out
    assert f"http://127.0.0.1:{port}/v1 (OpenAI)" in out
    assert f"Page     http://127.0.0.1:{port}/\n" in out
    assert f"| curl http://127.0.0.1:{port}/v1/vision/ask" in out
    assert "only this machine" in out
    assert not err
    assert isinstance(served.services[0], SupervisedEngine)


def test_quiet_says_nothing(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert served.settings[0].names == ("pocket",)


def test_every_option_arrives(served: Served, tmp_path: Path) -> None:
    words = "--served-model-name a --served-model-name b --api-key k1 --api-key k2 --api-key k1 --deadline 5"
    words += " --drain 7 --max-body 3 --max-concurrent 9 --max-queue 4"
    words += " --allowed-media-domains a.org --allowed-media-domains B.org,c.org"
    words += " --key-requests-per-minute 11 --key-concurrent 2"
    words += (
        f" --allow-local-media {tmp_path} --allow-private-media --log-prompts --device cpu --dtype float32"
    )
    assert serve("pocket", *words.split(), "--dtype", "float32", "--context", "2048") == 0
    settings = served.settings[0]
    assert settings.names == ("a", "b")
    assert settings.api_keys == ("k1", "k2")
    assert (settings.deadline_s, settings.drain_s) == (5, 7)
    assert settings.max_body_bytes == 3 * MIB
    assert settings.max_concurrent == 9
    assert (settings.key_requests_per_minute, settings.key_concurrent) == (11, 2)
    assert settings.allow_local_media == tmp_path
    assert settings.allow_private_media
    assert settings.allowed_media_domains == ("a.org", "b.org", "c.org")
    assert settings.log_prompts
    choice = served.services[0]._start.choice
    assert (choice.model, choice.device, choice.dtype) == ("pocket", "cpu", "float32")
    assert (choice.context, choice.max_waiting) == (2048, 4)


def test_no_deadline(served: Served) -> None:
    assert serve("--deadline", "0") == 0
    assert served.settings[0].deadline_s is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "give an --api-key, or say --no-auth"),
        (["--host", "localhost:8142"], "write it like --host 127.0.0.1 --port 8000"),
        (["--host", "http://127.0.0.1"], "is more than a name or an address"),
        (["--no-auth", "--api-key", "k"], "give no API key with it"),
        (["--port", "65536"], "--port"),
        (["--max-concurrent", "0"], "--max-concurrent"),
        (["--allow-local-media", "/no/such/folder"], "is not a folder"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_usage(served: Served, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(*words) == 2
    assert said in capsys.readouterr().err
    assert not served.settings


@pytest.mark.parametrize("words", [["--no-auth"], ["--api-key", "k"]])
def test_a_wider_address_by_choice(served: Served, words: list[str]) -> None:
    assert serve("--host", "0.0.0.0", *words) == 0
    assert served.settings[0].host == "0.0.0.0"


def test_keys_of_the_environment_and_of_a_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNUGVL_API_KEY", "from-the-environment")
    file = tmp_path / "keys"
    file.write_text("# ours\n\nhidden-one \n  hidden-two\n")
    file.chmod(0o600)
    assert serve("--api-key-file", str(file)) == 0
    assert served.settings[0].api_keys == ("from-the-environment", "hidden-one", "hidden-two")
    out, err = capsys.readouterr()
    assert "chmod" not in err
    assert "hidden" not in out + err
    file.chmod(0o644)
    assert serve("--api-key-file", str(file)) == 0
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words\n", "schlüssel\n"])
def test_a_key_file_without_a_good_key(
    served: Served, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    assert serve("--api-key-file", str(file)) == 3
    assert "key" in capsys.readouterr().err
    assert serve("--api-key-file", str(tmp_path / "none")) == 3
    assert not served.settings


def test_a_port_that_is_taken_is_known_before_anything_else(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["serve", "no/such-model", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert f"--port {port + 1}" in err
    assert not out


def test_a_model_that_is_not_here(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("Qwen/Qwen3-VL-2B-Instruct") == 4
    assert "snugvl pull Qwen/Qwen3-VL-2B-Instruct" in capsys.readouterr().err
    assert not served.settings


def test_a_context_that_the_model_does_not_have(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("pocket", "--context", "999999") != 0
    assert "999,999" in capsys.readouterr().err
    assert not served.settings


def test_without_a_model_and_without_a_better_one(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve() == 0
    assert "this is pocket" in capsys.readouterr().err
    assert served.settings[0].names == ("pocket",)


def test_without_a_model_the_best_that_is_downloaded(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from snugvl.checkpoint.catalogue import catalogue_facts
    from snugvl.checkpoint.read import facts_of
    from tests.planner.machines import GIB, machine

    name = "Qwen/Qwen3-VL-2B-Instruct"
    snapshot = hub_cache() / "models--Qwen--Qwen3-VL-2B-Instruct" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    facts = catalogue_facts(name)
    monkeypatch.setattr(
        "snugvl.checkpoint.read.facts_of",
        lambda model, **rest: facts if model == name else facts_of(model, **rest),
    )
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: machine(16 * GIB))
    assert serve() == 0
    assert f"{name} is the best that is downloaded" in capsys.readouterr().err
    assert served.settings[0].names == (name,)
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: machine(3 * GIB // 2))
    assert serve() == 0
    assert served.settings[1].names == ("pocket",)
    assert serve(name) == 5
    assert "2B" in capsys.readouterr().err


def test_a_folder_is_served_under_its_own_name(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pocket = near("pocket")
    assert pocket is not None
    link = tmp_path / "my-model"
    link.mkdir()
    for file in pocket.iterdir():
        (link / file.name).symlink_to(file)
    assert serve(str(link)) == 0
    assert served.settings[0].names == ("my-model",)
    assert served.services[0]._start.choice.model == str(link)


def test_the_exit_code_of_a_failed_load_is_the_engines(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.error = CheckpointError("model.safetensors is truncated")
    assert serve() == 4
    assert "truncated" in capsys.readouterr().err
    served.error, served.code = None, 130
    assert serve() == 130


def test_the_curl_line_survives_a_shell() -> None:
    settings = ServerSettings(names=("it's; rm -rf $HOME",), api_keys=("k",))
    words = shlex.split(chat_line("http://127.0.0.1:8000", settings))
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's; rm -rf $HOME"
    assert "Authorization: Bearer $SNUGVL_API_KEY" in words
    assert "Authorization: Bearer $SNUGVL_API_KEY" in shlex.split(
        curl_line("http://127.0.0.1:8000", settings)
    )


@pytest.mark.parametrize("line", [ask_line, lambda base: curl_line(base, ServerSettings())])
def test_the_first_request_works_as_printed_and_pockets_answer_is_right(
    url: str, line: Callable[[str], str], tmp_path: Path
) -> None:
    program = tmp_path / "snugvl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m snugvl "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["/bin/sh", "-c", line(url)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"\b(2|two)\b", ran.stdout, re.IGNORECASE), ran.stdout


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_printed(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snugvl.cli.serve_plan.find_spec", lambda name: None)
    assert serve("pocket", "--backend", "transformers") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "needs transformers and accelerate" in err
    assert "pip install 'snugvl[transformers]'" in err
    assert not served.settings


def test_the_engines_process_is_begun_before_the_plan_and_never_left_alone(served: Served) -> None:
    assert serve("pocket", "--device", "cpu") == 0
    assert served.services[0]._launched is served.processes[0]
    assert serve("nobody/nothing") == 4  # the plan says no
    assert [process.ended for process in served.processes] == [True, True]


def test_no_process_of_ours_is_begun_for_vllm(served: Served) -> None:
    serve("pocket", "--backend", "vllm")
    serve("pocket", "--attach", "http://127.0.0.1:1")
    assert served.processes == []


def test_addresses() -> None:
    assert base_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert base_url("::", 2) == base_url("::1", 2) == "http://[::1]:2"
    assert base_url("box.lan", 3) == "http://box.lan:3"


def test_loading_is_told_once_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    tell = LoadingProgress(FakeService(), quiet=False, started=0.0)
    for detail in ("loading (1 of 3)", "loading (2 of 3)", "warming up"):
        tell(Health("starting", detail, progress=0.5))
    tell(Health("ready", "pocket is ready"))
    for stage in ("", " (reading headers)", " (loading weights)"):
        tell(Health("restarting", f"the engine died; it is starting again{stage}"))
    tell(Health("ready", "pocket is ready"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["snugvl: loading", "snugvl: warming up"]
    assert lines[2].startswith("snugvl: ready in ")
    assert "512 tokens of context, images up to 65,536 pixels" in lines[2]
    assert lines[3:] == ["snugvl: the engine died; it is starting again", "snugvl: ready again"]


@pytest.mark.slow
def test_the_process_does_it_all() -> None:
    command = [sys.executable, "-m", "snugvl", "serve", "pocket", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            curl = next(line for line in process.stdout if line.startswith("curl "))
            assert any("ready in" in line for line in process.stderr)
            ran = subprocess.run(["/bin/sh", "-c", curl], capture_output=True, timeout=PATIENCE_S, check=True)
            assert re.search(r"\b(2|two)\b", json.loads(ran.stdout)["text"], re.IGNORECASE)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_failed_start_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's own last line has it."""
    tell = LoadingProgress(FakeService(), quiet=False, started=0.0)
    tell(Health("starting", "loading", progress=0.5))
    tell(Health("failed", "out of memory"))
    assert capsys.readouterr().err == "snugvl: loading\n"
    tell(Health("ready", "pocket is ready"))
    tell(Health("failed", "it died for good"))
    assert "it died for good" in capsys.readouterr().err


def test_loading_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    tell = LoadingProgress(FakeService(), quiet=False, started=0.0)
    tell(Health("starting", "[b]loading[/b] \x1b[31m", progress=0.5))
    assert tell._bar is not None
    task = tell._bar[0].tasks[0]
    assert (task.description, task.completed) == ("[b]loading[/b] [31m", 0.5)
    tell(Health("ready", "pocket is ready"))
    assert tell._bar is None
    assert "ready in" in capsys.readouterr().err


def test_a_cache_in_fp8_is_told_when_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    assert service.capabilities is not None
    service.capabilities = replace(service.capabilities, weights="int4", kv_cache="fp8")
    LoadingProgress(service, quiet=False, started=0.0)(Health("ready", "ready"))
    assert " in int4 with an FP8 KV cache: 512 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("", "INFO"),
        ("--quiet", "WARNING"),
        ("--log-level debug", "DEBUG"),
        ("--quiet --log-level error", "ERROR"),
    ],
)
def test_the_level_of_the_log(served: Served, words: str, level: str) -> None:
    assert serve("pocket", *words.split()) == 0
    assert logging.getLevelName(logging.getLogger("snugvl").level) == level


def test_what_is_printed_fits_sixty_columns(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is cut: without its line breaks it says what a pipe gets, but for the shorter bar."""
    assert serve("pocket") == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert serve("pocket") == 0
    narrow = capsys.readouterr().out
    for line in narrow.splitlines():
        word = line.strip().removesuffix("\\").strip()
        assert len(line) <= 60 or len(shlex.split(word)) == 1, line  # the path of the sample can't be broken

    def words(text: str) -> list[str]:
        """Without the bars, and without sizes and ports, which are others in the second run."""
        text = re.sub(r"\[[^\] ]+\]", "[]", text.replace(" \\\n", " "))
        return re.sub(r"[\d.,]+( [KMG]iB)?", "0", " ".join(text.split())).split()

    assert words(narrow) == words(piped)
    assert len(re.findall(r"\\\n", narrow)) >= 2


@pytest.mark.parametrize("line", [ask_line, lambda base: curl_line(base, ServerSettings(api_keys=("a",)))])
def test_a_folded_command_is_the_same_to_a_shell(
    line: Callable[[str], str],
) -> None:
    command = line("http://127.0.0.1:8000")
    folded = wrapped_command(command, 60)
    assert "\n" in folded
    assert shlex.split(folded.replace("\\\n", "")) == shlex.split(command)


def test_a_port_of_ones_own_server_is_told_as_that(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from snugvl.cli import running

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        words = ["serve", "pocket", "--port", str(port), "--quiet"]
        assert run(words) == 1
        assert f"another program listens on 127.0.0.1:{port}; stop it, or" in capsys.readouterr().err
        with running.announced(f"http://127.0.0.1:{port}", "Qwen/eyes", ("eyes",)):
            assert run(words) == 1
        assert capsys.readouterr().err == (
            f"snugvl: your own server listens at http://127.0.0.1:{port} already (process {os.getpid()}, "
            f"with eyes): use that one, stop it, or choose another port, such as --port {port + 1} "
            "(--port 0 takes any free one)\n"
        )


def test_a_model_that_serve_chose_itself_is_written_down(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from snugvl.cli import running

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    monkeypatch.setattr("snugvl.server.run.run", lambda *rest: found.extend(running.running()) or 0)
    assert run(["serve", "--port", "0", "--quiet"]) == 0
    assert [server.model for server in found] == ["pocket"]


@pytest.mark.parametrize("name", ["", "  ", "a\nb"])
def test_a_name_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a name is listed as "", and asked for by nobody."""
    assert serve("pocket", "--served-model-name", name) == 2
    assert "is not a name; give one such as my-model" in capsys.readouterr().err


def test_a_name_said_twice_is_one(served: Served) -> None:
    assert (
        serve(
            "--quiet", *["--served-model-name", "a", "--served-model-name", "a", "--served-model-name", "b"]
        )
        == 0
    )
    assert served.settings[0].names == ("a", "b")

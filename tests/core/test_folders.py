"""Folders of a user, and what findings in the cache folder hold for."""

import gc
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

import snugvl
from snugvl.cli import entry
from snugvl.core.folders import (
    cache_folder,
    config_folder,
    expanded,
    give_home,
    hub_cache,
    json_object,
    moved,
    sources_digest,
)
from snugvl.errors import CheckpointNotFound


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that no list knows, without HOME: some containers and services start us so."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("HOME", "")  # so that it is put back
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


def test_tilde_is_a_home_folder_and_stays_where_nobody_has_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert expanded("~/a") == Path("/somewhere/a")
    assert expanded("~nosuch/a") == Path("~nosuch/a")
    assert expanded("a/~/b") == Path("a/~/b")


@pytest.mark.parametrize("named", ["", "caches", "./caches", "../caches", "."])
def test_relative_folders_of_xdg_are_ignored(named: str) -> None:
    """Its specification asks for that: each current folder would have caches and a config file of its own."""
    environ = {"XDG_CACHE_HOME": named, "XDG_CONFIG_HOME": named}
    assert cache_folder(environ) == expanded("~/.cache/snugvl")
    assert config_folder(environ) == expanded("~/.config/snugvl")
    environ = {"XDG_CACHE_HOME": "/caches", "XDG_CONFIG_HOME": "~/config"}
    assert (cache_folder(environ), config_folder(environ)) == (
        Path("/caches/snugvl"),
        expanded("~/config/snugvl"),
    )


def test_a_home_folder_may_be_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "here")
    assert cache_folder({}) == Path("here/.cache/snugvl")


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder_has_the_root() -> None:
    assert hub_cache() == Path("/.cache/huggingface/hub")
    assert expanded("~") == Path("/")
    give_home()
    assert os.environ["HOME"] == "/"


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("words", ["plan --gpu rtx-5060", "ps", "config path"])
def test_commands_need_no_home_folder(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["snugvl", *words.split()])
    monkeypatch.setattr(gc, "disable", lambda: None)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0, capsys.readouterr().err
    assert os.environ["HOME"] == "/", "libraries look for it"


@pytest.mark.usefixtures("homeless")
def test_a_loaded_model_needs_no_home_folder() -> None:
    with pytest.raises(CheckpointNotFound):
        snugvl.load("/no/such/model")
    assert os.environ["HOME"] == "/"


def test_sources_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asks twice, and waits for it."""
    first = sources_digest("core", "tasks")
    assert first == sources_digest.__wrapped__("core", "tasks")
    assert first != sources_digest("layers")
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("they are read again"))
    assert sources_digest("core", "tasks") == first


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"a"', "null", "[" * 100_000, '{"a":' * 100_000, b'{"a": "\xff"}']
)
def test_what_is_no_json_object_is_none_however_it_is_broken(text: str | bytes) -> None:
    assert json_object(text) is None
    assert json_object(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    ("words", "file", "variable"),
    [
        ("config set port 9", ".config", "XDG_CONFIG_HOME"),
        ("config set port 9", ".config/snugvl", "XDG_CONFIG_HOME"),
        ("pull Qwen/Qwen3-VL-2B-Instruct", ".cache", "HF_HOME"),
        ("pull Qwen/Qwen3-VL-2B-Instruct", ".cache/huggingface", "HF_HOME"),
    ],
)
def test_a_file_in_place_of_a_folder_is_told_with_what_moves_the_folder(
    words: str, file: str, variable: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("a file")
    moving = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE")
    environ = {name: value for name, value in os.environ.items() if name not in moving}
    ran = subprocess.run(
        [sys.executable, "-m", "snugvl", *words.split()],
        env={**environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert f"a folder that you may read and write, or set {variable} to another one" in ran.stderr, ran.stderr


def test_only_what_a_variable_moves_is_told_so(tmp_path: Path) -> None:
    assert moved(PermissionError(13, "Permission denied", str(tmp_path / "x"))) == ""
    assert moved(PermissionError(13, "Permission denied")) == ""
    assert moved(FileNotFoundError(2, "No such file", str(hub_cache() / "x"))) == ""
    assert "set HF_HOME" in moved(PermissionError(13, "Permission denied", str(hub_cache() / "x")))

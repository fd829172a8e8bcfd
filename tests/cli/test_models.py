"""`snugvl list`, `rm` and `ps`: what is on this machine, and that nothing else is ever removed."""

import json
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

import snugvl as snugvl_package
from snugvl.cli import running
from snugvl.core.folders import hub_cache
from tests.checkpoint.gguf_samples import model, tower
from tests.command import Ran

Run = Callable[..., Ran]
NAME = "owner/eyes"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # LM Studio's models are below it
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


def put(name: str, revisions: dict[str, dict[str, str]], refs: dict[str, str]) -> Path:
    """A model of the cache: file names and the blobs they show, by commit."""
    folder = hub_cache() / ("models--" + name.replace("/", "--"))
    (folder / "blobs").mkdir(parents=True)
    for commit, files in revisions.items():
        (folder / "snapshots" / commit).mkdir(parents=True)
        for file, blob in files.items():
            (folder / "blobs" / blob).write_text(blob * 10)
            (folder / "snapshots" / commit / file).symlink_to(Path("..", "..", "blobs", blob))
    (folder / "refs").mkdir()
    for ref, commit in refs.items():
        (folder / "refs" / ref).write_text(commit)
    return folder


def test_list_shows_what_is_here_and_whether_it_fits(snugvl: Run, tiny: Path) -> None:
    folder = hub_cache() / "models--owner--tiny"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "snapshots" / "c1").symlink_to(tiny)  # what other programs make is read, but not followed
    put("owner/half", {"c1": {"config.json": "a"}}, {"main": "c1"})
    ran = snugvl("list", "--json")
    rows = {row["model"]: row for row in json.loads(ran.out)}
    assert list(rows) == ["owner/half", "owner/tiny", "pocket"]
    assert (rows["pocket"]["fits"], rows["pocket"]["format"]) == (True, "bf16")
    half = rows["owner/half"]
    assert (half["fits"], half["bytes"]) == (None, 10)
    assert "snugvl pull owner/half" in half["why"]
    text = snugvl("list").out
    assert text.splitlines()[0].split() == ["model", "size", "format", "fits", "now"]
    assert "incomplete" in text


def test_list_shows_ggufs_of_the_hub_and_of_other_programs(snugvl: Run, tmp_path: Path) -> None:
    folder = hub_cache() / "models--owner--Eyes-GGUF" / "snapshots" / "c1"
    model(folder / "eyes-Q8_0.gguf")
    tower(folder / "mmproj-F16.gguf")
    split = model(tmp_path / "home/.lmstudio/models/owner/repo/m-Q4_0-00001-of-00002.gguf")
    rows = {row["model"]: row for row in json.loads(snugvl("list", "--json").out)}
    assert list(rows) == ["owner/Eyes-GGUF:Q8_0", str(split), "pocket"]
    mine = rows["owner/Eyes-GGUF:Q8_0"]
    assert (mine["format"], mine["fits"], mine["folder"]) == ("Q8_0", True, str(folder / "eyes-Q8_0.gguf"))
    assert mine["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert "lacks m-Q4_0-00002-of-00002.gguf" in rows[str(split)]["why"]


def test_list_reads_a_model_that_is_complete(snugvl: Run) -> None:
    folder = put("owner/tiny", {"c1": {}}, {"main": "c1"})
    for path in (Path(snugvl_package.__file__).parent / "pocket").iterdir():
        (folder / "snapshots" / "c1" / path.name).symlink_to(path)
    (row, pocket) = json.loads(snugvl("list", "--json").out)
    assert row["folder"] == str(folder / "snapshots" / "c1")
    assert (row["format"], row["fits"], row["why"]) == (pocket["format"], True, None)


def test_rm_removes_one_revision_and_nothing_of_others(snugvl: Run) -> None:
    files = {"c1": {"a": "one", "b": "both"}, "c2": {"a": "two", "b": "both"}}
    folder = put(NAME, files, {"main": "c1", "v2": "c2"})
    (folder / "blobs" / "one").write_bytes(bytes(3 * 2**20))
    said = "owner/eyes is removed, which frees 3 MiB; 1 other revision of it stays (--all removes every one)"
    assert snugvl("rm", NAME, "--yes") == Ran(0, "", f"snugvl: {said}\n")
    assert sorted(path.name for path in (folder / "blobs").iterdir()) == ["both", "two"]
    assert [path.name for path in (folder / "refs").iterdir()] == ["v2"]
    assert (folder / "snapshots" / "c2" / "b").read_text() == "both" * 10
    assert snugvl("rm", NAME, "--all", "--yes").code == 0
    assert not folder.exists()


def test_rm_leaves_what_another_model_shows(snugvl: Run) -> None:
    folder = put(NAME, {"c1": {"a": "mine", "b": "shared"}}, {"main": "c1"})
    other = put("other/model", {"c9": {}}, {"main": "c9"})
    (other / "snapshots" / "c9" / "w").symlink_to(folder / "blobs" / "shared")
    assert snugvl("rm", NAME, "--all", "--yes").code == 0
    assert (other / "snapshots" / "c9" / "w").read_text() == "shared" * 10
    assert not (folder / "blobs" / "mine").exists()


def share(folder: Path, name: str, content: str) -> Path:
    """A content in the store that models share, as huggingface_hub lays it out, with a link from one."""
    digest, store = sha256(content.encode()).hexdigest(), hub_cache() / "blobs"
    kept = store / digest[:2] / digest
    kept.parent.mkdir(parents=True, exist_ok=True)
    (store / ".huggingface-shared-blobs").write_text("1\n")
    kept.write_text(content)
    link = folder / "blobs" / name
    with kept.with_name(f"{digest}.refs").open("a") as manifest:
        manifest.write(f"{link.relative_to(hub_cache())}\n")
    link.unlink(missing_ok=True)
    link.symlink_to(Path("..", "..", "blobs", digest[:2], digest))
    return kept


def test_what_models_share_counts_for_each_and_goes_with_the_last(snugvl: Run) -> None:
    """huggingface_hub 2 keeps large files beside all models, and links to them."""
    folder = put(NAME, {"c1": {"a": "mine", "b": "big"}}, {"main": "c1"})
    other = put("other/model", {"c9": {"w": "large"}}, {"main": "c9"})
    content = "x" * (3 << 20)
    kept = share(folder, "big", content)
    assert share(other, "large", content) == kept
    rows = {row["model"]: row["bytes"] for row in json.loads(snugvl("list", "--json").out)}
    assert rows["other/model"] == len(content)
    assert rows[NAME] == len(content) + len("mine" * 10)
    assert "which frees 0 KiB" in snugvl("rm", NAME, "--yes").err
    assert not folder.exists()
    assert (other / "snapshots" / "c9" / "w").read_text() == content
    assert "which frees 3 MiB" in snugvl("rm", "other/model", "--yes").err
    assert not kept.exists()


def test_what_cannot_be_removed_is_named(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(NAME, {"c1": {"a": "one"}}, {"main": "c1"})

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    ran = snugvl("rm", NAME, "--yes")
    assert ran.code == 1
    assert ran.err.startswith(f"snugvl: {folder}: Permission denied; make ")


def test_rm_follows_no_link_out_of_the_cache(snugvl: Run, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("x")
    folder = put(NAME, {"c1": {"a": "one"}}, {"main": "c1"})
    (folder / "snapshots" / "c1" / "out").symlink_to(treasure)
    (folder / "blobs" / "out").symlink_to(treasure / "file")
    (folder / "refs" / "out").symlink_to(treasure / "file")
    assert snugvl("rm", NAME, "--all", "--yes").code == 0
    assert (treasure / "file").read_text() == "x"
    linked = hub_cache() / "models--owner--linked"
    linked.symlink_to(treasure)
    ran = snugvl("rm", "owner/linked", "--all", "--yes")
    assert (ran.code, "a link to another folder" in ran.err) == (3, True)
    assert (treasure / "file").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pocket"], 3, "is built in"),
        (["../../etc"], 3, "is not the name of a downloaded model"),
        (["/etc"], 3, "is not the name of a downloaded model"),
        (["..", "--yes"], 3, "is not the name of a downloaded model"),
        (["owner/none", "--yes"], 4, "is not in the cache"),
        ([NAME, "--revision", "../..", "--yes"], 3, "is not a branch"),
        ([NAME, "--revision", "v9", "--yes"], 4, "has no revision 'v9'"),
        ([NAME, "--revision", "c1", "--all"], 2, "leave --revision out"),
        ([NAME], 2, "say --yes"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_rm_refuses(
    snugvl: Run, words: list[str], code: int, said: str, piped: Callable[[bytes], None]
) -> None:
    folder = put(NAME, {"c1": {"a": "one"}, "c2": {"a": "two"}}, {"main": "c1"})
    piped(b"y\n")
    ran = snugvl("rm", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert said in ran.err
    assert (folder / "snapshots" / "c1" / "a").exists()


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("n", False)])
def test_rm_asks(snugvl: Run, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool) -> None:
    folder = put(NAME, {"c1": {"a": "one"}}, {"main": "c1"})
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, err: answer == "y")
    ran = snugvl("rm", NAME)
    assert (ran.code, folder.exists()) == (0 if gone else 1, not gone)


def test_a_model_that_is_served_stays(snugvl: Run) -> None:
    folder = put(NAME, {"c1": {"a": "one"}}, {"main": "c1"})
    with running.announced("http://127.0.0.1:9", NAME, ("eyes",)):
        ran = snugvl("rm", NAME, "--yes")
    assert (ran.code, f"process {os.getpid()}" in ran.err) == (3, True)
    assert folder.exists()


def test_ps_without_a_server_and_with_one(snugvl: Run) -> None:
    assert snugvl("ps", "--json").out == "[]\n"
    assert "snugvl serve" in snugvl("ps").err
    with running.announced("http://127.0.0.1:9", NAME, ("eyes", "more")):
        (row,) = json.loads(snugvl("ps", "--json").out)
        assert (row["pid"], row["url"], row["model"]) == (os.getpid(), "http://127.0.0.1:9", NAME)
        assert row["state"] == "doesn't answer"
        assert row["memory_bytes"] > 2**20
        lines = snugvl("ps").out.splitlines()
        assert lines[0] == "http://127.0.0.1:9  doesn't answer"
        assert lines[2] == "  model   eyes, more"
        assert max(map(len, lines)) <= 60


def test_the_package_is_a_program() -> None:
    import subprocess

    ran = subprocess.run([sys.executable, "-m", "snugvl", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "snugvl")

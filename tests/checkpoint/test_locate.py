"""A model's name becomes a folder, or an error that says how to get it."""

from pathlib import Path

import pytest

from snugvl.checkpoint.locate import locate
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointNotFound


def test_pocket_is_inside_the_package() -> None:
    assert (locate("pocket") / "config.json").is_file()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    with pytest.raises(CheckpointNotFound, match=r"download of org/name is incomplete.*snugvl pull org/name"):
        locate("org/name")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()
    assert locate("org/name") == snapshot


def test_the_cache_is_where_huggingface_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    assert hub_cache() == Path("/a/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/b")
    assert hub_cache() == Path("/b/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert hub_cache() == Path("/c")


def test_a_hub_id_that_is_not_there_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="snugvl pull Qwen/Qwen3-VL-2B-Instruct-FP8"):
        locate("Qwen/Qwen3-VL-2B-Instruct-FP8")


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "./no/such/folder", "../no-such-folder"])
def test_nonsense_is_not_taken_for_a_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound, match="use 'pocket', a folder, or a Hub id"):
        locate(name)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointNotFound, match="give the folder"):
        locate(str(path))

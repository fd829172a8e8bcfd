"""A model's name becomes a folder, or an error that says how to get it."""

from pathlib import Path

import pytest

from snugvl.checkpoint.locate import locate
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
    assert locate("org/name") == snapshot


def test_a_hub_id_that_is_not_there_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="snugvl pull Qwen/Qwen3-VL-2B-Instruct-FP8"):
        locate("Qwen/Qwen3-VL-2B-Instruct-FP8")


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "./no/such/folder", "../x"])
def test_nonsense_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="use 'pocket', a folder, or a Hub id"):
        locate(name)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointNotFound, match="give the folder"):
        locate(str(path))

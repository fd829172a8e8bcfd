"""A model's name becomes a folder, or an error that says how to get it."""

import shutil
from pathlib import Path

import pytest

from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointError, CheckpointNotFound


def test_pocket_is_inside_the_package() -> None:
    assert (locate("pocket") / "config.json").is_file()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


def test_a_folder_that_is_no_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    """An adapter was to be downloaded again, and a folder around a checkpoint named otherwise."""
    pocket, outer = locate("pocket"), tmp_path / "outer"
    inner = shutil.copytree(pocket, outer / "snapshots/0123")
    shards = shutil.copytree(pocket, tmp_path / "shards")
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    mistral = shutil.copytree(pocket, tmp_path / "mistral")
    (mistral / "model.safetensors").rename(mistral / "consolidated.safetensors")
    called = shutil.copytree(pocket, tmp_path / "called")
    (called / "model.safetensors").rename(called / "weights.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-4B"}')
    (adapter / "adapter_model.safetensors").touch()
    whole = shutil.copytree(adapter, tmp_path / "adapter with config")
    shutil.copy(pocket / "config.json", whole)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder, words in {
        outer: f"has no config.json, but {inner} has; name that folder",
        shards: "but no model.safetensors.index.json, which says what is in which shard",
        mistral: "in Mistral's own form",
        called: "has weights.safetensors, but weights are read from model.safetensors",
        adapter: "is an adapter \\(LoRA\\) of 'Qwen/Qwen3-4B', not a whole model; merge it",
        whole: "is an adapter \\(LoRA\\) of 'Qwen/Qwen3-4B'",
        tmp_path / "link": "is a link to .*gone, which isn't there",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            facts_of(str(folder), offline=True)


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for ask in (locate, lambda name: facts_of(name, offline=True)):
        with pytest.raises(CheckpointNotFound, match=r"of org/name is incomplete.*snugvl pull org/name"):
            ask("org/name")
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

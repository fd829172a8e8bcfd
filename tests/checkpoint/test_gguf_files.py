"""Where GGUF files are found: folders, parts, the Hub and its cache, Ollama, LM Studio; never changed."""

import hashlib
import json
from pathlib import Path

import pytest

from snugvl.checkpoint.download import pull
from snugvl.checkpoint.gguf_files import gguf_files, lm_studio_models, ollama_models, repository
from snugvl.checkpoint.listing import first_of, projectors_of
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, CheckpointNotFound, UnsupportedModel
from tests.checkpoint.gguf_samples import TEXT, model, tower
from tests.checkpoint.hub_server import COMMIT, FakeHub

REPO = "owner/Model-GGUF"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("owner/name:Q8_0", ("owner/name", "Q8_0")),
        ("hf:owner/name:UD-Q4_K_XL", ("owner/name", "UD-Q4_K_XL")),
        ("hf:owner/name", ("owner/name", "Q4_K_M")),
        ("owner/name", None),
        ("name:Q8_0", None),
        ("../x:Q8_0", None),
    ],
)
def test_names_of_a_quantisation(name: str, found: tuple[str, str] | None) -> None:
    assert repository(name) == found


def test_a_quantisation_is_a_word_of_a_name() -> None:
    names = [
        "m-BF16.gguf",
        "m-F16.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "mmproj-F16.gguf",
        "sub/m-Q8_0.gguf",
    ]
    assert first_of(names, "f16", "x") == "m-F16.gguf"
    assert first_of(names, "Q8_0", "x") == "sub/m-Q8_0.gguf"
    with pytest.raises(CheckpointNotFound, match="x has no Q4_K; it has BF16, F16, Q4_K_M, Q4_K_S, Q8_0"):
        first_of(names, "Q4_K", "x")


def test_the_tower_named_most_like_the_model_comes_first() -> None:
    names = ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-a-F16.gguf", "a-Q8_0.gguf", "mmproj-b-Q8_0.gguf"]
    assert projectors_of(names, "a-Q4_K_M.gguf")[0] == "mmproj-a-F16.gguf"
    assert projectors_of(names[:2], "a-Q4_K_M.gguf")[0] == "mmproj-BF16.gguf"


def test_a_folder_with_several_models_wants_a_name(tmp_path: Path) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        model(tmp_path / f"m-{quant}.gguf")
    with pytest.raises(
        CheckpointNotFound, match=r"several models \(m-Q4_K_M.gguf, m-Q8_0.gguf\); name one file: .*Q4_K_M"
    ):
        facts_of(str(tmp_path))
    assert facts_of(str(tmp_path / "m-Q8_0.gguf")).name.endswith("m-Q8_0.gguf")


def split(folder: Path, count: int = 2) -> list[Path]:
    """The model in two parts."""
    items = list(TEXT.items())
    parts = [dict(items[:1]), dict(items[1:])]
    names = [folder / f"m-Q8_0-{number:05}-of-{count:05}.gguf" for number in (1, 2)]
    return [model(path, tensors=held) for path, held in zip(names, parts, strict=True)]


def test_endings_in_capitals_are_found_in_folders_with_their_parts_and_towers(tmp_path: Path) -> None:
    """Once a folder of .GGUF files was a checkpoint without config.json."""
    for path in split(tmp_path):
        path.rename(path.with_suffix(".GGUF"))
    found = gguf_files(str(tmp_path))
    assert found is not None
    assert [path.name for path in found.parts] == [f"m-Q8_0-0000{n}-of-00002.GGUF" for n in (1, 2)]
    with pytest.raises(CheckpointNotFound, match=r"^there is no file '.*/nosuch\.GGUF'"):
        facts_of(str(tmp_path / "nosuch.GGUF"), offline=True)


def test_parts_make_one_model(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    facts = facts_of(str(tmp_path))
    assert {tensor.name for tensor in facts.tensors} == set(TEXT)
    assert facts.download_bytes == first.stat().st_size + second.stat().st_size
    assert facts_of(str(second)).tensors == facts.tensors, "any part names the model"
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-Q8_0-00002-of-00002.gguf \(1 of 2 parts\)"):
        facts_of(str(tmp_path))


def test_a_tensor_is_in_one_part(tmp_path: Path) -> None:
    for number in (1, 2):
        model(tmp_path / f"m-0000{number}-of-00002.gguf")
    with pytest.raises(CheckpointError, match="a tensor is in two of its files"):
        facts_of(str(tmp_path))


def test_a_part_may_not_be_of_another_model(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf", split__tensors__count=5)
    with pytest.raises(CheckpointError, match="has 3 tensors in 1 parts; its header names 5"):
        facts_of(str(path))


def test_planned_from_headers_on_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    split(folder)
    model(folder / "m-Q4_0.gguf")
    tower(folder / "mmproj-m-F16.gguf")
    with (folder / "m-Q4_0.gguf").open("ab") as file:
        file.write(bytes(6 << 20))  # weights, as it were
    hub.add(REPO, folder)
    facts = facts_of(f"{REPO}:Q8_0")
    assert (facts.source, facts.revision, facts.vision is not None) == ("hub", COMMIT, True)
    assert {tensor.name for tensor in facts.tensors} > set(TEXT)
    one = facts_of(f"hf:{REPO}:Q4_0")
    assert hub.bytes_of("m-Q4_0.gguf") < 2 << 20, "not the weights"
    assert one.download_bytes == sum(
        (folder / name).stat().st_size for name in ("m-Q4_0.gguf", "mmproj-m-F16.gguf")
    )
    asked = len(hub.seen)
    assert facts_of(f"{REPO}:Q8_0") == facts, "kept by commit and quantisation"
    assert len(hub.seen) == asked
    with pytest.raises(CheckpointNotFound, match="has no Q6_K; it has Q4_0, Q8_0"):
        facts_of(f"{REPO}:Q6_K")


def test_a_mirror_without_ranges_is_left(hub: FakeHub, tmp_path: Path) -> None:
    model(tmp_path / "repo" / "m-Q8_0.gguf")
    hub.add(REPO, tmp_path / "repo")
    hub.ignore_ranges = True
    with pytest.raises(CheckpointError, match="the server ignores range requests"):
        facts_of(f"{REPO}:Q8_0")


def test_one_quantisation_is_pulled_with_its_tower(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    split(folder)
    for name in ("m-Q4_0.gguf", "m-F16.gguf"):
        model(folder / name)
    tower(folder / "mmproj-m-F16.gguf")
    tower(folder / "mmproj-m-F32.gguf")
    hub.add(REPO, folder)
    with pytest.raises(UnsupportedModel, match=f"snugvl pull {REPO}:Q4_K_M"):
        pull(REPO)
    done = pull(f"{REPO}:Q8_0")
    assert {path.name for path in done.folder.iterdir()} == {
        "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-m-F16.gguf",
    }  # fmt: skip
    found = gguf_files(f"{REPO}:Q8_0")
    assert found is not None
    assert found.projector is not None
    assert locate(f"{REPO}:Q8_0") == found.parts[0]
    assert facts_of(f"{REPO}:Q8_0", offline=True).source == "file"
    with pytest.raises(CheckpointNotFound, match=f"snugvl pull {REPO}:Q6_K"):
        locate(f"{REPO}:Q6_K")


def ollama(root: Path, name: str, *paths: Path) -> None:
    """What Ollama has of a model: blobs under their hashes, and a manifest."""
    layers = []
    for path, kind in zip(paths, ("model", "projector"), strict=False):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        path.rename(root / "blobs" / f"sha256-{digest}")
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = root / "manifests" / "registry" / name
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))


def test_what_ollama_has_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    ollama(tmp_path, "library/qwen3-vl/2b", model(tmp_path / "a"), tower(tmp_path / "b"))
    ollama(tmp_path, "someone/text/latest", model(tmp_path / "c", block_count=1))
    assert list(ollama_models()) == ["ollama:qwen3-vl:2b", "ollama:someone/text:latest"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    facts = facts_of("ollama:qwen3-vl:2b")
    assert facts.vision is not None
    assert facts_of("ollama:someone/text").vision is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(CheckpointNotFound, match="Ollama has no other in"):
        facts_of("ollama:other")
    with pytest.raises(CheckpointNotFound, match="is not the name of a model"):
        facts_of("ollama:../../etc:x")
    for blob in (tmp_path / "blobs").iterdir():
        blob.unlink()
    with pytest.raises(CheckpointError, match="pull it again with ollama pull"):
        facts_of("ollama:qwen3-vl:2b")


@pytest.mark.parametrize("text", ["", "[]", '{"layers": [{"mediaType": "x"}]}', '{"layers": 3}'])
def test_a_broken_manifest_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    manifest = tmp_path / "manifests/registry/library/m/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match="is not a manifest of a model that is a GGUF"):
        facts_of("ollama:m")


def test_what_lm_studio_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = model(tmp_path / ".lmstudio/models/owner/repo/m-Q8_0.gguf")
    tower(path.with_name("mmproj-m-F16.gguf"))
    assert list(lm_studio_models()) == [str(path)]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty; download it again"),
        (b"<!DOCTYPE html>\n<html>", "is a web page, saved under the model's name"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"lmgg" + b"\0" * 40, "is in GGML, the format before GGUF"),
        (b"PK\x03\x04" + b"\0" * 40, "is not a GGUF file: it begins with b'PK"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(raw: bytes, words: str, tmp_path: Path) -> None:
    """It was once "a file; give the folder that holds config.json and the weights"."""
    path = tmp_path / "model-Q4_K_M.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        facts_of(str(path), offline=True)


def test_a_tower_of_another_width_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    path = model(tmp_path / "model-Q4_K_M.gguf")
    tower(tmp_path / "mmproj-model-f16.gguf", width=48)
    gguf = facts_of(str(path), offline=True).gguf
    assert gguf is not None
    assert gguf.unlike == (
        "mmproj-model-f16.gguf is left out, so the model sees no pictures: it gives 48 values a token of a "
        "picture, and "
        "the model takes 32."
    )
    tower(tmp_path / "mmproj-model-f32.gguf", width=32)
    gguf = facts_of(str(path), offline=True).gguf
    assert gguf is not None
    assert not gguf.unlike

"""Models that Ollama, LM Studio and llama.cpp have on the disk already: found, known again, recommended."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.checkpoint.catalogue import alike, catalogue_facts
from snugvl.checkpoint.gguf_files import gguf_files, ggufs_here, llamacpp_models
from snugvl.checkpoint.read import facts_of
from snugvl.cli.plan import _held
from snugvl.hardware.describe import describe
from snugvl.planner.plan import Plan
from snugvl.planner.recommend import catalogue_candidates, planned
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.wishes import Wishes
from tests.checkpoint.gguf_samples import model, tower
from tests.planner import random_plans

MIXTURE, SMALL = "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-2B"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Files of the exact shapes with holes for weights, and their mmproj, by model."""
    folder = tmp_path_factory.mktemp("files")
    paths = map(Path, random_plans.ggufs(folder, [MIXTURE, SMALL]))
    return {
        name: (path, path.with_name(f"mmproj-{path.name}"))
        for name, path in zip((MIXTURE, SMALL), paths, strict=True)
    }


def linked(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(file)
    return place


def in_ollama(home: Path, pair: tuple[Path, Path], name: str) -> str:
    layers = []
    for number, (file, kind) in enumerate(zip(pair, ("model", "projector"), strict=True)):
        digest = f"{number:064x}"
        linked(file, home / "ollama/blobs" / f"sha256-{digest}")
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = home / "ollama/manifests/registry.ollama.ai/library" / name
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    return f"ollama:{name.replace('/', ':')}"


def in_lm_studio(home: Path, pair: tuple[Path, Path], repo: str) -> str:
    folder = home / ".lmstudio/models" / repo
    linked(pair[1], folder / f"mmproj-{pair[0].name}")
    return str(linked(pair[0], folder / pair[0].name))


def in_llamacpp(home: Path, pair: tuple[Path, Path], repo: str) -> str:
    folder, stem = home / ".cache/llama.cpp", repo.replace("/", "_")
    linked(pair[1], folder / f"{stem}_mmproj-F16.gguf")
    return str(linked(pair[0], folder / f"{stem}_{pair[0].name}"))


def plan_here(gpu: str, **more: str) -> tuple[Plan, str]:
    machine = replace(describe(gpu, **more), source="probed")
    plan = planned(catalogue_candidates(), machine, Wishes(), _held())
    return plan, plain(report(plan, machine, pull=False))


@pytest.mark.parametrize("place", ["Ollama", "LM Studio", "llama.cpp"])
@pytest.mark.sample("Ollama")
def test_what_is_on_the_disk_is_recommended_where_nothing_is_better(
    home: Path, files: dict[str, tuple[Path, Path]], place: str
) -> None:
    """A 35B tag of Ollama's: 20 GiB of the same model as another file were to be downloaded."""
    put = {
        "Ollama": lambda: in_ollama(home, files[MIXTURE], "qwen3.5/35b"),
        "LM Studio": lambda: in_lm_studio(home, files[MIXTURE], "lmstudio-community/Qwen3.5-35B-A3B-GGUF"),
        "llama.cpp": lambda: in_llamacpp(home, files[MIXTURE], "ggml-org/Qwen3.5-35B-A3B-GGUF"),
    }[place]
    name = put()
    assert ggufs_here() == [name]
    plan, said = plan_here("rtx-3070", ram="32GiB")
    other = planned(catalogue_candidates(), describe("rtx-3070", ram="32GiB"), Wishes()).choice
    assert other is not None
    assert plan.choice is not None
    assert other.option.model.name.startswith("ggml-org/Qwen3.6-35B-A3B"), "ranks above it"
    assert plan.held is not None
    assert plan.held.option.model.name == name
    assert f"On this disk already: {name}, at about " in said
    plan, said = plan_here("none", ram="16GiB")  # where it doesn't fit, nothing is said of it
    assert plan.held is None
    assert "On this disk already" not in said


def test_a_model_that_is_the_plans_own_is_not_downloaded_again(
    home: Path, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = in_lm_studio(home, files[SMALL], "lmstudio-community/Qwen3.5-2B-GGUF")
    plan, said = plan_here("none", ram="16GiB")
    assert plan.choice is plan.held
    assert plan.choice is not None
    assert plan.choice.option.model.name == name
    assert f"{name} is on this disk already: nothing is downloaded." in said
    assert f"snugvl serve {name} --backend llamacpp" in said
    assert "Without llama.cpp Qwen/Qwen3.5-2B runs on the processor" in said
    machine = describe("none", ram="16GiB")
    assert document(plan, machine)["held"]["model"] == name
    monkeypatch.setenv("HOME", str(home / "nobody"))
    assert planned(catalogue_candidates(), machine, Wishes(), _held()).held is None


def test_a_file_without_its_mmproj_reads_no_pictures(home: Path, files: dict[str, tuple[Path, Path]]) -> None:
    linked(files[SMALL][0], home / ".lmstudio/models/a/b/Qwen3.5-2B-Q4_K_M.gguf")
    assert plan_here("none", ram="16GiB")[0].held is None
    machine = describe("none", ram="16GiB")
    assert planned(catalogue_candidates(), machine, Wishes(images=0), _held()).held is not None


def test_files_are_known_again_by_their_shapes_and_the_version_in_their_name() -> None:
    facts = catalogue_facts("ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M")
    assert facts is not None
    for name, of in (
        ("ollama:qwen3.6:35b", "Qwen/Qwen3.6-35B-A3B"),
        ("ollama:qwen3.5:35b", "Qwen/Qwen3.5-35B-A3B"),
        ("/models/mine.gguf", "Qwen/Qwen3.5-35B-A3B"),  # the lower of both
    ):
        entry = alike(replace(facts, name=name))
        assert entry is not None
        assert entry.name == of
    assert alike(replace(facts, text=replace(facts.text, num_layers=41))) is None
    text = catalogue_facts("Qwen/Qwen3-8B")
    assert text is not None
    assert alike(text) is None, "has no rank"


def test_llamacpps_cache_in_both_its_layouts(home: Path) -> None:
    """Older builds have the files of all repositories in one folder: each with the tower of its own."""
    cache = home / ".cache/llama.cpp"
    one = model(cache / "a_one-GGUF_one-Q8_0.gguf")
    tower(cache / "a_one-GGUF_mmproj-one-F16.gguf")
    other = model(cache / "b_other-GGUF_other-Q8_0.gguf")  # of the same width, and blind
    snapshot = cache / "models--c--third-GGUF/snapshots/0123"
    third = model(snapshot / "third-Q8_0.gguf")
    tower(snapshot / "mmproj-third-F16.gguf")
    assert list(llamacpp_models()) == sorted(map(str, (one, other, third)))
    found = {path: gguf_files(str(path)) for path in (one, other, third)}
    assert {path: files is not None and files.projector for path, files in found.items()} == {
        one: cache / "a_one-GGUF_mmproj-one-F16.gguf",
        other: None,
        third: snapshot / "mmproj-third-F16.gguf",
    }
    assert facts_of(str(one)).vision is not None


def test_held_models_of_no_rank_and_broken_files_are_left_out(home: Path) -> None:
    model(home / ".lmstudio/models/a/b/m-Q8_0.gguf")
    (home / ".lmstudio/models/a/b/broken-Q8_0.gguf").write_bytes(b"GGUF")
    assert _held() == []

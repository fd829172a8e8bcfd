"""The catalogue's numbers equal the published files', to the element and to the byte."""

import json
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.catalogue import RANKED_BY, catalogue_facts, entries, find, thinks_about_pictures
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.core.sizes import GIB
from snugvl.planner.recommend import catalogue_candidates

COUNTS: dict[str, Any] = json.loads(Path(__file__).with_name("counts.json").read_text())
FP8 = {name: values["fp8"] for name, values in COUNTS["models"].items() if "fp8" in values}


def known(name: str) -> ModelFacts:
    facts = catalogue_facts(name)
    assert facts is not None
    return facts


@pytest.mark.parametrize("name", COUNTS["totals"])
def test_elements_equal_the_hubs_total(name: str) -> None:
    assert known(name).elements == COUNTS["totals"][name]


def test_every_form_of_the_catalogue_is_checked() -> None:
    forms = {form.repo for entry in entries() for form in entry.forms if form.repo not in FOUR_BITS}
    assert forms == {*COUNTS["totals"], "pocket"}


FOUR_BITS = {
    form.repo: entry.name
    for entry in entries()
    for form in entry.forms
    if form.quantization in ("gptq", "awq")
}


def test_editions_of_others_than_the_vendor_are_known_and_never_recommended() -> None:
    """A file of QuantTrio's 35B has 23.71 GiB as others quote it, the predictor among them in 16 bits."""
    theirs = {form.repo for entry in entries() for form in entry.forms if not form.led}
    assert theirs == {repo for repo in FOUR_BITS if not repo.startswith("Qwen/")}
    assert {repo.partition("/")[0] for repo in theirs} == {"QuantTrio", "palmfuture"}
    recommended = {each.facts.name for each in catalogue_candidates()}
    assert "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4" in recommended
    assert not theirs & recommended
    mine = known("QuantTrio/Qwen3.5-35B-A3B-AWQ").download_bytes
    assert 0.94 * 23.71 * GIB < mine < 23.71 * GIB


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_gptq_form_has_routed_experts_in_four_bits_and_nothing_else(name: str) -> None:
    """Qwen's own leave out attention, shared experts and the predictor (`dynamic` of their configuration)."""
    plain, packed = known(FOUR_BITS[name]), known(name)
    codes = [tensor for tensor in packed.tensors if tensor.name.endswith("qweight")]
    assert {tensor.role for tensor in codes} == {"expert"}
    experts = [tensor for tensor in plain.tensors if tensor.role == "expert" and tensor.loaded]
    assert 2 * sum(tensor.nbytes for tensor in codes) == sum(prod(tensor.shape) for tensor in experts)
    stored = sum(tensor.nbytes for tensor in packed.tensors)
    whole = sum(tensor.nbytes for tensor in plain.tensors)
    assert whole - stored == sum(tensor.nbytes for tensor in experts) - sum(
        tensor.nbytes
        for tensor in packed.tensors
        if "experts." in tensor.name and tensor.dtype in ("I32", "F16")
    )
    assert packed.quantization == "int4"


@pytest.mark.parametrize("name", COUNTS["models"])
def test_the_seventeen_models_part_by_part(name: str) -> None:
    wanted, facts = COUNTS["models"][name], known(name)
    assert facts.elements == wanted["elements"]
    assert sum(tensor.nbytes for tensor in facts.tensors) == wanted["bf16_bytes"]
    assert sum(2 * layer.kv_heads * layer.head_dim * 2 for layer in facts.text.kv_layers) == wanted["kv"]
    parts: Counter[str] = Counter()
    for tensor in facts.tensors:
        parts[tensor.role] += prod(tensor.shape)
    groups = wanted["groups"]
    assert parts["embedding"] == groups["embed"]
    assert parts["linear"] == groups["linear"]
    assert parts["lm_head"] == groups.get("lm_head", 0)
    assert parts["vision"] + parts["connector"] == groups.get("vision", 0) + groups.get("connector", 0)
    assert parts["norm"] + parts["other"] == wanted["elements"] - sum(
        groups.get(key, 0) for key in ("embed", "linear", "lm_head", "vision", "connector")
    )


@pytest.mark.parametrize("name", FP8)
def test_the_fp8_forms(name: str) -> None:
    wanted = FP8[name]
    facts = known(wanted["repo"])
    quantised = [tensor for tensor in facts.tensors if tensor.dtype == "F8_E4M3"]
    scales = [tensor for tensor in facts.tensors if tensor.role == "scale"]
    assert facts.quantization == "fp8"
    assert facts.elements == wanted["hf_element_count"]
    assert len(quantised) == len(scales) == wanted["n_fp8_tensors"]
    assert sum(tensor.nbytes for tensor in quantised) == wanted["fp8_linear_bytes"]
    assert sum(prod(tensor.shape) for tensor in scales) == wanted["scale_elements"]
    file_bytes = sum(tensor.nbytes for tensor in facts.tensors)
    assert file_bytes == wanted["file_bytes_bf16_scales"]
    # Engines keep scales as float32, and load a head that is tied not a second time.
    untied = file_bytes + 2 * wanted["scale_elements"]
    assert untied == wanted["loaded_bytes_if_untied_f32_scales"]
    head = sum(tensor.nbytes for tensor in facts.tensors if tensor.role == "lm_head")
    assert untied - (head if facts.tied else 0) == wanted["loaded_bytes_if_tied_f32_scales"]
    assert {tensor.role for tensor in quantised} == {"linear"}


def test_the_order_is_whole_and_says_where_it_comes_from() -> None:
    ranks = [entry.quality_rank for entry in entries() if entry.quality_rank is not None]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)
    assert entries()[len(ranks) - 1].name == "pocket"
    for entry in entries():
        assert entry.scores or entry.above or entry.name == "pocket" or not entry.sees
        assert entry.sees or entry.quality_rank is None
    assert ranks[0] == 1


def test_the_order_is_that_of_the_published_scores() -> None:
    """Each score names a document; who has no figure of the common benchmark beats whom it stands above."""
    ranked = [entry for entry in entries() if entry.quality_rank is not None and entry.name != "pocket"]
    figures = {
        entry.name: score.value for entry in ranked for score in entry.scores if score.benchmark == RANKED_BY
    }
    assert list(figures.values()) == sorted(figures.values(), reverse=True)
    for place, entry in enumerate(ranked):
        if entry.above is not None:
            below = (each for each in ranked[place + 1 :] if (each.above or ("",))[0] != entry.above[0])
            assert (entry.above[0], entry.scores) == (next(below).name, ())
    for entry, below in pairwise([entry for entry in ranked if entry.above is None]):
        assert all(len(score.source) > 20 and 0 < score.value < 100 for score in entry.scores)
        if entry.name not in figures:
            mine, theirs = ({each.benchmark: each.value for each in one.scores} for one in (entry, below))
            assert mine.keys() & theirs.keys()
            assert all(mine[name] > theirs[name] for name in mine.keys() & theirs.keys())
    assert [entry for entry in entries() if entry.sees and entry.quality_rank is None] == []


def test_mixtures_whose_figures_are_in_no_source_stand_where_their_vendor_sets_them() -> None:
    ranks = {entry.name: entry.quality_rank or 0 for entry in entries()}
    assert ranks["Qwen/Qwen3.5-122B-A10B"] < ranks["Qwen/Qwen3.6-27B"] < ranks["Qwen/Qwen3.5-27B"]
    assert ranks["Qwen/Qwen3.5-27B"] < ranks["Qwen/Qwen3.6-35B-A3B"] < ranks["Qwen/Qwen3.5-35B-A3B"]
    assert ranks["Qwen/Qwen3.5-35B-A3B"] < ranks["Qwen/Qwen3.5-9B"]
    assert all(len(entry.above[1]) > 20 for entry in entries() if entry.above is not None)


def test_a_figure_with_thinking_alone_is_known_as_such() -> None:
    figures = {
        entry.name: (score.value, score.plain is None and score.thinking is not None)
        for entry in entries()
        for score in entry.scores
        if score.benchmark == RANKED_BY
    }
    assert figures["Qwen/Qwen3.5-4B"] == (77.6, True)
    assert figures["Qwen/Qwen3.5-2B"] == (64.2, False)
    assert "Qwen/Qwen3.8-27B" not in figures


def test_thinking_is_off_where_the_vendors_figures_say_so() -> None:
    """Text, documents and objects are read better without, by every pair that was published."""
    pairs = [
        score
        for entry in entries()
        for score in entry.scores
        if score.plain is not None and score.thinking is not None
    ]
    read = [each for each in pairs if each.benchmark in ("OCRBench", "CC-OCR", "OmniDocBench1.5", "ODInW13")]
    assert len(read) == 8
    assert all((each.plain or 0) > (each.thinking or 0) for each in read)
    assert thinks_about_pictures("qwen3_5") is False
    assert thinks_about_pictures("qwen3_vl") is None, "its editions think or don't: there is nothing to say"


def test_names_are_found_in_any_case_and_unknown_ones_are_not() -> None:
    found = find("qwen/qwen3-vl-4b-instruct-fp8")
    assert found is not None
    assert found[0].name == "Qwen/Qwen3-VL-4B-Instruct"
    assert found[1].quantization == "fp8"
    assert catalogue_facts("org/none") is None


def test_qwen3_5_keeps_a_constant_state_and_stores_what_nobody_loads() -> None:
    facts = known("Qwen/Qwen3.5-4B")
    states = [layer for layer in facts.text.kv_layers if layer.state_bytes]
    assert len(states) == 24
    assert len(facts.text.kv_layers) == 32
    # 32 heads of 128×128 float32, and 3 inputs of 8192 channels for the convolution.
    assert states[0].state(2) == 32 * 128 * 128 * 4 + 8192 * 3 * 2
    assert facts.native
    assert states[0].kv_heads == 0
    idle = [tensor for tensor in facts.tensors if not tensor.loaded]
    assert {tensor.name.split(".")[0] for tensor in idle} == {"mtp"}


def test_gemma_slides_in_five_of_six_layers() -> None:
    windows = [layer.window for layer in known("google/gemma-3-4b-it").text.kv_layers]
    assert windows.count(None) == 5
    assert windows.count(1024) == 29
    assert windows[5] is None


def test_pocket_is_read_from_its_folder() -> None:
    facts = facts_of("pocket")
    assert (facts.source, facts.family, facts.native) == ("folder", "qwen3_vl", True)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen/Qwen3-VL-4B", "Qwen/Qwen3-VL-4B-Instruct"),
        ("qwen/qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct"),
        ("qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct"),
        ("Qwen/Qwen3-VL-4B-Instrct", "Qwen/Qwen3-VL-4B-Instruct"),
        ("Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
        ("Qwen/Qwen3-VL-4B-Instruct", None),
        ("somebody/Qwen3-VL-4B", None),  # a model of theirs
        ("Qwen/Something-else", None),
        ("", None),
        ("x", None),
        ("Qwen/", None),
        ("Qwen/Qwen3.6-35B-A3B:Q4_K_M", "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M"),
        ("ggml-org/Qwen3.6-35B-A3B-GGUF", "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M"),
        ("ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_X", "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M"),
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:q5_k", "bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q5_K_M"),
        ("ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", None),
        (r"C:\models\mine.gguf", None),
    ],
)
def test_a_name_that_is_nearly_one_of_the_catalogue(name: str, meant: str | None) -> None:
    from snugvl.checkpoint.catalogue import did_you_mean

    assert did_you_mean(name) == (f"; did you mean {meant}?" if meant else "")


def test_every_refusal_of_a_name_says_what_may_be_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.errors import CheckpointError

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("Qwen/Qwen3-VL-4B", "qwen3-vl-4b"):
        for ask in (locate, lambda name: facts_of(name, offline=True)):
            with pytest.raises(CheckpointError, match=r"; did you mean Qwen/Qwen3-VL-4B-Instruct\? If not, "):
                ask(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "https://modelscope.cn/models/Qwen/Qwen3-VL-4B-Instruct",
            "not the address of a model",
        ),
        ("Qwen/Qwen3-VL-4B-Instruct/", "is written Qwen/Qwen3-VL-4B-Instruct$"),
        ("Qwen/Qwen3-VL-4B-Instruct ", "is written Qwen/Qwen3-VL-4B-Instruct$"),
        ("acme/vl@v1.0", "snugvl pull acme/vl --revision v1.0$"),
        ("qwen2.5vl:7b", "did you mean Qwen/Qwen2.5-VL-7B-Instruct.*written ollama:qwen2.5vl:7b"),
        ("qwen3-vl:4b", "did you mean Qwen/Qwen3-VL-4B-Instruct"),
    ],
)
def test_names_as_people_copy_them_are_told_how_they_are_written(name: str, words: str) -> None:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.errors import CheckpointNotFound

    for ask in (locate, lambda name: facts_of(name, offline=True)):
        with pytest.raises(CheckpointNotFound, match=words):
            ask(name)


def test_a_folder_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.errors import CheckpointNotFound

    for name in ("./nosuch", f"{tmp_path}/nosuch", "~/nosuch", "models/qwen/", "a/b/c"):
        for ask in (locate, lambda name: facts_of(name, offline=True)):
            with pytest.raises(CheckpointNotFound, match=r"^there is no folder '.*'; use 'pocket'"):
                ask(name)

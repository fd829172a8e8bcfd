"""GGUF editions of the catalogue's models: as large, to the byte, as a file with those tensors."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from snugvl.checkpoint.catalogue import catalogue_facts, entries, q4_k_m
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.hardware.describe import describe
from snugvl.planner.engines.llamacpp.footprint import cache_bytes, placed, tower_bytes
from snugvl.planner.footprint.vision import largest_image
from snugvl.planner.inventory import inventory
from snugvl.planner.recommend import _editions, planned
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.checkpoint import gguf_samples
from tests.planner import random_plans


def nbytes(facts: ModelFacts, *roles: str) -> int:
    return sum(tensor.nbytes for tensor in facts.tensors if tensor.loaded and tensor.role in roles)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, len(random_plans.GGUFS)))]
)
def test_an_edition_is_what_its_file_would_be(number: int, tmp_path: Path) -> None:
    file = random_plans.facts(random_plans.ggufs(tmp_path, [random_plans.GGUFS[number]])[0])
    plain = catalogue_facts(random_plans.GGUFS[number])
    assert plain is not None
    mine = q4_k_m(plain, "a GGUF")
    for roles in (
        ("vision", "connector"),
        ("embedding",),
        ("lm_head",),
        ("expert",),
        ("linear", "norm", "other"),
    ):
        assert nbytes(mine, *roles) == nbytes(file, *roles), roles
    assert (mine.tied, mine.quantization) == (file.tied, file.quantization)
    assert mine.gguf is not None
    assert file.gguf is not None
    assert (mine.gguf.file_type, mine.gguf.deepstack) == (file.gguf.file_type, file.gguf.deepstack)
    settings = Settings("llamacpp", "int4", context=8192, images=1)
    for gpu in (True, False):
        sizes = [placed(inventory(each), settings, gpu=gpu) for each in (mine, file)]
        assert dict(sizes[0]) == dict(sizes[1])
        assert len({cache_bytes(inventory(each), settings, gpu=gpu) for each in (mine, file)}) == 1
    halves = Settings("llamacpp", "int4", context=8192, images=1, offloaded=5)
    assert placed(inventory(mine), halves, gpu=True) == placed(inventory(file), halves, gpu=True)


EDITIONS = {name: each.name for each in entries() for name in each.editions}
SHARES = {"Q3_K_M": 0.25, "Q4_K_M": 0.31, "Q5_K_M": 0.36, "Q6_K": 0.41, "Q8_0": 0.53}


@pytest.mark.parametrize("name", EDITIONS)
def test_every_edition_is_planned_without_a_network(name: str) -> None:
    owner, _, rest = name.partition("/")
    assert owner in ("Qwen", "ggml-org", "bartowski")
    kind = rest.partition("-GGUF:")[2]
    facts, whole = facts_of(name, offline=True), catalogue_facts(EDITIONS[name])
    assert whole is not None
    assert facts.name == name
    assert facts.gguf is not None
    assert facts.gguf.file_type == kind
    assert SHARES[kind] - 0.06 < facts.download_bytes / whole.download_bytes < SHARES[kind] + 0.19
    assert facts.quantization == ("int8" if kind in ("Q6_K", "Q8_0") else "int4")


def test_mixtures_are_known_in_every_edition_that_people_hold() -> None:
    kinds = {
        entry.name: {name.rpartition(":")[2] for name in entry.editions}
        for entry in entries()
        if "A3B" in entry.name or "A10B" in entry.name or "A4B" in entry.name
    }
    assert len(kinds) == 5
    assert all(each == {"Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"} for each in kinds.values())


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", 21_166_757_888, 0.001),  # with the vocabulary
        ("ggml-org/Qwen3.5-35B-A3B-GGUF:Q8_0", 36.903e9, 0.001),
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q3_K_M", 17.12e9, 0.03),  # with choices of its own
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q5_K_M", 25.9e9, 0.05),
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q6_K", 30.9e9, 0.08),
        ("ggml-org/gemma-4-26B-A4B-it-GGUF:Q4_K_M", 16.9e9, 0.01),
    ],
)
def test_a_mixtures_edition_is_as_large_as_the_published_file(
    name: str, published: float, within: float
) -> None:
    """The first part alone, without mmproj; sizes as the Hub lists them, read where others quote them."""
    facts = catalogue_facts(name)
    assert facts is not None
    mine = sum(tensor.nbytes for tensor in facts.tensors if tensor.role not in ("vision", "connector"))
    assert published * (1 - within) < mine < published


def test_a_shared_experts_edition_is_what_its_file_would_be(tmp_path: Path) -> None:
    name = "Qwen/Qwen3.5-35B-A3B"
    file = random_plans.facts(random_plans.ggufs(tmp_path, [name])[0])
    mine = catalogue_facts("ggml-org/Qwen3.5-35B-A3B-GGUF:Q4_K_M")
    assert mine is not None
    assert (mine.family, file.family) == ("qwen3_5_moe", "qwen3_5_moe")
    settings = Settings("llamacpp", "int4", context=8192, images=1, host_experts=30)
    for gpu in (True, False):
        sizes = [placed(inventory(each), settings, gpu=gpu) for each in (mine, file)]
        assert dict(sizes[0]) == dict(sizes[1])
        assert len({cache_bytes(inventory(each), settings, gpu=gpu) for each in (mine, file)}) == 1
    assert inventory(mine).experts_read == inventory(file).experts_read == 8 / 256


def gemma4_file(folder: Path, edition: ModelFacts) -> ModelFacts:
    """A GGUF with the metadata of llama.cpp's `gemma4` and `gemma4v`, read."""
    writer = gguf.GGUFWriter(None, "gemma4")
    layers = edition.text.kv_layers
    counts = {
        "block_count": len(layers), "context_length": 262144, "embedding_length": 2816,
        "feed_forward_length": 2112, "attention.head_count": 16, "attention.key_length": 512,
        "attention.value_length": 512, "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "attention.sliding_window": 1024, "expert_count": 128, "expert_used_count": 8,
        "expert_feed_forward_length": 704,
    }  # fmt: skip
    for key, value in counts.items():
        writer.add_uint32(f"gemma4.{key}", value)
    writer.add_array("gemma4.attention.head_count_kv", [layer.kv_heads for layer in layers])
    windows = [layer.window is not None for layer in layers]
    writer.add_array("gemma4.attention.sliding_window_pattern", windows)
    writer.add_file_type(15)
    tensors = {
        "token_embd.weight": (262144, 2816),
        "blk.0.ffn_down_exps.weight": (128, 2816, 704),
        "blk.0.attn_q_norm.weight": (256,),
    }
    path = gguf_samples.written(writer, folder / "gemma-4-Q4_K_M.gguf", tensors)
    tower = gguf.GGUFWriter(None, "clip")
    tower.add_clip_projector_type("gemma4v")
    tower.add_vision_projection_dim(2816)
    tower.add_vision_patch_size(16)
    tower.add_vision_embedding_length(1152)
    tower.add_vision_feed_forward_length(4304)
    tower.add_vision_block_count(27)
    tower.add_vision_head_count(16)
    parts = {"v.patch_embd.weight": (1152, 3, 16, 16), "v.blk.0.ffn_gate.weight": (4304, 1152)}
    gguf_samples.written(tower, folder / "mmproj-gemma-4-F16.gguf", parts)
    return facts_of(str(path))


def test_gemma_4_is_read_from_its_files_as_the_catalogue_has_it(tmp_path: Path) -> None:
    """Its layers with a window have heads of 256, the others of 512: all had been counted as the wide ones; a
    token of its pictures is 3 × 3 patches, which the file needn't say."""
    edition = catalogue_facts("ggml-org/gemma-4-26B-A4B-it-GGUF:Q4_K_M")
    assert edition is not None
    file = gemma4_file(tmp_path, edition)
    assert file.family == edition.family == "gemma4"
    assert file.text.kv_layers == edition.text.kv_layers
    assert {layer.head_dim for layer in file.text.kv_layers} == {256, 512}
    assert file.vision is not None
    assert edition.vision is not None
    assert file.vision.rule == edition.vision.rule
    assert [largest_image(inventory(each), None).tokens for each in (file, edition)] == [280, 280]
    assert inventory(file).experts_read == inventory(edition).experts_read == 8 / 128
    settings = Settings("llamacpp", "int4", context=8192, images=1)
    assert len({cache_bytes(inventory(each), settings, gpu=True) for each in (file, edition)}) == 1
    assert len({tower_bytes(inventory(each), None) for each in (file, edition)}) == 1


def test_an_mlp_with_a_gate_has_two_buffers_at_once(tmp_path: Path) -> None:
    edition = catalogue_facts("ggml-org/gemma-4-26B-A4B-it-GGUF:Q4_K_M")
    assert edition is not None
    file = gemma4_file(tmp_path, edition)
    plain = replace(file, tensors=tuple(each for each in file.tensors if "ffn_gate" not in each.name))
    gated, alone = (tower_bytes(inventory(each), None) for each in (file, plain))
    one = 4 * 4304 * 280 * 9
    assert one / 2 < gated - alone <= one, "without it attention takes most"


def test_a_gemma_4_that_fits_nowhere_whole_runs_as_its_file() -> None:
    facts = catalogue_facts("google/gemma-4-26B-A4B-it")
    assert facts is not None
    plan = planned([Candidate(facts)], describe("rtx-5060", ram="32GiB"), Wishes())
    assert plan.choice is not None
    assert plan.choice.option.model.name == "ggml-org/gemma-4-26B-A4B-it-GGUF:Q4_K_M"
    assert 0 < plan.choice.settings.host_experts < 30
    assert plan.choice.tokens == 280
    mac = describe("m4", os="macos", ram="32GiB")
    assert (choice := planned([Candidate(facts)], mac, Wishes()).choice) is not None
    assert choice.option.model.name == "ggml-org/gemma-4-26B-A4B-it-GGUF:Q4_K_M"
    assert (choice := solve(_editions(None), mac, Wishes()).choice) is not None
    assert choice.tokens >= 1024, "nobody is led to pictures of so few tokens"


def test_a_named_mixture_leaves_the_processor_for_a_gpu_that_llama_cpp_alone_uses() -> None:
    """It was planned in int5 on the processor, at 5 tokens/s: Q4_K_M doesn't fit that GPU, Q3_K_M does."""
    facts = catalogue_facts("Qwen/Qwen3.6-35B-A3B")
    assert facts is not None
    plan = planned([Candidate(facts)], describe("m4", os="macos", ram="32GiB"), Wishes())
    assert plan.choice is not None
    assert plan.choice.option.model.name == "bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q3_K_M"
    assert plan.choice.budget.gpu is not None
    assert plan.beside is not None
    assert plan.beside.option.engine == "native"

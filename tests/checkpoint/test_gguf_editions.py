"""GGUF editions of the catalogue's models: as large, to the byte, as a file with those tensors."""

from pathlib import Path

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts, entries, q4_k_m
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.planner.engines.llamacpp.footprint import cache_bytes, placed
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
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
        if "A3B" in entry.name or "A10B" in entry.name
    }
    assert len(kinds) == 4
    assert all({"Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"} <= each for each in kinds.values())


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", 21_166_757_888, 0.001),  # with the vocabulary
        ("ggml-org/Qwen3.5-35B-A3B-GGUF:Q8_0", 36.903e9, 0.001),
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q3_K_M", 17.12e9, 0.03),  # with choices of its own
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q5_K_M", 25.9e9, 0.05),
        ("bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q6_K", 30.9e9, 0.08),
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

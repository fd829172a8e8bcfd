"""GGUF editions of the catalogue's models: as large, to the byte, as a file with those tensors."""

from pathlib import Path

import pytest

from benchmarks import random_plans
from snugvl.checkpoint.catalogue import catalogue_facts, entries, q4_k_m
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.planner.engines.llamacpp.footprint import cache_bytes, placed
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings


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


EDITIONS = {each.gguf: each.name for each in entries() if each.gguf}


@pytest.mark.parametrize("name", EDITIONS)
def test_every_edition_is_planned_without_a_network(name: str) -> None:
    owner, _, rest = name.partition("/")
    assert owner in ("Qwen", "ggml-org")
    assert rest.endswith("-GGUF:Q4_K_M")
    facts, whole = facts_of(name, offline=True), catalogue_facts(EDITIONS[name])
    assert whole is not None
    assert facts.name == name
    assert facts.gguf is not None
    assert 0.25 < facts.download_bytes / whole.download_bytes < 0.5

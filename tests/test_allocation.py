"""What an engine allocates: within the memory that is free, as much as fits, or refused with the numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import snugvl
from snugvl.allocation import MARGIN, POOL_SEQUENCES, Place, allocate
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.errors import DoesNotFit, RequestError

GIB = 1 << 30
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return facts_of("Qwen/Qwen3-VL-2B-Instruct", offline=True)


def gpu(free_bytes: int) -> Place:
    return Place(torch.device("cuda"), "a GPU", free_bytes, (12, 0))


@settings(max_examples=60, deadline=None)
@given(free=st.integers(1 << 20, 60 * GIB))
def test_never_more_than_may_be_used(facts: ModelFacts, free: int) -> None:
    try:
        allocation = allocate(facts, BF16, gpu(free), context=None, max_pixels=None)
    except DoesNotFit:
        return
    engine = allocation.engine
    token_bytes = 112 * 1024
    pool = engine.num_blocks * engine.block_size * token_bytes
    rest = allocation.footprint.total_bytes - allocation.footprint.named("KV cache")
    assert pool + rest <= free * (1 - MARGIN) + engine.block_size * token_bytes
    assert engine.cache_tokens >= engine.max_model_len
    assert engine.num_blocks <= POOL_SEQUENCES * -(-engine.max_model_len // engine.block_size)


def test_more_memory_never_gives_less(facts: ModelFacts) -> None:
    got = []
    for tenth in range(45, 200):
        try:
            allocation = allocate(facts, BF16, gpu(tenth * GIB // 10), context=None, max_pixels=None)
        except DoesNotFit:
            assert not got
            continue
        got.append((allocation.engine.max_model_len, allocation.max_pixels))
    assert got == sorted(got)
    assert got[0] < got[-1] == (8192, 4096 * 1024)


def test_what_was_asked_for_is_kept_or_refused_with_what_fits(facts: ModelFacts) -> None:
    allocation = allocate(facts, BF16, gpu(12 * GIB), context=3000, max_pixels=1_000_000)
    assert (allocation.engine.max_model_len, allocation.max_pixels) == (3000, 1_000_000)
    with pytest.raises(DoesNotFit, match=r"16,777,216 pixels .*prefill workspace.* 6\.00 GiB") as e:
        allocate(facts, BF16, gpu(6 * GIB), context=8192, max_pixels=1 << 40)
    assert "tokens with max_pixels=" in str(e.value)


def test_a_card_that_is_far_too_small_says_so(facts: ModelFacts) -> None:
    with pytest.raises(DoesNotFit, match=r"weights: decoder.*ask snugvl plan"):
        allocate(facts, BF16, gpu(2 * GIB), context=None, max_pixels=None)


def test_a_context_beyond_the_model_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(RequestError, match="1 to 262,144 tokens"):
        allocate(facts, BF16, gpu(60 * GIB), context=300_000, max_pixels=None)


def test_load_obeys_it() -> None:
    with snugvl.load("pocket", device="cpu", context=1000) as model:
        assert model.capabilities.context_tokens == 1000
        text = 2 * 6 * 2 * 64 * 4  # keys and values · layers · kv heads · head size · float32
        assert model.memory()["kv_cache"] % (text * 16) == 0
    with pytest.raises(RequestError, match="1 to 4,096 tokens for pocket"):
        snugvl.load("pocket", device="cpu", context=5000)
    with pytest.raises(RequestError, match="device 'tpu'"):
        snugvl.load("pocket", device="tpu")
    with pytest.raises(RequestError, match="dtype 'int3'"):
        snugvl.load("pocket", dtype="int3")  # type: ignore[arg-type]

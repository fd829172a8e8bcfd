"""What vLLM makes of a checkpoint, against published logs and against torch's allocator on an H200."""

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.planner.engines.vllm.footprint import (
    UNPROFILED,
    decoder_profile,
    expert_width,
    experts_workspace,
    linear_workspace,
    marlin_scales,
    pages,
    unprofiled,
    vllm_components,
)
from snugvl.planner.engines.vllm.tensors import MAX_SPLIT_BYTES, loading_bytes, rotary_caches, tensors_of
from snugvl.planner.footprint.total import CachingAllocator
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings

MIB = 1 << 20
GIB = 1 << 30


def model_of(name: str) -> Inventory:
    facts = catalogue_facts(name)
    assert facts is not None
    return inventory(facts)


# Sizes in MiB, made one after the other; allocated and reserved MiB that torch 2.11 reported on an H200
# without and with max_split_size_mb:20, 2026-11-22.
@pytest.mark.parametrize(
    ("sizes", "plain", "limited"),
    [
        ([6] * 3, (18, 20), (18, 20)),
        ([6] * 10, (60, 80), (60, 80)),
        ([26.25] * 4, (105, 112), (112, 112)),
        ([26.25] * 4 + [6] * 3, (123, 132), (130, 132)),
        ([11.5] * 5, (60, 60), (60, 60)),
        ([52.5, 6, 4.5, 26.25] * 6, (536, 572), (555.5, 572)),
    ],
)
def test_the_allocators_steps(
    sizes: list[float], plain: tuple[float, float], limited: tuple[float, float]
) -> None:
    for limit, expected in ((None, plain), (MAX_SPLIT_BYTES, limited)):
        allocator = CachingAllocator(limit)
        for size in sizes:
            allocator.allocate(int(size * MIB))
        assert (allocator.allocated / MIB, allocator.reserved / MIB) == expected


@pytest.mark.parametrize(
    ("name", "gpus", "old", "new"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1, 2.8871, 2.98),
        ("Qwen/Qwen2.5-7B-Instruct", 1, 14.25, 14.29),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 1, 15.6271, 15.67),
        ("Qwen/Qwen3.5-9B", 2, 8.91, None),
        ("google/gemma-3-4b-it", 1, 8.5834, None),
    ],
)
def test_the_logs_figure_before_and_since_the_split_limit(
    name: str, gpus: int, old: float, new: float | None
) -> None:
    model, settings = model_of(name), Settings("vllm", tensor_parallel=gpus)
    assert loading_bytes(model, settings, None).allocated / GIB == pytest.approx(old, rel=0.001)
    if new is not None:
        assert loading_bytes(model, settings).allocated / GIB == pytest.approx(new, rel=0.002)


def test_matrices_that_read_the_same_are_one() -> None:
    model = model_of("Qwen/Qwen2.5-1.5B-Instruct")
    sizes = [tensor.nbytes for tensor in tensors_of(model, Settings("vllm"))]
    assert sizes.count((1536 + 2 * 256) * 1536 * 2) == 28  # queries, keys and values
    assert sizes.count(2 * 8960 * 1536 * 2) == 28  # gate and up
    hybrid = [tensor.nbytes for tensor in tensors_of(model_of("Qwen/Qwen3.5-4B"), Settings("vllm"))]
    assert hybrid.count((8192 + 4096) * 2560 * 2) == 24  # the projections of linear attention


def test_experts_of_a_layer_are_two_tensors_whether_stored_apart_or_not() -> None:
    model = model_of("Qwen/Qwen3-VL-30B-A3B-Instruct")
    sizes = [tensor.nbytes for tensor in tensors_of(model, Settings("vllm"))]
    assert sizes.count(128 * 2 * 768 * 2048 * 2) == sizes.count(128 * 768 * 2048 * 2) == 48
    assert expert_width(model) == 768
    # 8,192 tokens, 8 experts each: outputs 2,048 wide beside inputs 2,048 wide
    assert experts_workspace(model, Settings("vllm", chunk=8192)) == 8192 * 8 * (2048 + 2048) * 2
    assert not experts_workspace(model_of("Qwen/Qwen3-0.6B"), Settings("vllm", chunk=8192))


def test_fp8_on_a_card_without_it_has_a_scale_a_row() -> None:
    model = model_of("Qwen/Qwen3-VL-8B-Instruct-FP8")
    settings = Settings("vllm", "fp8", tensor_parallel=2)
    values = 6_945_767_424  # of the quantised matrices, by the vendor's count
    spread = (values // 128 * 2 - values // 128**2 * 4) // 2
    plain, old = ((vllm_components(model, settings, capability)) for capability in ((8, 9), (7, 5)))
    assert sum(part.nbytes for part in old) - sum(part.nbytes for part in plain) == spread == 53_415_936
    assert not marlin_scales(model, settings._replace(weights="bf16"))


def test_linear_attention_takes_what_the_profile_leaves_out() -> None:
    model = model_of("Qwen/Qwen3.5-4B")
    text = Settings("vllm", chunk=8192, images=0, sequences=16)
    # 12,288 columns, 8,192 of them convolved, 4,096 values; a state of 32 heads of 128 by 128; 2,560 hidden
    each = 2 * (12_288 + 2 * 8_192 + 4_096 + 4 * 4_096 + 2_048 + 32 * 128 * 128 // 64) + 4 * 2_560
    assert linear_workspace(model, text) == 8192 * each
    assert unprofiled(model, text) == 8192 * each - decoder_profile(model, text) > 0
    assert not unprofiled(model, text._replace(images=1)), "a tower's profile is larger"
    assert not linear_workspace(model_of("Qwen/Qwen3-0.6B"), text)
    found = vllm_components(model, text)
    assert [part.nbytes for part in found if part.name == UNPROFILED] == [unprofiled(model, text)]


def test_tensor_parallel_cuts_matrices_but_keeps_norms_and_the_last_heads_of_keys() -> None:
    model = model_of("Qwen/Qwen2.5-1.5B-Instruct")  # two heads of keys
    of = {gpus: tensors_of(model, Settings("vllm", tensor_parallel=gpus)) for gpus in (2, 4)}
    for gpus, tensors in of.items():
        sizes = [tensor.nbytes for tensor in tensors]
        assert sizes.count((1536 // gpus + 2 * 256 // min(gpus, 2)) * 1536 * 2) == 28
        assert sizes.count(1536 * 2) == 2 * 28 + 1  # norms


def test_rotary_caches_of_every_kind() -> None:
    assert rotary_caches(model_of("Qwen/Qwen3-0.6B")) == (40_960 * 128 * 2,)
    # A quarter of a head rotates.
    assert rotary_caches(model_of("Qwen/Qwen3.5-4B")) == (4 * 262_144 * 64 * 2,)
    assert rotary_caches(model_of("google/gemma-3-1b-it")) == (32_768 * 256 * 2,) * 2
    assert rotary_caches(model_of("google/gemma-3-4b-it")) == (131_072 * 256 * 2, 8 * 131_072 * 256 * 2)
    assert rotary_caches(model_of("microsoft/Phi-3.5-mini-instruct")) == ((131_072 + 4_096) * 96 * 2,)


def test_pages_hold_a_layers_states() -> None:
    """Qwen3.5-4B in 0.22.0: "Setting attention block size to 528 tokens", 11.11 GiB, 141,107 tokens."""
    pool = pages(model_of("Qwen/Qwen3.5-4B"), Settings("vllm"))
    assert (pool.block_tokens, len(pool.groups)) == (528, 4)
    blocks = pool.blocks(1024, 8192, states=1)
    assert int(11.11 * GIB) // pool.block_bytes * 1024 // blocks == 141_107
    halves = pages(model_of("Qwen/Qwen3.5-4B"), Settings("vllm", tensor_parallel=2))
    assert (halves.block_tokens, halves.block_bytes) == (528, pool.block_bytes // 2)
    assert pages(model_of("Qwen/Qwen3.5-2B"), Settings("vllm")).block_tokens == 544


def test_layers_with_windows_take_blocks_of_the_same_pool() -> None:
    pool = pages(model_of("google/gemma-3-12b-it"), Settings("vllm"))
    assert len(pool.groups) == 6  # 8 layers that see all, and 5 times 8 with a window
    assert pool.block_bytes == 8 * 16 * 2 * 8 * 256 * 2
    assert pool.blocks(131_072, 2048) == 131_072 // 16 + 5 * (-(-(1023 + 2 * 2048) // 16) + 1)
    assert pool.blocks(100, 2048) == 7 + 5 * (7 + 1)

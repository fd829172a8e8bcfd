"""What an engine allocates: within the memory that is free, as much as fits, or refused with the numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import snugvl
from snugvl.allocation import LEAST_CONTEXT, POOL_SEQUENCES, Wish, allocate
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.errors import DoesNotFit, InputError, RequestError
from snugvl.place import Place, place_on
from snugvl.planned import planned_rows
from snugvl.planner.footprint.native import loading_bytes
from snugvl.planner.footprint.step_graphs import recorded
from snugvl.planner.footprint.total import footprint
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import subject_of
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import FORMAT_TIER

MIB, GIB = 1 << 20, 1 << 30
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return facts_of("Qwen/Qwen3-VL-2B-Instruct", offline=True)


@pytest.fixture(scope="module")
def fp8() -> ModelFacts:
    return facts_of("Qwen/Qwen3-VL-4B-Instruct-FP8", offline=True)


def gpu(free_bytes: int, **changes: Any) -> Place:
    return replace(
        Place(torch.device("cuda"), "a GPU", free_bytes, (12, 0), context_bytes=450 * MIB), **changes
    )


@settings(max_examples=16, deadline=None)
@given(free=st.integers(1 << 20, 60 * GIB), weights=st.sampled_from([None, "bf16", "int4"]))
def test_never_more_than_may_be_used(facts: ModelFacts, free: int, weights: Any) -> None:
    place = gpu(free)
    try:
        allocation = allocate(facts, BF16, place, Wish(weights=weights))
    except DoesNotFit:
        return
    engine = allocation.engine
    token_bytes = (56 if engine.kv_cache == "fp8" else 112) * 1024
    pool = engine.num_blocks * engine.block_size * token_bytes
    rest = allocation.footprint.total_bytes - allocation.footprint.named("KV cache")
    rest += engine.encoder_cache_bytes + allocation.recorded.total_bytes
    assert pool == allocation.kv_bytes
    assert pool + rest <= place.usable_bytes
    assert place.usable_bytes <= free - min(128 * MIB, free)
    assert engine.cache_tokens >= engine.max_model_len
    assert engine.num_blocks <= POOL_SEQUENCES["cuda"] * -(-engine.max_model_len // engine.block_size)
    reserved = -(-allocation.kv_bytes // (2 * MIB)) * 2 * MIB
    assert sum(planned_rows(allocation, place).values()) == rest + reserved <= place.usable_bytes


def test_more_memory_never_gives_less(facts: ModelFacts) -> None:
    got = []
    for tenth in range(25, 100):
        try:
            allocation = allocate(facts, BF16, gpu(tenth * GIB // 10))
        except DoesNotFit:
            assert not got
            continue
        found = allocation.settings
        enough = found.context >= LEAST_CONTEXT
        got.append((enough, FORMAT_TIER[found.weights], found.context, allocation.max_pixels))
    assert got == sorted(got)
    assert {tier for _, tier, *_ in got} == {1, 2, 3}  # int4, int8, bf16
    assert got[-1] == (True, 3, 8192, 4096 * 1024)


def test_an_fp8_checkpoint_stays_fp8_where_it_fits(fp8: ModelFacts) -> None:
    def formats(gib: float) -> str:
        return allocate(fp8, BF16, gpu(int(gib * GIB))).settings.weights_name

    assert [formats(gib) for gib in (24, 7.0, 6.5, 5.0)] == [
        "fp8",
        "fp8, int8 head",
        "fp8, int8 head, int8 tower",
        "int4, int8 head, int8 tower",
    ]


def test_an_fp8_cache_only_where_it_makes_room(fp8: ModelFacts) -> None:
    """bf16 first at the same images and context; FP8 before either gives way; bf16 again in int4."""

    def found(gib: float, wish: Wish | None = None) -> tuple[str, int, int]:
        made = allocate(fp8, BF16, gpu(int(gib * GIB)), wish)
        return made.engine.kv_cache, made.engine.max_model_len, made.max_pixels

    assert [found(gib)[0] for gib in (24, 6.5, 6.2, 5.0)] == ["bf16", "bf16", "fp8", "bf16"]
    assert found(6.2)[1:] == found(24)[1:] > found(6.2, Wish(kv_cache="bf16"))[1:]
    assert found(24, Wish(kv_cache="fp8"))[0] == "fp8"
    pools = [allocate(fp8, BF16, gpu(24 * GIB), Wish(4096, 1 << 20, kv_cache=kv)) for kv in ("bf16", "fp8")]
    assert pools[0].engine.num_blocks == pools[1].engine.num_blocks == 16 * 256
    assert [pool.kv_bytes for pool in pools] == [9 * GIB, 9 * GIB // 2]
    assert [planned_rows(pool, gpu(24 * GIB))["KV cache"] for pool in pools] == [9 * GIB, 9 * GIB // 2]


def test_what_changes_speed_alone_gives_way_first(fp8: ModelFacts) -> None:
    roomy = allocate(fp8, BF16, gpu(24 * GIB), Wish(4096, 1 << 20))
    assert (roomy.engine.max_batched_tokens, roomy.engine.max_num_seqs) == (2048, 32)
    least = footprint(inventory(fp8), replace(roomy.settings, sequences=16), gpu(24 * GIB).planned())
    low = least.total_bytes - least.named("KV cache")
    tight = allocate(fp8, BF16, gpu(24 * GIB, limit_bytes=low + 540 * MIB), Wish(4096, 1 << 20))
    assert tight.settings.weights_name == "fp8"
    assert tight.engine.max_num_seqs < 16
    assert tight.engine.max_batched_tokens < 2048


def test_graphs_of_prompts_take_what_is_left_and_nothing_else(fp8: ModelFacts) -> None:
    def found(gib: float, **wish: Any) -> tuple[int, Any, dict[str, int]]:
        place = gpu(int(gib * GIB))
        made = allocate(fp8, BF16, place, Wish(4096, 1 << 20, **wish))
        rows = planned_rows(made, place)
        assert sum(rows.values()) <= place.usable_bytes
        return made.engine.step_graph_bytes, replace(made.engine, step_graph_bytes=0), rows

    nothing, plain, before = found(24, step_graphs=False)
    assert nothing == 0
    graphs, same, after = found(24)
    assert 100 * MIB < graphs < 700 * MIB
    assert same == plain
    place = gpu(24 * GIB)
    driver = allocate(fp8, BF16, place, Wish(4096, 1 << 20)).recorded.driver_bytes
    assert 60 * MIB < driver < 90 * MIB
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "CUDA graphs": graphs, "CUDA context and libraries": driver
    }  # fmt: skip
    assert found(16)[0] == 0, "beside a full cache there is no room for them"
    assert found(24, tower="streamed")[0] == 0
    assert 0 < found(24, language_only=True)[0] < graphs
    assert allocate(fp8, BF16, place_on(torch.device("cpu"))).engine.step_graph_bytes == 0


def test_what_cublas_needs_for_graphs_of_prompts_is_counted_once(fp8: ModelFacts) -> None:
    """Graphs of decode steps over low-bit weights alone go without it."""
    place = gpu(40 * GIB)
    needed = {
        weights: allocate(fp8, BF16, place, Wish(4096, 1 << 20, weights)).recorded.library_bytes
        for weights in ("fp8", "int4")
    }
    assert needed == {"fp8": 0, "int4": 0}
    tight = Settings("native", "int4", "int8", context=4096, images=1)
    assert recorded(inventory(fp8), tight, place.planned()).library_bytes == 32 * MIB


def test_twice_as_many_at_once_are_planned_with_all_they_take(fp8: ModelFacts) -> None:
    """Their graphs, logits and samples: not only those of half as many."""
    place = gpu(24 * GIB)
    made = allocate(fp8, BF16, place, Wish(4096, 1 << 20))
    half = footprint(inventory(fp8), replace(made.settings, sequences=16), place.planned())
    assert made.settings.sequences == made.engine.max_num_seqs == 32
    assert made.footprint.named("CUDA graphs") >= half.named("CUDA graphs") + 20 * MIB
    assert made.subject == subject_of("Qwen/Qwen3-VL-4B-Instruct-FP8", replace(made.settings, sequences=16))


def test_fewer_readers_where_loading_would_not_fit(fp8: ModelFacts) -> None:
    place = gpu(24 * GIB)
    roomy = allocate(fp8, BF16, place, Wish(4096, 1 << 20, "int4"))
    assert roomy.readers == 4
    limited = gpu(24 * GIB, limit_bytes=roomy.footprint.total_bytes + 8 * MIB)
    tight = allocate(fp8, BF16, limited, Wish(4096, 1 << 20, "int4"))
    assert tight.readers < 4
    weights = tight.footprint.named("weights") + tight.footprint.named("allocator rounding")
    taken = loading_bytes(inventory(fp8), tight.settings, tight.readers)
    assert 450 * MIB + weights + taken <= limited.usable_bytes


def test_a_limit_is_kept(facts: ModelFacts) -> None:
    limited = gpu(24 * GIB, limit_bytes=2600 * MIB)
    assert limited.usable_bytes == 2600 * MIB
    allocation = allocate(facts, BF16, limited, Wish(2048, 1 << 20))
    pool = allocation.kv_bytes - allocation.footprint.named("KV cache")
    assert allocation.footprint.total_bytes + pool <= 2600 * MIB
    assert allocation.settings.weights == "int4"
    assert gpu(2 * GIB, limit_bytes=3 * GIB).usable_bytes < 2 * GIB


def test_what_was_asked_for_is_kept_or_refused_with_what_fits(facts: ModelFacts) -> None:
    allocation = allocate(facts, BF16, gpu(12 * GIB), Wish(3000, 1_000_000))
    assert (allocation.engine.max_model_len, allocation.max_pixels) == (3000, 1_000_000)
    with pytest.raises(
        DoesNotFit,
        match=r"int8 tower, its vision tower streamed, .*16,777,216 pixels.* FP8 KV .*decoder.* 4\.25 GiB",
    ) as e:
        allocate(facts, BF16, gpu(4352 * MIB), Wish(8192, 1 << 40, "bf16"))
    assert "tokens with max_pixels=" in str(e.value)


def test_a_card_that_is_far_too_small_says_so(facts: ModelFacts) -> None:
    with pytest.raises(DoesNotFit, match=r"int4, int8 head, int8 tower, .*weights: .*ask snugvl plan"):
        allocate(facts, BF16, gpu(1 * GIB))


def test_a_context_beyond_the_model_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(RequestError, match="1 to 262,144 tokens"):
        allocate(facts, BF16, gpu(60 * GIB), Wish(300_000))


def test_a_format_that_can_not_be_is_refused(facts: ModelFacts, fp8: ModelFacts) -> None:
    with pytest.raises(RequestError, match=r"'fp8' can't be had .* in bf16; use .*its FP8 edition") as e:
        allocate(facts, BF16, gpu(60 * GIB), Wish(weights="fp8"))
    assert e.value.field == "weights"
    assert allocate(fp8, BF16, gpu(60 * GIB), Wish(weights="bf16")).settings.weights == "bf16"


def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="more than 0 bytes, not -5"):
        place_on(torch.device("cpu"), -5)
    with pytest.raises(DoesNotFit, match="may be used"):
        snugvl.load("pocket", device="cpu", memory=1 << 20)
    with pytest.raises(InputError, match="memory 'much' is not a size"):
        snugvl.load("pocket", device="cpu", memory="much")


def test_load_obeys_it() -> None:
    with snugvl.load("pocket", device="cpu", context=1000) as model:
        assert model.capabilities.context_tokens == 1000
        assert model.capabilities.weights == "fp32"
        text = 2 * 6 * 2 * 64 * 4  # keys and values · layers · kv heads · head size · float32
        assert model.memory()["kv_cache"] % (text * 16) == 0
    with pytest.raises(RequestError, match="1 to 4,096 tokens for pocket"):
        snugvl.load("pocket", device="cpu", context=5000)
    with pytest.raises(RequestError, match="device 'tpu'"):
        snugvl.load("pocket", device="tpu")
    with pytest.raises(RequestError, match="dtype 'int3'"):
        snugvl.load("pocket", dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="weights 'int3'"):
        snugvl.load("pocket", device="cpu", weights="int3")  # type: ignore[arg-type]


TEXT_MODELS = (
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-8B",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "meta-llama/Llama-2-7b-chat-hf",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_models_leave_no_room_for_pictures(name: str) -> None:
    facts, place = facts_of(name, offline=True), gpu(7 * GIB)
    allocation = allocate(facts, BF16, place)
    rows = planned_rows(allocation, place)
    assert (allocation.settings.images, allocation.max_pixels, allocation.engine.encoder_cache_bytes) == (
        0,
        0,
        0,
    )
    assert rows["vision weights"] == 0
    assert sum(rows.values()) <= place.usable_bytes
    assert allocation.engine.max_model_len <= (facts.native_positions or facts.text.max_position_embeddings)
    with pytest.raises(DoesNotFit) as refused:
        allocate(facts, BF16, gpu(1 * GIB))
    assert "pixels" not in str(refused.value)


def test_a_small_pool_is_planned_to_the_byte() -> None:
    facts = facts_of("pocket", offline=True)
    for context in (100, 512, 1000):
        allocation = allocate(facts, BF16, gpu(2 * GIB), Wish(context))
        layer = facts.text.kv_layers[0]
        each = 2 * len(facts.text.kv_layers) * layer.kv_heads * layer.head_dim * 2 * 16
        assert allocation.kv_bytes == allocation.engine.num_blocks * each
        assert allocation.engine.num_blocks == POOL_SEQUENCES["cuda"] * -(-context // 16)


def test_a_tower_left_out_makes_room(fp8: ModelFacts) -> None:
    place = gpu(6 * GIB)
    whole, blind = (allocate(fp8, BF16, place, Wish(language_only=only)) for only in (False, True))
    assert (whole.settings.images, blind.settings.images, blind.max_pixels) == (1, 0, 0)
    assert planned_rows(blind, place)["vision weights"] == 0
    assert blind.kv_bytes > whole.kv_bytes
    assert blind.subject != whole.subject


def test_a_context_beyond_long_ropes_first_one_names_who_runs_it() -> None:
    facts = facts_of("microsoft/Phi-3.5-mini-instruct", offline=True)
    with pytest.raises(RequestError, match=r"1 to 4,096 tokens .* up to 131,072"):
        allocate(facts, BF16, gpu(40 * GIB), Wish(context=8192))
    assert allocate(facts, BF16, gpu(40 * GIB)).engine.max_model_len == 4096

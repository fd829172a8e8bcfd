"""Components against published figures: exact where they are exact."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.facts import KVLayer, TensorFact
from snugvl.core.formats import FORMATS
from snugvl.core.memory_kinds import Kind
from snugvl.models.networks import segment_bytes
from snugvl.planner.engines.vllm import footprint as vllm
from snugvl.planner.engines.vllm.tensors import deepstack_buffers, rotary_caches
from snugvl.planner.footprint.kv import kv_bytes
from snugvl.planner.footprint.total import (
    Component,
    Device,
    footprint,
    footprint_of,
    reserved_bytes,
    together_bytes,
    up,
)
from snugvl.planner.footprint.vision import encoder_bytes_per_token, held_outputs, largest_image, scales
from snugvl.planner.footprint.weights import (
    few_bits_parts,
    joined,
    keeps_fp8,
    sizes,
    weight_bytes,
    weight_components,
)
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import Fixed, qwen3_vl, with_rule, with_windows

MIB = 1 << 20
# Bytes loaded, from public element counts: bf16; FP8 with float32 scales and a tied head; the decoder's
# matrices in 8.125 and in 4.25 bits.
PUBLISHED = {
    "2B": (4_255_064_064, 2_846_121_984, 2_867_798_016, 2_185_175_040),
    "4B": (8_875_631_616, 5_243_202_816, 5_299_086_336, 3_539_198_976),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_weights_equal_the_published_counts_to_the_byte(size: str) -> None:
    bf16, fp8, int8, int4 = PUBLISHED[size]
    plain, quantised = inventory(qwen3_vl(size)), inventory(qwen3_vl(size, fp8=True))
    for engine in ("native", "vllm"):
        wide, stored = Settings(engine), Settings(engine, "fp8")  # type: ignore[arg-type]
        assert weight_bytes(plain, wide) == bf16 == weight_bytes(quantised, wide)
        assert weight_bytes(quantised, stored) == fp8
    for model in (plain, quantised):
        assert weight_bytes(model, Settings("native", "int8")) == int8
        assert weight_bytes(model, Settings("native", "int4")) == int4


def test_a_stored_head_counts_only_where_it_is_not_tied() -> None:
    tied, untied = inventory(qwen3_vl("4B", fp8=True)), inventory(qwen3_vl("4B", fp8=True, tied=False))
    for head, nbytes in (("bf16", 2560 * 2), ("int8", 2560 + 20 * 2)):
        stored = Settings("native", "fp8", head)  # type: ignore[arg-type]
        assert weight_bytes(untied, stored) - weight_bytes(tied, stored) == 151_936 * nbytes


def test_what_no_engine_loads_costs_nothing() -> None:
    facts = qwen3_vl("2B")
    extra = TensorFact("mtp.0.weight", "other", "BF16", (4096, 4096), 2 * 4096**2, loaded=False)
    more = replace(facts, tensors=(*facts.tensors, extra))
    wide = Settings("native")
    assert weight_bytes(inventory(more), wide) == weight_bytes(inventory(facts), wide)


def test_what_does_not_divide_into_groups_stays_wide() -> None:
    # 256 columns: two groups a row, each a 16-bit scale and a 16-bit zero point
    assert few_bits_parts(10, 256, FORMATS["int4"]) == (1280, 40, 40)
    assert few_bits_parts(10, 256, FORMATS["int6"], 128) == (1280, 640, 40, 40)
    assert few_bits_parts(10, 200, FORMATS["int5"]) == ()
    odd = TensorFact("odd", "linear", "BF16", (10, 200), 4000)
    facts = qwen3_vl("2B")
    more = inventory(replace(facts, tensors=(*facts.tensors, odd)))
    int4 = Settings("native", "int4")
    assert weight_bytes(more, int4) - weight_bytes(inventory(facts), int4) == 4000


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int5", "int4"])
def test_joined_matrices_weigh_as_much(weights: Any) -> None:
    for size in PUBLISHED:
        model = inventory(qwen3_vl(size, fp8=weights == "fp8"))
        settings = Settings("native", weights)
        apart = sum(nbytes * count for nbytes, count in sizes(model, settings, "decoder"))
        assert sum(nbytes * count for nbytes, count in joined(model, settings)) == apart


def test_blocks_that_are_not_the_kernels_own_do_not_stay_fp8() -> None:
    facts = qwen3_vl("2B", fp8=True)
    coarse = tuple(
        tensor._replace(shape=(1, 1), nbytes=2) if tensor.role == "scale" else tensor
        for tensor in facts.tensors
    )
    assert keeps_fp8(inventory(facts))
    assert not keeps_fp8(inventory(replace(facts, tensors=coarse)))
    assert not keeps_fp8(inventory(qwen3_vl("2B")))


def test_parts_and_placement() -> None:
    model = inventory(qwen3_vl("2B"))
    whole = {part.name: part.nbytes for part in weight_components(model, Settings("native"))}
    moved = weight_components(model, Settings("native", vision="cpu", embedding="cpu"))
    assert [part.name for part in moved] == ["weights: decoder", "allocator rounding"]
    halves = {p.name: p.nbytes for p in weight_components(model, Settings("vllm", tensor_parallel=2))}
    norms = sum(2 * prod(t.shape) for t in model.facts.tensors if t.role == "norm")  # whole on every GPU
    assert halves["weights: decoder"] == (whole["weights: decoder"] - norms) // 2 + norms


def test_the_allocator_takes_segments() -> None:
    assert reserved_bytes([(1, 1)]) == 2 * MIB
    assert reserved_bytes([(512 * 1024, 4)]) == 2 * MIB
    assert reserved_bytes([(2 * MIB, 3)]) == 20 * MIB
    assert reserved_bytes([(47 * MIB + 1, 2)]) == 2 * 48 * MIB


def test_keys_and_values() -> None:
    assert kv_bytes(inventory(qwen3_vl("2B")), Settings("native"), 16) == 16 * 112 * 1024
    assert kv_bytes(inventory(qwen3_vl("4B")), Settings("native"), 17) == 32 * 144 * 1024
    assert kv_bytes(inventory(qwen3_vl("4B")), Settings("vllm", kv="fp8"), 16) == 16 * 72 * 1024
    assert kv_bytes(inventory(qwen3_vl("4B")), Settings("vllm", tensor_parallel=2), 16) == 16 * 72 * 1024


def test_windows_stop_growing_where_the_engine_honours_them() -> None:
    model = inventory(with_windows(qwen3_vl("2B"), (KVLayer(4, 64, window=1024), KVLayer(4, 64))))
    per_token = 2 * 4 * 64 * 2
    honoured = kv_bytes(model, Settings("vllm", chunk=512), 8192)
    # A step writes its whole chunk before old blocks are given back, and two steps overlap; a window begins
    # anywhere in a block.
    assert honoured == (1023 + 2 * 512 + 1 + 16) * per_token + 8192 * per_token
    assert kv_bytes(model, Settings("transformers"), 8192) == (1024 + 8192) * per_token
    found = footprint(model, Settings("transformers", context=8192, concurrency=3), Device(0))
    assert found.named("KV cache") == up(3 * (1024 + 8192) * per_token, 2 * MIB)
    assert found.named("keys and values beyond windows") == (8192 - 1024) * per_token  # of one prompt


def test_recurrent_states_do_not_grow() -> None:
    model = inventory(with_windows(qwen3_vl("2B"), (KVLayer(0, 64, state_bytes=1000),)))
    # The running state, and the last one that another request may go on from.
    assert kv_bytes(model, Settings("vllm"), 16) == kv_bytes(model, Settings("vllm"), 100_000) == 2000
    assert kv_bytes(model, Settings("native"), 16) == kv_bytes(model, Settings("native"), 100_000) == 1000


def test_our_engine_allocates_the_states_of_all_who_may_run() -> None:
    layers = (KVLayer(2, 64), KVLayer(0, 0, state_bytes=1000, state_values=50))
    model, device = inventory(with_windows(qwen3_vl("2B"), layers)), Device(0, cpu=True)
    for wide, itemsize in ((False, 2), (True, 4)):
        settings = Settings("native", context=8192, sequences=16, float32=wide)
        found = footprint(model, settings, device)
        assert found.named("recurrent state") == 17 * (1000 + 50 * itemsize)
        assert found.named("KV cache") == 8192 * 2 * 2 * 64 * itemsize
    assert not footprint(model, Settings("transformers"), device).named("recurrent state")
    assert not footprint(inventory(qwen3_vl("2B")), settings, device).named("recurrent state")


def test_phases_do_not_add() -> None:
    found = footprint_of(
        [
            Component("a", Kind.OTHER, 10),
            Component("b", Kind.OTHER, 5, "vision"),
            Component("c", Kind.OTHER, 7, "prefill"),
            Component("d", Kind.OTHER, 1, "prefill"),
        ]
    )
    assert (found.total_bytes, found.peak_phase) == (18, "prefill")
    assert [part.name for part in found.counted] == ["a", "c", "d"]


def test_vllm_holds_what_its_source_says() -> None:
    model = inventory(qwen3_vl("4B"))
    assert rotary_caches(model) == (256 * MIB,)
    assert deepstack_buffers(model, 2048) == (10 * MIB,) * 3
    assert encoder_bytes_per_token(model) == 20 * 1024
    full = Settings("vllm", max_pixels=16_777_216)
    assert vllm.encoder_cache(model, full) == 320 * MIB
    assert vllm.encoder_cache(model, Settings("vllm", max_pixels=65_536)) == 2048 * 20 * 1024


@pytest.mark.parametrize(
    ("size", "fp8", "gib"), [("2B", True, 2.9256), ("4B", True, 5.2246), ("4B", False, 8.5987)]
)
def test_vllm_loads_as_much_as_its_log_would_say(size: str, fp8: bool, gib: float) -> None:
    """`Model loading took`: weights, rounding, rotary cache, deepstack buffers."""
    model = inventory(qwen3_vl(size, fp8=fp8))
    settings = Settings("vllm", "fp8" if fp8 else "bf16", context=2048, max_pixels=1_048_576)
    found = footprint(model, settings, Device(0))
    names = ("weights", "allocator rounding", "vLLM rotary", "vLLM deepstack")
    assert sum(found.named(name) for name in names) / 2**30 == pytest.approx(gib, rel=0.001)


def test_an_unbounded_encoder_profile_is_why_the_defaults_fail_on_8_gb() -> None:
    model = inventory(qwen3_vl("4B", fp8=True))
    one = Settings("vllm", "fp8", context=2048, max_pixels=1_048_576, sequences=1)
    small = footprint(model, one, Device(0))
    full = footprint(model, one._replace(max_pixels=16_777_216), Device(0))
    grown = full.total_bytes - small.total_bytes
    assert 1.9 * 2**30 < grown < 2.4 * 2**30  # 16,384-token images: encoder profile and encoder cache


def test_the_largest_image_fills_its_budget_whatever_its_shape() -> None:
    model = inventory(qwen3_vl("2B"))
    assert largest_image(model, 1_048_576).tokens == 1024
    assert largest_image(model, None).tokens == 16_384
    rule = qwen3_vl("2B").vision
    assert rule is not None
    for pixels in (70_000, 300_001, 2_800_000):
        bound = largest_image(model, pixels)
        for width, height in ((4000, 3000), (1, 190), (5000, 700), (333, 777)):
            assert rule.rule.tokens(width, height, pixels) <= bound.tokens
    assert not scales(inventory(with_rule(qwen3_vl("2B"), Fixed())))


def test_the_loader_takes_the_segment_that_the_plan_counts() -> None:
    sizes = [1, MIB, MIB + 1, 3 * MIB, 5 * MIB + 700, 40 * MIB]
    assert up(segment_bytes(sizes), 2 * MIB) == together_bytes([(size, 1) for size in sizes]) == 50 * MIB
    assert together_bytes([(3 * MIB, 4), (MIB, 9)]) == 12 * MIB


def test_our_engine_holds_the_outputs_a_chunk_touches() -> None:
    model = inventory(qwen3_vl("2B"))
    image = largest_image(model, 1_048_576)
    alone = Settings("native", sequences=1, context=1024 + 512, chunk=2048)
    assert held_outputs(alone, image, 7) == 7
    assert held_outputs(alone._replace(context=2 * 1024 + 512), image, 7) == 2 * 7  # two in a conversation
    assert held_outputs(alone._replace(sequences=2), image, 7) == 2 * 7
    assert held_outputs(alone._replace(sequences=16), image, 7) == 4 * 7  # no chunk touches more


def test_grown_settings_never_take_less() -> None:
    model = inventory(qwen3_vl("4B", fp8=True))
    for engine in ("native", "transformers", "vllm"):
        # A chunk over a prefix costs our engine more than a prompt in one piece, so its chunk stays.
        chunk = 2048 if engine == "native" else 512
        base: dict[str, Any] = {
            "context": 2048, "max_pixels": 262_144, "images": 1, "concurrency": 1, "chunk": chunk
        }  # fmt: skip
        least = footprint(model, Settings(engine, **base), Device(1)).total_bytes  # type: ignore[arg-type]
        larger = {"context": 8192, "max_pixels": 4_194_304, "images": 4, "concurrency": 3, "chunk": 2048}
        for name, value in larger.items():
            grown = footprint(model, Settings(engine, **base | {name: value}), Device(1))  # type: ignore[arg-type]
            assert grown.total_bytes >= least, (engine, name)


def test_models_json_agrees() -> None:
    path = Path(__file__).parents[3] / "shared" / "models.json"
    if not path.is_file():
        pytest.skip("the shared fact sheet is not here")
    facts = json.loads(path.read_text())["models"]
    for size in ("2B", "4B", "8B"):
        entry = facts[f"Qwen/Qwen3-VL-{size}-Instruct"]
        assert inventory(qwen3_vl(size)).parameters == entry["params_exact"]
        assert qwen3_vl(size, fp8=True).elements == entry["fp8_checkpoint"]["hf_element_count"]

"""When a plan takes the KV cache in FP8, what that saves, and who may have it."""

from dataclasses import replace

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.planner.capabilities import Option
from snugvl.planner.costs import kv_formats_on
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.test_solve import FACTS, one


def test_an_fp8_cache_only_where_it_brings_images_or_context_up_to_comfort() -> None:
    def chosen(wishes: Wishes, held: int = 0) -> Choice:
        return require(one("4B", wishes=wishes, on=rtx_5060(held * MIB)))

    narrow = chosen(Wishes(), 1932)
    assert narrow.settings.kv == "fp8"
    wide = chosen(Wishes(kv_cache="bf16"), 1932)
    assert narrow.score > wide.score
    reached = [(each.tokens, each.settings.context, each.settings.kv_tokens) for each in (wide, narrow)]
    assert reached[0] < reached[1]
    cache = one("4B", on=rtx_5060(1932 * MIB)).rejections
    assert any("the KV cache in bf16, with the same images" in rejection.text for rejection in cache)
    assert require(one("4B", on=machine(48 * GIB))).settings.kv == "bf16"
    halves = [
        footprint(
            narrow.option.model,
            narrow.settings._replace(kv=kv, context=8192, pool_tokens=0),
            narrow.budget.device,
        )
        for kv in ("bf16", "fp8")
    ]
    assert [part.named("KV cache") for part in halves] == [1152 * MIB, 576 * MIB]


def test_a_wished_cache_and_who_may_have_it() -> None:
    assert require(one("4B", wishes=Wishes(kv_cache="fp8"), on=machine(24 * GIB))).settings.kv == "fp8"
    refused = one("4B", wishes=Wishes(kv_cache="fp8"), on=machine(24 * GIB)).refusals
    assert ("transformers", "--kv-cache fp8 is for snugvl's own engine, vLLM and llama.cpp alone") in [
        (each.engine, each.text) for each in refused
    ]
    model = inventory(FACTS["4B", True])
    rough = replace(model, qk_norm=False)
    card, turing, cpu = Device(0), Device(0, compute_capability=(7, 5)), Device(0, cpu=True)
    ours, vllm = Option(model, "native", "fp8", "fp8"), Option(model, "vllm", "fp8", "fp8")
    assert kv_formats_on(ours, turing) == ("bf16", "fp8"), "our kernels need no FP8 hardware"
    assert kv_formats_on(vllm, turing) == ("bf16",)
    assert kv_formats_on(vllm, turing, "fp8") == ()
    assert kv_formats_on(ours, cpu) == ("bf16",)
    assert kv_formats_on(ours, cpu, "fp8") == ("fp8",), "who asks may have it"
    for option in (replace(ours, model=rough), replace(vllm, model=rough)):
        assert kv_formats_on(option, card) == ("bf16",)
        assert kv_formats_on(option, card, "fp8") == (), "it would cost 0.55 nats a token"
    ggml = Option(rough, "llamacpp", "fp8", "fp8")
    assert kv_formats_on(ggml, card) == ("bf16",)
    assert kv_formats_on(ggml, card, "fp8") == ("fp8",), "which has a scale for every 32 values there"


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3",
     "microsoft/Phi-4-mini-instruct", "Qwen/Qwen2.5-VL-3B-Instruct", "OpenGVLab/InternVL3-2B-hf"],
)  # fmt: skip
@pytest.mark.sample("Qwen/Qwen2.5-1.5B-Instruct", "microsoft/Phi-4-mini-instruct")
def test_an_fp8_cache_is_refused_by_name_where_keys_have_no_norm(name: str) -> None:
    facts = catalogue_facts(name)
    assert facts is not None
    images = 1 if facts.vision else 0
    refused = solve([Candidate(facts)], machine(48 * GIB), Wishes(kv_cache="fp8", images=images))
    assert refused.choice is None
    assert any("0.55 nats a token" in refusal.text for refusal in refused.refusals)
    for size in range(4, 48, 3):
        choice = solve([Candidate(facts)], machine(size * GIB), Wishes(images=images)).choice
        assert choice is None or choice.settings.kv == "bf16", size


def test_transformers_keeps_a_window_but_at_first_as_a_view_of_the_whole_prompt() -> None:
    """Why a plan has "keys and values beyond windows" while a prompt is computed, and no longer."""
    layer = DynamicSlidingWindowLayer(sliding_window=16)
    token = 2 * 8 * 4  # two heads of eight values, float32

    def held(new: int) -> int:
        states = torch.zeros(1, 2, new, 8)
        layer.update(states, states)
        return layer.keys.untyped_storage().nbytes()

    assert held(64) == 64 * token
    assert held(1) == 16 * token

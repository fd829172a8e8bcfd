"""Questions "will it fit, and how" of public threads: what happened there, and what the plan says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts, q4_k_m
from snugvl.checkpoint.catalogue import four_bits as awq
from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.memory_kinds import Kind
from snugvl.hardware.describe import describe
from snugvl.planner.engines.llamacpp.footprint import cache_bytes
from snugvl.planner.footprint.total import Footprint
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Plan
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.docs.published_vllm import fp8

VLLM = {"backend": "vllm"}


@dataclass(frozen=True)
class Asked:
    """One thread. `holds`: whether the plan agrees with what happened."""

    thread: str
    happened: str
    model: str
    gpu: str
    count: int
    wishes: dict[str, Any]
    holds: Callable[[Plan], bool]
    form: Callable[[ModelFacts], ModelFacts] = lambda facts: facts
    machine: dict[str, Any] = field(default_factory=dict)


def fits(plan: Plan, gpus: int | None = None) -> bool:
    return plan.choice is not None and gpus in (None, plan.choice.settings.gpus)


def weights_bytes(footprint: Footprint) -> int:
    return sum(part.nbytes for part in footprint.counted if part.kind.group is Kind.WEIGHTS)


def whole(plan: Plan) -> bool:
    return plan.choice is not None and not (plan.choice.option.offload or plan.choice.budget.device.cpu)


def refuses(plan: Plan) -> bool:
    return plan.choice is None


ASKED = (
    Asked(
        "vllm-project/recipes#971",
        "AWQ, tensor parallel 2, served 262,144 tokens of context",
        "Qwen/Qwen3.8-27B",
        "rtx-3090",
        2,
        VLLM | {"context": 262_144},
        lambda plan: fits(plan, 2),
        awq,
    ),
    Asked(
        "noonghunna/club-3090#1028",
        "FP8, tensor parallel 4, runs with 21.4 GiB of each card",
        "Qwen/Qwen3.8-27B",
        "rtx-3090",
        4,
        VLLM,
        fits,
        fp8,
    ),
    Asked(
        "vllm-project/vllm#41695",
        "FP8 runs out, or has no memory for cache blocks, whatever the utilisation",
        "Qwen/Qwen3.6-27B",
        "rtx-5090",
        1,
        VLLM | {"context": 16_384},
        refuses,
        fp8,
    ),
    Asked(
        "vllm-project/vllm#17469",
        "bf16 runs on four A10 without CUDA graphs; the same decoder as text alone",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "a10",
        4,
        VLLM | {"context": 1024, "images": 0, "language_only": True},
        fits,
    ),
    Asked(
        "QwenLM/Qwen3-VL#1586",
        "bf16 has about 60 GB of weights and runs on one 80 GB card",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "h100",
        1,
        {},
        lambda plan: fits(plan, 1),
    ),
    Asked(
        "QwenLM/Qwen3-VL#1489",
        "FP8 runs on eight H100 of 80 GB, its makers say",
        "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8",
        "h100",
        8,
        VLLM,
        fits,
    ),
    Asked(
        "QwenLM/Qwen3-VL#1489",
        "16-bit weights run on eight H200, its makers say",
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        "h200",
        8,
        VLLM,
        fits,
    ),
    Asked(
        "QwenLM/Qwen3#845",
        "a 7B in 16 bits ran out on a small card; it needs at least 16 GB, its makers say",
        "Qwen/Qwen2.5-7B-Instruct",
        "rtx-3060",
        1,
        VLLM | {"images": 0},
        refuses,
    ),
    Asked(
        "sgl-project/sglang#6082",
        "AWQ of a 72B was loaded and served on four RTX 4090",
        "Qwen/Qwen2.5-VL-72B-Instruct",
        "rtx-4090",
        4,
        VLLM,
        lambda plan: fits(plan, 4),
        awq,
    ),
    Asked(
        "vllm-project/vllm#22173",
        "four V100 run out with ten pictures; today's vLLM has nothing for them",
        "Qwen/Qwen2.5-VL-72B-Instruct",
        "v100",
        4,
        VLLM,
        refuses,
        awq,
    ),
    Asked(
        "vllm-project/vllm#25631",
        "3B on an A100 of 40 GB: 25.05 GiB for the cache without videos",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "a100-40gb",
        1,
        VLLM,
        lambda plan: (
            plan.choice is not None
            and 20 < (plan.choice.spare_bytes + plan.choice.footprint.named("KV cache")) / 2**30 < 31
        ),
    ),
    Asked(
        "vllm-project/vllm#10517",
        "bf16 on one RTX 3090: 20,000 and 35,000 tokens of context were served",
        "meta-llama/Llama-3.1-8B-Instruct",
        "rtx-3090",
        1,
        VLLM | {"context": 35_000, "images": 0},
        fits,
    ),
    Asked(
        "vllm-project/vllm#7767",
        "bf16 in 24 GB served 8,000 tokens of context",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "rtx-4090",
        1,
        VLLM | {"context": 8000, "images": 0},
        fits,
    ),
    Asked(
        "vllm-project/vllm#20726",
        "no memory for a cache of the model's whole context in 16 GB",
        "Qwen/Qwen2.5-7B-Instruct",
        "rtx-5060-ti",
        1,
        VLLM | {"context": 32_768, "images": 0},
        refuses,
        machine={"vram": "16GiB"},
    ),
    Asked(
        "vllm-project/vllm#16570",
        "bf16 takes 34.43 GiB on each of four A100 of 40 GB; vLLM 0.8 ran out there by its largest picture",
        "Qwen/Qwen2.5-VL-72B-Instruct",
        "a100-40gb",
        4,
        VLLM | {"context": 4096, "max_pixels": 1_048_576},
        lambda plan: (
            fits(plan, 4)
            and plan.choice is not None
            and 34.1 < weights_bytes(plan.choice.footprint) / 2**30 < 34.7
        ),
    ),
    Asked(
        "nosana-ci/pipeline-templates#170",
        "18.78 of 23.5 GiB were free: nothing was left for the cache of a 9B in bf16",
        "Qwen/Qwen3.5-9B",
        "rtx-4090",
        1,
        VLLM | {"context": 32_768},
        refuses,
        machine={"held": "4830MiB"},
    ),
    Asked(
        "nosana-ci/pipeline-templates#170",
        "the 4B runs there with 16,384 tokens",
        "Qwen/Qwen3.5-4B",
        "rtx-4090",
        1,
        VLLM | {"context": 16_384},
        fits,
        machine={"held": "4830MiB"},
    ),
    Asked(
        "QwenLM/Qwen3-VL#1507",
        "bf16 on eight H100 ran once the context was 8,192 tokens, with eight requests at once",
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        "h100",
        8,
        VLLM | {"context": 8192},
        lambda plan: fits(plan, 8),
    ),
    Asked(
        "QwenLM/Qwen3-VL#1888",
        "FP8 runs on four A100 of 80 GB, which have no arithmetic for it, with 32,768 tokens",
        "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8",
        "a100",
        4,
        VLLM | {"context": 32_768},
        lambda plan: fits(plan, 4),
    ),
    Asked(
        "noonghunna/club-3090#1087",
        "FP8, tensor parallel 2: 12.26 GiB of each RTX 5090 were left for the cache",
        "Qwen/Qwen3.8-27B",
        "rtx-5090",
        2,
        VLLM,
        lambda plan: (
            fits(plan, 2)
            and plan.choice is not None
            and 9 < (plan.choice.spare_bytes + plan.choice.footprint.named("KV cache")) / 2**30 < 14
        ),
        fp8,
    ),
    Asked(
        "ollama/ollama#10341",
        "Q4_K_M of a 12B is whole on an RTX 3060 of 12 GB",
        "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
        "rtx-3060",
        1,
        {"backend": "llamacpp", "context": 2048},
        whole,
    ),
    Asked(
        "vllm-project/vllm-metal#328",
        "four bits of a 7B run on an M4 with 16 GB, 8,192 tokens",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "m4",
        1,
        {"backend": "llamacpp", "context": 8192, "images": 0},
        whole,
        lambda facts: q4_k_m(facts, "Mistral-7B-Instruct-v0.3-Q4_K_M"),
        {"os": "macos", "ram": "16GiB"},
    ),
)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.thread} {asked.gpu}")
def test_the_plan_says_what_happened(asked: Asked) -> None:
    facts = catalogue_facts(asked.model)
    assert facts is not None
    on = describe(asked.gpu, count=asked.count, **{"ram": "256GiB"} | asked.machine)
    plan = solve([Candidate(asked.form(facts))], on, Wishes(**asked.wishes))
    assert asked.holds(plan), asked.happened


def test_a_cache_in_eight_bits_is_what_lm_studio_logged(tmp_path: Any) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1176: Qwen3-VL-8B, 16,384 tokens in q8_0: 1,224 MiB."""
    facts = catalogue_facts("Qwen/Qwen3-VL-8B-Instruct")
    assert facts is not None
    cache, states = cache_bytes(inventory(facts), Settings("llamacpp", kv="fp8", context=16_384), gpu=True)
    assert (cache, states) == (1224 << 20, 0)

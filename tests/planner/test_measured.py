"""The formulas of transformers against what an H200 measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.read import facts_of
from snugvl.planner.engines.native.footprint import largest_bytes
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import phase_bytes, qwen3_vl

PATH = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "h200" / "plan_vs_transformers.json"
NATIVE = json.loads(PATH.with_name("plan_vs_native.json").read_text())["results"]
RESULTS = json.loads(PATH.read_text())["results"]


@pytest.mark.parametrize("result", RESULTS, ids=[result["checkpoint"] for result in RESULTS])
def test_every_cell(result: dict[str, Any]) -> None:
    model = inventory(qwen3_vl(result["checkpoint"].upper()))
    assert weight_bytes(model, Settings("transformers")) == pytest.approx(
        result["load"]["weights_bytes"], rel=0.001
    )
    assert len(result["cells"]) == 9
    for cell in result["cells"]:
        measured, settings = cell["measured"], Settings(
            "transformers", context=cell["context"], max_pixels=cell["side"] ** 2
        )  # fmt: skip
        plan = footprint(model, settings, Device(result["context_bytes"], context_measured=True))
        kept = plan.named("pixel values")
        assert phase_bytes(plan, "vision") + kept == pytest.approx(measured["vision_bytes"], rel=0.01)
        live = phase_bytes(plan, "prefill") - plan.named("fragmentation") + plan.named("KV cache") + kept
        assert live == pytest.approx(measured["prefill_bytes"], rel=0.005)
        assert -0.005 < plan.total_bytes / measured["used_bytes"] - 1 < 0.06


@pytest.mark.parametrize(("size", "lowest", "highest"), [("2B", 4.22, 4.30), ("4B", 6.5, 6.7)])
def test_vllm_needs_what_it_was_seen_to_need(size: str, lowest: float, highest: float) -> None:
    """GiB with context: vLLM 0.22.1 on an H200, eager, one sequence, 1 megapixel, 2,112 tokens."""
    facts = facts_of(f"Qwen/Qwen3-VL-{size}-Instruct-FP8", offline=True)
    settings = Settings("vllm", "fp8", context=2112, max_pixels=1 << 20, sequences=1)
    needed = footprint(inventory(facts), settings, Device(719 << 20, True, (9, 0)))
    assert lowest <= needed.total_bytes / 2**30 <= highest


def settings_of(subject: str) -> Settings:
    """Settings as `subject_of` wrote them, before there were experts in host memory and graphs of drafts."""
    later = ("expert_slots", "page_locked", "draft_graphs")
    names = [name for name in Settings._fields if name not in later]
    values = {
        name: None if text == "None" else text == "True" if text in ("True", "False") else text
        for name, text in zip(names, subject.split(" ")[1:], strict=True)
    }
    return Settings(**{n: int(v) if isinstance(v, str) and v.isdigit() else v for n, v in values.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "result", NATIVE, ids=[f"{r['checkpoint']} {r['wished']} {r['cell']}" for r in NATIVE]
)
def test_our_engine_takes_what_is_planned(result: dict[str, Any]) -> None:
    """benchmarks/plan_vs_native.py, an H200: every row of the ledger, with all slots taken, planned today."""
    model = inventory(qwen3_vl("2B" if result["checkpoint"].startswith("2b") else "4B", fp8=True))
    settings = settings_of(result["subject"])
    assert (settings.context, settings.max_pixels) == (result["context"], result["max_pixels"])
    measured = {name: row[1] for name, row in result["rows"].items()}
    plan = footprint(model, settings, Device(710 << 20, True, (9, 0), multiprocessors=132))
    vision = plan.named("weights: vision tower")
    assert vision == measured["vision weights"]
    assert plan.named("weights: ") - vision == measured["text weights"]
    assert abs(plan.named("KV cache") - measured["KV cache"]) <= 2 << 20  # an allocator's step
    # Holes in the pool were not planned on that day, and no step that was recorded there needed them.
    holes = largest_bytes(model, settings) if settings.step_graphs else 0
    graphs = plan.named("CUDA graphs") + plan.named("cuBLAS workspace")
    assert 0 <= graphs - measured["CUDA graphs"] - holes <= 100 << 20
    driver = plan.named("CUDA context") + plan.named("compiled kernels") + plan.named("driver's part")
    assert 0 <= driver - (32 << 20) - measured["CUDA context and libraries"] <= 110 << 20
    assert 0 <= plan.total_bytes - result["process_bytes"] - holes <= 256 << 20

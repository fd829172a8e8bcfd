"""The formulas of transformers against what an H200 measured (benchmarks/plan_vs_transformers.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.read import facts_of
from snugvl.planner.footprint.native import LATE_BYTES
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import qwen3_vl

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
        assert plan.phase_bytes("vision") + kept == pytest.approx(measured["vision_bytes"], rel=0.01)
        live = plan.phase_bytes("prefill") - plan.named("fragmentation") + plan.named("KV cache") + kept
        assert live == pytest.approx(measured["prefill_bytes"], rel=0.005)
        assert -0.005 < plan.total_bytes / measured["used_bytes"] - 1 < 0.06


# Kernels that came after these runs (6 MiB: h200/never_oom.json), and room for late ones.
SINCE = (8 << 20) + LATE_BYTES


@pytest.mark.parametrize(("size", "lowest", "highest"), [("2B", 4.22, 4.30), ("4B", 6.5, 6.7)])
def test_vllm_needs_what_it_was_seen_to_need(size: str, lowest: float, highest: float) -> None:
    """GiB with context: vLLM 0.22.1 on an H200, eager, one sequence, 1 megapixel, 2,112 tokens."""
    facts = facts_of(f"Qwen/Qwen3-VL-{size}-Instruct-FP8", offline=True)
    settings = Settings("vllm", "fp8", context=2112, max_pixels=1 << 20, sequences=1)
    needed = footprint(inventory(facts), settings, Device(719 << 20, True, (9, 0)))
    assert lowest <= needed.total_bytes / 2**30 <= highest


@pytest.mark.parametrize("result", NATIVE, ids=[f"{r['checkpoint']} {r['weights']}" for r in NATIVE])
def test_our_engine_takes_what_is_planned(result: dict[str, Any]) -> None:
    """benchmarks/plan_vs_native.py, an H200: every row of the ledger, with all slots taken."""
    size = "2B" if result["checkpoint"].startswith("2b") else "4B"
    model = inventory(qwen3_vl(size, fp8="fp8" in result["checkpoint"]))
    weights, _, head = result["weights"].partition(", ")
    settings = Settings(
        "native", weights, "int8" if head else "bf16", context=result["context"],
        max_pixels=result["max_pixels"], eager=False,
    )  # fmt: skip
    measured = {name: row[1] for name, row in result["rows"].items()}
    plan = footprint(model, settings, Device(719 << 20, True, (9, 0), multiprocessors=132))
    vision = plan.named("weights: vision tower")
    assert vision == measured["vision weights"]
    assert plan.named("weights: ") - vision == measured["text weights"]
    assert abs(plan.named("CUDA graphs") - measured["CUDA graphs"]) <= 4 << 20
    context = plan.named("CUDA context") + plan.named("compiled kernels") - (32 << 20)
    assert abs(context - measured["CUDA context and libraries"]) <= 8 << 20
    whole = plan.total_bytes - plan.named("KV cache") + measured["KV cache"]
    assert whole - result["process_bytes"] >= -(64 << 20)
    # What isn't in these runs: others that decode while an image is encoded.
    beyond = plan.named("vision workspace while") + SINCE
    assert whole - result["process_bytes"] <= beyond + (64 << 20)

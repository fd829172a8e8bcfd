"""The formulas of transformers against what an H200 measured (benchmarks/plan_vs_transformers.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import qwen3_vl

PATH = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "h200" / "plan_vs_transformers.json"
RESULTS = json.loads(PATH.read_text())["results"]


@pytest.mark.parametrize("result", RESULTS, ids=[result["checkpoint"] for result in RESULTS])
def test_every_cell(result: dict[str, Any]) -> None:
    model = inventory(qwen3_vl(result["checkpoint"].upper()))
    assert weight_bytes(model, "bf16") == pytest.approx(result["load"]["weights_bytes"], rel=0.001)
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

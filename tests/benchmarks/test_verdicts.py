"""What the benchmarks conclude from what they saw; the measuring itself needs a machine."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import qwen2_5_vl

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
MIB = 1 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script as running it does."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(BENCHMARKS)]:
        del sys.modules[name]


@pytest.mark.parametrize("needed", [65, 320, 640, 1000, 1024])
def test_the_smallest_card_is_found_to_a_step(script: Any, needed: int) -> None:
    fits = script("fits")
    tried: list[int] = []
    found = fits.smallest(64, 1024, lambda mib: tried.append(mib) or mib >= needed)
    assert found == -(-needed // fits.STEP) * fits.STEP
    assert len(tried) == len(set(tried)) <= 6


def test_a_card_on_which_nothing_serves_is_no_result(script: Any) -> None:
    assert script("fits").smallest(64, 1024, lambda _: False) is None


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"cap_bytes": None, "neighbour_grew_mib": 450}, True),
        ({"wrong": ["500: oops"]}, False),
        ({"restarts": 1}, False),
        ({"process_peak_bytes": 101}, False),
        ({"kv_came_back_s": None}, False),
        ({"neighbour_grew_mib": 450}, False),
        ({"requests": 99}, False),
        ({"outcomes": {"refused: 413": 9}}, False),
    ],
)
def test_the_soak_passes_only_without_a_failure(script: Any, changed: dict[str, Any], good: bool) -> None:
    clean = {
        "wrong": [],
        "restarts": 0,
        "cap_bytes": 100,
        "process_peak_bytes": 99,
        "kv_came_back_s": 10.5,
        "outcomes": {"answered": 1},
        "neighbour_grew_mib": 500,
        "asked": 100,
        "requests": 100,
    }
    assert (not script("never_oom").failures(clean | changed)) is good


@pytest.mark.parametrize(
    ("planned", "taken", "good"),
    [
        (1000, 1000, True),
        (1000, 1064, True),
        (1000, 1065, False),
        (1064, 1000, True),
        (1065, 1000, False),
        (10200, 10000, True),
        (10201, 10000, False),
    ],
)
def test_a_plan_is_held_to_two_percent_or_64_mib(script: Any, planned: int, taken: int, good: bool) -> None:
    row = {"planned_bytes": planned * MIB, "process_bytes": taken * MIB}
    assert script("plan_vs_native").within(row) is good


def test_stages_of_a_start_are_in_the_order_of_time(script: Any) -> None:
    runs = [{"ready": 3.0, "starting": 1.0}, {"ready": 5.0, "starting": 2.0, "warming up": 4.5}]
    rows = script("start_timeline").timeline(runs)
    assert [(row["stage"], row["median_s"], row["seen"]) for row in rows] == [
        ("starting", 1.5, 2), ("ready", 4.0, 2), ("warming up", 4.5, 1),
    ]  # fmt: skip


def test_a_pictures_room_is_what_the_model_makes_of_it(script: Any, tmp_path: Path) -> None:
    """Qwen2.5-VL has 28×28 pixels a token, Qwen3-VL 32×32."""
    tokens = script("plan_vs_native").picture_tokens
    assert tokens(str(qwen2_5_vl.write(tmp_path)), 1024, 1024**2) == 36**2
    assert tokens("pocket", 128, 128**2) == 4**2


def test_a_prompt_that_fills_the_context_leaves_room_for_the_picture(script: Any) -> None:
    sent: list[Any] = []
    model = SimpleNamespace(
        capabilities=SimpleNamespace(images=True, max_pixels=64**2, context_tokens=1000),
        chat=lambda message, *_: sent.append(message),
        backend=SimpleNamespace(tokenize=lambda text: SimpleNamespace(ids=text.split())),
    )
    script("plan_vs_native").fill(model, 1, lambda side, most: 300 if (side, most) == (64, 64**2) else 0)
    assert (
        sum(part.text.count("word") for part in sent[0].content if hasattr(part, "text")) == 1000 - 300 - 256
    )


def test_the_oracle_says_that_nothing_was_recorded(script: Any) -> None:
    said = script("gpu_oracle").recordings_said
    assert said([1, 2], [1, 2]) == ""
    assert "OTHERS" in said([1, 2], [1, 3])
    assert "none" in said([1, 2], None)


def test_hostile_requests_differ_between_runs_and_come_again_with_a_seed(script: Any) -> None:
    load = script("hostile").Load
    one, again, other = (load("http://x", 10, 1.0, seed) for seed in (7, 7, 8))
    bodies = [[each.body() for _ in range(6)] for each in (one, again, other)]
    assert bodies[0] == bodies[1] != bodies[2]
    assert {body["max_tokens"] for body in bodies[0]} <= {1, 8, 32, 64, 400}


def test_how_the_driver_grows_is_told_by_requests(script: Any) -> None:
    trace = script("driver_bytes").DriverTrace()
    for asked, context, late in ((0, 700, 0), (40, 740, 0), (90, 740, 2), (90, 730, 0), (300, 740, 6)):
        rows = [{"name": "CUDA context and libraries", "measured_bytes": context * MIB}]
        trace.add(asked, {"rows": [*rows, {"name": "late kernels", "measured_bytes": late * MIB}]})
    trace.add(400, {"rows": [{"name": "CUDA context and libraries", "measured_bytes": None}]})
    assert [trace.at(n) for n in (0, 89, 200, 2000)] == [n * MIB for n in (700, 740, 742, 746)]
    assert trace.largest_step == 40 * MIB

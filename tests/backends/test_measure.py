"""The ledger of a GPU and of host memory, whose figures stand in for a driver's, torch's and the system's."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from snugvl.backends import measure
from snugvl.backends.measure import CONTEXT, GRAPHS, INTERPRETER, LATE, Meter
from snugvl.core.ledger import Ledger
from snugvl.core.service import Load

MIB = 1 << 20
PLANNED = {
    "text weights": 400 * MIB,
    "KV cache": 200 * MIB,
    "workspace": 110 * MIB,
    GRAPHS: 60 * MIB,
    CONTEXT: 300 * MIB,
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch holds 760 MiB, 50 of them for graphs and 40 in tensors beside weights and cache."""
    segments = [
        {"total_size": 50 * MIB, "segment_pool_id": (0, 1)},
        {"total_size": 710 * MIB, "segment_pool_id": (0, 0)},
    ]
    stands_in: dict[str, Any] = {
        "mem_get_info": lambda _: (900 * MIB, 2000 * MIB),
        "memory_reserved": lambda _: 760 * MIB,
        "memory_allocated": lambda _: 690 * MIB,
        "memory_snapshot": lambda **_: segments,
        "get_device_name": lambda _: "a GPU",
    }
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measure, "process_reader", lambda _: lambda: 1070 * MIB)


def test_encoder_outputs_are_part_of_the_workspace_on_a_gpu(card: None) -> None:
    """Both share one piece, which is held from the first step on: planned and measured are the same thing."""
    kept: list[tuple[Ledger, Load]] = []
    meter = Meter(
        torch.device("cuda"),
        PLANNED,
        {"text weights": 400 * MIB},
        200 * MIB,
        keep=lambda *shown: kept.append(shown),
    )
    memory = {"kv_cache": 200 * MIB, "encoder_outputs": 30 * MIB, "vision_inputs": 0}
    load = Load(num_blocks=10, free_blocks=5, recorded=3)
    ledger = meter.read(memory, load)
    assert {row.name: row.measured_bytes for row in ledger.rows} == PLANNED | {
        GRAPHS: 50 * MIB,
        CONTEXT: 310 * MIB,
    }
    workspace = ledger.row("workspace")
    assert workspace is not None
    assert workspace.used_bytes == 40 * MIB
    assert sum(row.measured_bytes or 0 for row in ledger.rows) == ledger.process_bytes
    assert kept == [(ledger, load)]


def test_what_the_driver_holds_beyond_the_plan_are_late_kernels(card: None) -> None:
    planned = PLANNED | {CONTEXT: 305 * MIB, LATE: 16 * MIB}
    meter = Meter(torch.device("cuda"), planned, {"text weights": 400 * MIB}, 200 * MIB)
    ledger = meter.read({"kv_cache": 200 * MIB}, Load())
    late = ledger.row(LATE)
    assert late is not None
    assert (late.planned_bytes, late.measured_bytes) == (16 * MIB, 5 * MIB)
    assert sum(row.measured_bytes or 0 for row in ledger.rows) == ledger.process_bytes


def test_a_reading_that_torch_changed_meanwhile_is_read_again(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread gave 300 MiB of its cache back between the two counts: no 300 MiB of kernels."""
    held = iter([1060 * MIB, 760 * MIB])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: next(held, 760 * MIB))
    process = iter([1370 * MIB])
    monkeypatch.setattr(measure, "process_reader", lambda _: lambda: next(process, 1070 * MIB))
    meter = Meter(torch.device("cuda"), PLANNED, {"text weights": 400 * MIB}, 200 * MIB)
    context = meter.read({"kv_cache": 200 * MIB}, Load()).row(CONTEXT)
    assert context is not None
    assert context.measured_bytes == 310 * MIB


def test_a_reading_that_never_settles_is_none(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter(range(760 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: next(held))
    meter = Meter(torch.device("cuda"), PLANNED, {"text weights": 400 * MIB}, 200 * MIB)
    row = meter.read({"kv_cache": 200 * MIB}, Load()).row(CONTEXT)
    assert row is not None
    assert row.measured_bytes is None


def test_in_host_memory_libraries_and_shared_pixels_are_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 MiB that came while it ran, 20 are pages of libraries and 10 pixels that the server shares."""
    held = {"RssFile": 100 * MIB, "RssShmem": 0}
    process = psutil.Process()
    rss = 400 * MIB
    monkeypatch.setattr(measure, "resident", lambda kind: held[kind])
    monkeypatch.setattr(type(process), "memory_info", lambda _: SimpleNamespace(rss=rss))
    meter = Meter(torch.device("cpu"), {"workspace": 38 * MIB}, {"text weights": 20 * MIB}, 80 * MIB)
    rss += 60 * MIB
    held |= {"RssFile": 120 * MIB, "RssShmem": 10 * MIB}
    memory = {"kv_cache": 80 * MIB, "encoder_outputs": 0, "vision_inputs": 5 * MIB}
    ledger = meter.read(memory, Load(num_blocks=8, free_blocks=8))
    measured = {row.name: (row.measured_bytes or 0) // MIB for row in ledger.rows}
    assert measured == {
        "text weights": 20,
        "KV cache": 80,
        "encoder outputs": 0,
        "image inputs": 15,
        INTERPRETER: 320,
        "workspace": 25,
    }
    assert sum(measured.values()) == 460

"""Figures measured on this machine, and the cost of a context among them."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.core.folders import cache_folder
from snugvl.core.sizes import GIB, MIB
from snugvl.errors import EngineError
from snugvl.hardware import calibration
from snugvl.hardware.calibration import (
    Calibration,
    ContextStages,
    MeasuredOn,
    Measurement,
    add,
    calibration_file,
    load,
    place_of,
)
from snugvl.hardware.machine import Gpu

GPU = Gpu(0, "NVIDIA GeForce RTX 5060", 8 * GIB, 7 * GIB, (12, 0), driver="581.57", uuid="GPU-1")
PLACE = MeasuredOn("NVIDIA GeForce RTX 5060", "581.57", "2.13.0", "0.2")


def measurement(component: str = "graphs", measured: int = 40 * MIB, **changes: object) -> Measurement:
    figure = Measurement(
        PLACE.gpu,
        PLACE.driver,
        PLACE.torch,
        PLACE.snugvl,
        "native",
        component,
        "2B-fp8",
        64 * MIB,
        measured,
        "now",
    )
    return replace(figure, **changes)  # type: ignore[arg-type]


def test_what_is_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.json"
    add(path, [measurement(), measurement("weights")])
    add(path, [measurement(measured=41 * MIB)])
    found = load(path)
    assert (len(found.measurements), found.note) == (2, None)
    graphs = found.measured("native", "graphs", PLACE, subject="2B-fp8")
    assert graphs is not None
    assert graphs.measured_bytes == 41 * MIB
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".tmp"] == []


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "snugvl"])
def test_a_figure_holds_only_where_it_was_measured(field: str) -> None:
    found = Calibration((measurement(),))
    assert found.measured("native", "graphs", PLACE, subject="2B-fp8")
    elsewhere = replace(PLACE, **{field: "another"})
    assert found.measured("native", "graphs", elsewhere, subject="2B-fp8") is None


def test_the_exact_figure_comes_first() -> None:
    general = measurement(engine="any", snugvl="", measured=1)
    found = Calibration((measurement(measured=2), general))
    exact = found.measured("native", "graphs", PLACE, subject="2B-fp8")
    other = found.measured("vllm", "graphs", replace(PLACE, snugvl="0.9"), subject="2B-fp8")
    assert (exact and exact.measured_bytes, other and other.measured_bytes) == (2, 1)
    assert found.measured("native", "graphs", PLACE) is None
    assert found.measured("native", "weights", PLACE, subject="2B-fp8") is None
    assert found.measured("native", "graphs", None, subject="2B-fp8") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", '{"schema": 1}', '{"schema": 9, "measurements": []}', "\x00",
     '{"schema": 1, "measurements": [{}]}', '{"schema": 1, "measurements": 7}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty_and_heals(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    found = load(path)
    assert found.measurements == ()
    assert found.note is not None
    assert str(path) in found.note
    add(path, [measurement()])
    assert load(path).measurements == (measurement(),)


@pytest.mark.parametrize(("field", "value"), [("measured_bytes", -1), ("measured_bytes", "7"), ("gpu", None)])
def test_a_figure_that_cannot_be(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "m.json"
    add(path, [measurement()])
    document = json.loads(path.read_text())
    document["measurements"][0][field] = value
    path.write_text(json.dumps(document))
    assert load(path).note is not None


def test_no_file_is_no_news(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json") == Calibration()
    assert load(tmp_path).note is not None


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"

    def slow_load(path: Path) -> Calibration:
        found = load(path)
        time.sleep(0.005)  # between reading and writing, where another writer could come in
        return found

    monkeypatch.setattr(calibration, "load", slow_load)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: add(path, [measurement(f"c{number}")]), range(12)))
    assert len(load(path).measurements) == 12


def test_places() -> None:
    assert place_of(GPU, torch="2.13.0", snugvl="0.2") == PLACE
    assert place_of(replace(GPU, driver=None)) is None
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/snugvl")


QUIET = ContextStages(7000 * MIB, 6700 * MIB, 6650 * MIB, 6560 * MIB, 6570 * MIB, 7000 * MIB)


def test_a_context_is_measured_once_and_recalled(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert calibration.recall(GPU, environ) is None
    stages = calibration.measure(GPU, environ, lambda gpu, environ: QUIET)
    assert (stages.driver_bytes, stages.context_bytes) == (300 * MIB, 430 * MIB)
    assert calibration.recall(GPU, environ) == 430 * MIB
    for other in (replace(GPU, driver="582.00"), replace(GPU, name="NVIDIA L4"), replace(GPU, driver=None)):
        assert calibration.recall(other, environ) is None


def test_cudas_total_is_remembered_with_it(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    calibration.measure(GPU, environ, lambda gpu, environ: QUIET)
    assert calibration.recall_total(GPU, environ) is None  # that process told none
    told = replace(QUIET, total=7803 * MIB)
    calibration.measure(GPU, environ, lambda gpu, environ: told)
    assert calibration.recall_total(GPU, environ) == 7803 * MIB
    assert calibration.recall(GPU, environ) == 430 * MIB
    assert calibration.recall_total(replace(GPU, driver="582.00"), environ) is None


def test_others_that_do_not_hold_still(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    moving = replace(QUIET, end=QUIET.before - 100 * MIB)
    runs = iter([moving, QUIET])
    assert calibration.measure(GPU, environ, lambda gpu, environ: next(runs)) == QUIET
    with pytest.raises(EngineError, match="100 MiB"):
        calibration.measure(GPU, environ, lambda gpu, environ: moving)


def test_a_described_gpu_has_no_context() -> None:
    with pytest.raises(EngineError, match="not probed"):
        calibration.measure(replace(GPU, uuid=None), {})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('torch 2.13.0+cpu cannot')", "torch 2.13.0\\+cpu cannot"),
        ("print('hello')", "hello"),
        ("print('{}')", "{}"),
        ("import sys; sys.exit(3)", "left with 3"),
    ],
)
def test_a_process_that_fails(code: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        calibration._run(GPU, {}, (sys.executable, "-c", code))


def test_the_process_gets_its_gpu_alone() -> None:
    code = (
        "import json, os, sys; assert os.environ['CUDA_VISIBLE_DEVICES'] == sys.argv[1] == 'GPU-1'; "
        "print(json.dumps(dict(before=9, context=8, kernels=7, product=6, settled=6, total=5, end=9)))"
    )
    assert calibration._run(GPU, {}, (sys.executable, "-c", code)) == ContextStages(9, 8, 7, 6, 6, 9, total=5)


def test_estimates_lie_in_the_published_range() -> None:
    low, high = 256 << 20, 719 << 20
    for capability in (None, (7, 5), (8, 9), (9, 0), (12, 0)):
        assert low <= calibration.estimate(replace(GPU, compute_capability=capability)) <= high


def test_the_file_is_in_the_users_cache(tmp_path: Path) -> None:
    assert calibration_file({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "snugvl"

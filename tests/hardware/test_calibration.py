"""Figures measured on this machine, and the cost of a context among them."""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from snugvl.core import kernel_checks
from snugvl.core.folders import cache_folder
from snugvl.core.kernel_checks import CheckedOn, KernelCheck
from snugvl.core.memory_kinds import Kind
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
    with_measured,
)
from snugvl.hardware.machine import Gpu
from snugvl.planner.budget import gpu_budget
from snugvl.planner.engines.native.footprint import KERNEL_BYTES
from snugvl.planner.footprint.total import footprint
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.planner.models import qwen3_vl

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
    assert with_measured(GPU, environ).context_bytes is None
    stages = calibration.measure(GPU, environ, lambda gpu, environ: QUIET)
    assert stages.context_bytes == 430 * MIB
    assert with_measured(GPU, environ).context_bytes == 430 * MIB
    for other in (replace(GPU, driver="582.00"), replace(GPU, name="NVIDIA L4"), replace(GPU, driver=None)):
        assert with_measured(other, environ).context_bytes is None


def test_cudas_total_is_remembered_with_it(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    calibration.measure(GPU, environ, lambda gpu, environ: QUIET)
    assert with_measured(GPU, environ).cuda_total_bytes is None  # that process told none
    told = replace(QUIET, total=7803 * MIB)
    calibration.measure(GPU, environ, lambda gpu, environ: told)
    assert with_measured(GPU, environ).cuda_total_bytes == 7803 * MIB
    assert with_measured(GPU, environ).context_bytes == 430 * MIB
    assert with_measured(replace(GPU, driver="582.00"), environ).cuda_total_bytes is None


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
        ("import sys; sys.exit(3)", "exited with 3"),
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


# What checks of kernels measured. A plan has 32 MiB for compiled kernels beside the context, and what torch
# gives cuBLAS (32 MiB on this card) is part of the context; figures differ by 8 MiB.
ON = CheckedOn(GPU.name, "12.0", "581.57", "2.13.0", "3.7.1+git2f0c", "0.2")


def check(loaded: int, context: int = 300, when: str = "2026-11-27T10:00:00+00:00", **on: str) -> KernelCheck:
    where, job = replace(ON, **on), f"{loaded} {context} {when} {on}"
    nbytes = context * MIB if context >= 0 else -1
    return KernelCheck(where, job, "Toy (int4)", 4.2, when, loaded * MIB, True, (), nbytes)


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    """The GPU with what a few checks and engines left in a cache folder of its own."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(calibration, "torch_build", lambda: SimpleNamespace(version="2.13.0"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.7.1")

    def recalled(*checks: KernelCheck, engine: int = 0, gpu: Gpu = GPU) -> Gpu:
        for each in checks:
            kernel_checks.add(kernel_checks.checks_file(environ), each)
        if engine:
            context = measurement("context", engine * MIB, engine="any", snugvl="", subject="")
            add(calibration_file(environ), [replace(context, when="2026-11-20T10:00:00+00:00")])
        return with_measured(gpu, environ)

    return recalled


def test_a_check_that_took_more_than_is_assumed_is_reserved_and_named(remembered: Callable[..., Gpu]) -> None:
    found = remembered(check(400))
    assert found.context_bytes == (300 + 400 + 32 - 32 + 8) * MIB
    assert found.context_basis == "measured on this card by a check of kernels on 27 Nov 2026"
    budget = gpu_budget(found, "linux")
    assert budget.device.context_measured
    model = inventory(qwen3_vl("2B"))
    plan = footprint(model, Settings("native", eager=False), budget.device)
    context = next(part for part in plan.components if part.kind is Kind.CONTEXT)
    assert (context.nbytes, context.basis) == (708 * MIB, "measured")
    assert context.why == "measured on this card by a check of kernels on 27 Nov 2026"
    assert context.nbytes + KERNEL_BYTES >= (300 + 400) * MIB, "no looser than what was measured"


def test_a_check_that_took_less_leaves_what_is_assumed(remembered: Callable[..., Gpu]) -> None:
    found = remembered(check(100))
    assert found.context_bytes is None
    assert found.context_basis == "documented default; a check of kernels on 27 Nov 2026 saw no more"
    device = gpu_budget(found, "linux").device
    assert (device.context_bytes, device.context_measured) == (calibration.estimate(GPU), False)


@pytest.mark.parametrize("loaded", [60, 150, 400])
def test_an_engines_figure_counts_whatever_a_check_took(remembered: Callable[..., Gpu], loaded: int) -> None:
    found = remembered(check(loaded), engine=500)
    assert found.context_bytes == 500 * MIB
    assert found.context_basis == "measured on this card on 20 Nov 2026"


def test_the_most_of_several_checks_counts_whatever_its_age(remembered: Callable[..., Gpu]) -> None:
    old = check(420, when="2024-02-29T10:00:00+00:00", snugvl="0.1")
    found = remembered(old, check(300), check(350, when="2026-11-26T10:00:00+00:00"))
    assert found.context_bytes == (300 + 420 + 8) * MIB
    assert found.context_basis.endswith("by a check of kernels on 29 Feb 2024")


def test_without_the_bare_context_it_is_what_the_estimate_leaves(remembered: Callable[..., Gpu]) -> None:
    """Under WSL2 the driver doesn't tell it, and older checks didn't measure it."""
    bare = calibration.estimate(GPU) // MIB - 193
    assert remembered(check(193, -1)).context_bytes == (bare + 193 + 8) * MIB
    assert remembered(check(350, -1)).context_bytes == (bare + 350 + 8) * MIB


@pytest.mark.parametrize(
    "on", [{"gpu": "NVIDIA L4"}, {"driver": "582.00"}, {"torch": "2.12.0"}, {"triton": "3.6.0"}]
)
def test_a_check_of_another_place_says_nothing(remembered: Callable[..., Gpu], on: dict[str, str]) -> None:
    found = remembered(check(400, **on))
    assert (found.context_bytes, found.context_basis) == (None, "")
    assert remembered(check(400, **on), check(300)).context_bytes == 608 * MIB
    described = remembered(check(400), gpu=replace(GPU, driver=None))
    assert (described.context_bytes, described.context_basis) == (None, "")


def test_what_can_be_no_context_does_not_count(remembered: Callable[..., Gpu]) -> None:
    """Another program took memory meanwhile: nothing would fit any more."""
    assert remembered(check(5000)).context_bytes is None
    assert remembered(check(5000), check(300)).context_bytes == 608 * MIB
    assert remembered(check(-1)).context_bytes == 608 * MIB, "one that didn't end measured nothing"


@pytest.mark.parametrize("when", ["", "yesterday", "2026-13-40", "٢٠٢٦"])
def test_a_check_without_a_day_counts_all_the_same(remembered: Callable[..., Gpu], when: str) -> None:
    found = remembered(check(400, when=when))
    assert (found.context_bytes, found.context_basis) == (
        708 * MIB,
        "measured on this card by a check of kernels",
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 9, "checks": []}', '{"schema": 1, "checks": [{"on": 3}]}', "\x00\xff"]
)
def test_a_broken_file_of_checks_is_none(remembered: Callable[..., Gpu], tmp_path: Path, text: str) -> None:
    file = kernel_checks.checks_file({"XDG_CACHE_HOME": str(tmp_path)})
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("latin-1"))
    found = remembered(engine=380)
    assert (found.context_bytes, found.context_basis) == (380 * MIB, "measured on this card on 20 Nov 2026")


def test_a_file_of_before_the_bare_context_was_measured_is_read(
    remembered: Callable[..., Gpu], tmp_path: Path
) -> None:
    remembered(check(400))
    file = kernel_checks.checks_file({"XDG_CACHE_HOME": str(tmp_path)})
    document = json.loads(file.read_text())
    for each in document["checks"]:
        del each["context_bytes"]
    file.write_text(json.dumps(document))
    bare = calibration.estimate(GPU) // MIB - 193
    assert remembered().context_bytes == (bare + 400 + 8) * MIB

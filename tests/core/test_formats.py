"""A weight format is a row: what is made, planned and refused follows from it, and nobody else names it."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from benchmarks import house
from snugvl.core import formats
from snugvl.core.formats import FEW_BITS, FORMATS, INTEGERS, QUALITY, FewBits, Format, WeightsName, integer_of
from snugvl.hardware.machine import Machine
from snugvl.layers.weights import WORDS, to_few_bits
from snugvl.planner.capabilities import no_kernels
from snugvl.planner.plan import Plan
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, machine
from tests.planner.models import qwen3_vl

GPU, CPU = machine(8 * GIB), machine(0, gpus=0)
KERNELS = "layers/kernels/products/weights.py"  # a constant of each format, which kernels are compiled for


def test_nobody_but_the_table_names_a_format() -> None:
    """Kernels have one list. With fewer comparisons lower the number."""
    counted = house.House(house.ROOT)
    assert [where.partition(":")[0] for where in counted.format_names()] == [KERNELS]
    assert len(counted.wide_comparisons()) <= 118


def test_the_names_are_those_of_the_rows() -> None:
    assert tuple(FORMATS) == get_args(WeightsName)[1:]
    assert {name for name, form in FORMATS.items() if form.zero} == set(FEW_BITS)
    assert all(integer_of(FORMATS[name].bits) == name for name in INTEGERS)
    assert list(QUALITY)[1:] == list(get_args(formats.Floor))
    assert QUALITY["fp32"] == QUALITY["bf16"] > QUALITY["int8"] > QUALITY["int4"] > QUALITY["any"]
    finest_first = [FORMATS[name].bits for name in FEW_BITS]
    assert finest_first == sorted(finest_first, reverse=True)


@pytest.mark.parametrize("name", FEW_BITS)
def test_a_row_is_whole(name: str) -> None:
    """What was measured has words; codes are in planes that there is a type for."""
    form = FORMATS[name]
    assert set(form.planes) <= set(WORDS)
    assert len(form.planes) <= 2
    assert bool(form.differ) == bool(form.measured)
    assert form.group in formats.GROUPS


@pytest.mark.parametrize("planes", [(4,), (4, 1), (4, 2), (2, 1), (2,), (1, 2)])
def test_codes_of_any_planes_are_held_and_read(
    planes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Format(planes, group=64, zero=True, since=None)
    monkeypatch.setitem(FORMATS, "int4", form)  # type: ignore[index]
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(form.bits))
    made = to_few_bits(values, "int4", form.group)
    assert made.data.dtype == WORDS[planes[0]]
    assert (made.upper is None) == (len(planes) == 1)
    assert 8 * made.nbytes == values.numel() * form.held_bits(64)
    wide = made.wide(torch.float32)
    step = (values.view(6, -1, 64).amax(-1) - values.view(6, -1, 64).amin(-1)) / (2**form.bits - 1)
    assert ((wide - values).view(6, -1, 64).abs().amax(-1) < 1.1 * step).all()
    even = to_few_bits(torch.linspace(-1, 1, 64)[None], "int4", 64).wide(torch.float32)
    assert len(even.unique()) == 2**form.bits


def planned(on: Machine, weights: FewBits | None = None) -> Plan:
    return solve([Candidate(qwen3_vl("8B", fp8=False))], on, Wishes(backend="native", weights=weights))


def test_what_was_never_measured_is_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it costs is said to be unknown."""
    chosen = planned(GPU).choice
    assert chosen is not None
    name = chosen.settings.weights
    assert name in FEW_BITS
    monkeypatch.setitem(FORMATS, name, replace(FORMATS[name], measured={}, differ="", written=None))  # type: ignore[index]
    other = planned(GPU).choice
    assert other is None or other.settings.weights != name
    asked = planned(GPU, name)
    assert asked.choice is not None
    assert asked.choice.settings.weights == name
    assert "was never measured" in plain(report(asked, GPU))


def test_what_has_no_kernels_is_refused_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "int5", replace(FORMATS["int5"], since=None))  # type: ignore[index]
    refused = planned(GPU, "int5")
    assert refused.choice is None
    assert "no GPU has kernels for int5" in plain(report(refused, GPU))
    assert planned(CPU, "int5").choice is not None


def test_a_gpu_that_is_too_old_for_a_format_is_told_so() -> None:
    assert no_kernels("int6", (8, 0)) is None
    assert no_kernels("int6", None) is None
    assert no_kernels("int6", (7, 5)) == "compute capability 7.5 is older than 8.0"
    assert no_kernels("int4", (7, 5)) is None

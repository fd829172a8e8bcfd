"""The table of GPUs and how names find their row."""

import math
import re

import pytest

from snugvl.core.sizes import GIB, MIB
from snugvl.errors import InputError
from snugvl.hardware import gpus


@pytest.mark.parametrize(
    "name", ["rtx-5060", "NVIDIA GeForce RTX 5060", "RTX5060", "geforce rtx 5060", "5060", "Rtx_5060"]
)
def test_spellings_of_the_5060(name: str) -> None:
    model = gpus.lookup(name)
    assert model.product == "NVIDIA GeForce RTX 5060"
    assert (model.total_bytes, model.bandwidth, model.compute_capability) == (8151 * MIB, 448e9, (12, 0))


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("RTX5060 Laptop", "NVIDIA GeForce RTX 5060 Laptop GPU"),
        ("rtx 4090 mobile", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("2080ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("1660 super", "NVIDIA GeForce GTX 1660 SUPER"),
        ("T4", "Tesla T4"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
        ("RTX 3090 24GB", "NVIDIA GeForce RTX 3090"),
        ("rtx4090 24 gb", "NVIDIA GeForce RTX 4090"),
        ("4060 laptop 8GB", "NVIDIA GeForce RTX 4060 Laptop GPU"),
        ("NVIDIA DGX Spark", "NVIDIA GB10"),
        ("gb10", "NVIDIA GB10"),
        ("AMD Radeon(TM) 8060S Graphics", "AMD Radeon 8060S"),
        ("ryzen ai max+ 395", "AMD Radeon 8060S"),
        ("arc b60", "Intel Arc Pro B60"),
    ],
)
def test_other_spellings(name: str, product: str) -> None:
    assert gpus.lookup(name).product == product


@pytest.mark.parametrize("name", ["rtx 3090 12gb", "A770 8GB", "m4 16gb"])
def test_a_size_that_no_such_gpu_has_is_no_name(name: str) -> None:
    assert gpus.find(name) is None


def test_every_row_is_found_by_its_names_and_is_plausible() -> None:
    for model in gpus.known():
        for name in (model.name, model.product, *model.aliases):
            assert model == gpus.find(name, model.total_bytes), name
        assert 4 * GIB <= model.total_bytes <= 192 * GIB or model.memory_source == "host memory"
        assert 60e9 <= model.bandwidth <= 8e12
        assert model.compute_capability is None or (6, 0) <= model.compute_capability <= (12, 1)
        theirs = ("published", *(["host memory"] if model.name != "GB10" else []))
        assert (model.memory_source in theirs) == (model.compute_capability is None)
        assert model.bf16_flops is None or 5e12 <= model.bf16_flops <= 2.5e15


def test_aliases_mean_their_own_row_without_a_size() -> None:
    for model in gpus.known():
        for alias in model.aliases:
            assert gpus.lookup(alias) == model, alias


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("rtx 3090", 71.2), ("rtx 4090", 165.2), ("rtx 5090", 209.5), ("gtx 1660 ti", 10.9), ("rtx 3080", 59.5)],
)
def test_the_formula_gives_the_published_figures(name: str, teraflops: float) -> None:
    """NVIDIA's architecture papers: dense fp16 tensor operations with fp32 accumulation."""
    flops = gpus.lookup(name).bf16_flops
    assert flops is not None
    assert flops / 1e12 == pytest.approx(teraflops, rel=0.003)


def test_memory_tells_two_cards_of_one_name_apart() -> None:
    assert gpus.lookup("rtx 4060 ti").total_bytes == 8188 * MIB
    assert gpus.lookup("NVIDIA GeForce RTX 4060 Ti", 16 * GIB).total_bytes == 16380 * MIB
    assert gpus.lookup("rtx-3080", 12 * GIB).bandwidth == 912e9


@pytest.mark.parametrize(
    ("name", "near"), [("rtx-5061", "rtx-5060"), ("RTX 409", "rtx-4090"), ("a1000", "a100")]
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InputError, match=near) as caught:
        gpus.lookup(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("A6000", "RTX A6000"),
        ("7900 xtx", "RX 7900 XTX"),
        ("9070XT", "RX 9070 XT"),
        ("4070 Ti SUPER", "4070 Ti SUPER"),
    ],
)
def test_a_series_may_be_left_out_where_one_card_alone_is_meant(name: str, product: str) -> None:
    assert gpus.lookup(name).name.endswith(product)
    with pytest.raises(InputError, match="nearest"):
        gpus.lookup("6000")  # of four workstation cards


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("2x RTX 3090", "--gpu 'RTX 3090' --gpus 2"),
        ("rtx 3060, rtx 4090", "doctor --record"),
        ("rtx 3060 + rtx 4090", "doctor --record"),
        ("cpu", "--gpu none"),
    ],
)
def test_what_is_no_single_gpu_is_told_how_it_is_described(name: str, way: str) -> None:
    with pytest.raises(InputError, match=re.escape(way)):
        gpus.lookup(name)


@pytest.mark.parametrize("name", ["", "  ", "banana", "nvidia", "gpu", "💥" * 1000])
def test_nonsense_has_no_neighbours(name: str) -> None:
    with pytest.raises(InputError, match="--vram"):
        gpus.lookup(name)


@pytest.mark.parametrize(
    ("name", "published_gib"),
    [
        ("rtx 4060", (7.60, 7.66)),
        ("rtx 3060", (11.57, 11.63)),
        ("rtx 5060 ti", (15.46, 15.51)),
        ("rtx 3090", (23.56, 23.56)),
        ("rtx 4090", (23.52, 23.52)),
        ("l4", (22.05, 22.05)),
        ("rtx 5090", (31.36, 31.37)),
        ("l40s", (44.39, 44.43)),
        ("h200", (139.80, 139.80)),
    ],
)
def test_cudas_totals_by_the_rule(name: str, published_gib: tuple[float, float]) -> None:
    model = gpus.lookup(name)
    low, high = published_gib
    planned = (model.total_bytes - gpus.reserved_bytes(model.total_bytes)) / GIB
    assert low - 0.05 <= planned <= high + 0.05


def test_suggestions_are_accepted() -> None:
    for wrong in ("rtx-5061", "v10", "gtx 1650s", "l4o", "quadro 5000"):
        for name in gpus.nearest(wrong):
            gpus.lookup(name)


def test_multiprocessors_and_clock_agree_with_the_datasheets_matrix_speed() -> None:
    """Operations a multiprocessor and clock are a power of two, whoever counted them."""
    both = [model for model in gpus.known() if model.cycles_per_s and model.bf16_flops]
    assert len(both) > 90
    for model in both:
        assert model.cycles_per_s is not None
        assert model.bf16_flops is not None
        each = model.bf16_flops / model.cycles_per_s
        nearest = 2 ** round(math.log2(each))
        assert each == pytest.approx(nearest, rel=0.01), model.name
    assert gpus.lookup("rtx-5060").cycles_per_s == pytest.approx(30 * 2.497e9, rel=0.01)
    assert gpus.lookup("h200").cycles_per_s == 132 * 1830e6

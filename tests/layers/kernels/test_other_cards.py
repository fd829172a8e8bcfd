"""Kernels compile for cards that nobody here has, and take no more of them than there is.

`benchmarks/other_cards.py` compiles them without a GPU and keeps a table. Here the table is held to the
sources and to the cards' limits, and some kernels are compiled again: those that differ most from card to
card, or that an interpreter takes and the compiler may not, such as one that writes a cache of bytes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import snugvl
from snugvl.hardware.calibration import STACK_BYTES, estimate_of, local_memory_bytes

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "other_cards.py"
TABLE = ROOT / "benchmarks" / "results" / "other_cards.json"
KERNELS = Path(snugvl.__file__).parent / "layers" / "kernels"
KIB = 1024
SHARED_BYTES = {"RTX 2080": 64 * KIB, "A100": 163 * KIB, "RTX 3060": 99 * KIB, "RTX 4060": 99 * KIB,
                "H200": 227 * KIB, "RTX 5060": 99 * KIB}  # fmt: skip
# Formats from Ampere on (`FORMATS`), and kernels that need a matrix unit that Triton multiplies on, or bf16.
NOT_ON_TURING = {
    "dequantize_planes", "lone_bf16", "lone_byte", "lone_codes", "lone_ggml", "lone_planes", "sixteenth",
    "skinny", "skinny_planes",
}  # fmt: skip


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The script, with kernels that are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """By Triton's version, card and kernel: the most of each figure among the variants of a form."""
    made: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return made


def launched() -> set[str]:
    """Names of all kernels that are launched, by their sources."""
    entry = re.compile(r"^@launched\n@triton\.jit.*\ndef (\w+)", re.MULTILINE)
    return {
        name for path in KERNELS.rglob("*.py") for name in entry.findall(path.read_text(encoding="utf-8"))
    }


def test_every_kernel_is_in_the_table_of_every_card(table: dict[str, Any]) -> None:
    """The newest Triton has compiled some variant of each; of how many forms the table's head says."""
    newest = max(table, key=lambda version: tuple(map(int, version.split("."))))
    assert {"RTX 2080", "RTX 5060"} <= set(table[newest])
    for version, cards in table.items():
        for card, kernels in cards.items():
            compiled = {kernel for kernel, row in kernels.items() if row["variants"] or version != newest}
            lacking = launched() - compiled
            assert lacking == (NOT_ON_TURING if card == "RTX 2080" else set()), (version, card)
            assert set(kernels) <= launched()


def test_nothing_takes_more_than_a_card_has(table: dict[str, Any]) -> None:
    """A larger stack would take memory that no plan counts: `calibration.STACK_BYTES`."""
    for version, cards in table.items():
        for card, kernels in cards.items():
            for kernel, row in kernels.items():
                for form, registers, shared, stack, _spills, *error in row["variants"].values():
                    where = version, card, kernel, form
                    assert not error, where
                    assert 0 < registers <= 255, where
                    assert shared <= SHARED_BYTES[card], where
                    assert stack <= STACK_BYTES, where


def test_the_table_is_of_these_sources() -> None:
    """After a change of a kernel, or of what is chosen for a card: `python benchmarks/other_cards.py`."""
    pytest.importorskip("triton")
    ran = run("--check", "RTX 5060:Qwen3.6-35B-A3B, int4", "RTX 2080:Qwen2.5-0.5B, bf16")
    assert ran.returncode == 0, ran.stderr


def test_local_memory_is_computed_from_the_card() -> None:
    mib = 1 << 20
    assert local_memory_bytes((12, 0), 30) == 30 * 1536 * 1024 == 45 * mib
    assert local_memory_bytes((9, 0), 132) == 264 * mib
    assert local_memory_bytes((7, 5), 46, 216) == 46 * 1024 * 216
    # Published and measured contexts, local memory within them: RTX 6000 Ada, H200.
    assert estimate_of((8, 9), 142) == 450 * mib
    assert estimate_of((9, 0), 132) == estimate_of((9, 0)) == 719 * mib
    assert estimate_of((12, 0), 170) == 492 * mib  # RTX 5090
    assert estimate_of((12, 0), 30) == estimate_of((12, 0)) == 450 * mib


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "names", "network"),
    [
        pytest.param(
            "RTX 5060", {"attend_splits", "rope_and_cache"}, "Qwen3-VL-8B, fp8", marks=pytest.mark.extended
        ),
        pytest.param("RTX 2080", {"gemm"}, "Qwen3-VL-8B, int4", marks=pytest.mark.extended),
        ("RTX 5060", {"choose", "sort_pairs", "add_pairs"}, "Qwen3.6-35B-A3B, int4"),
        pytest.param("RTX 5060", {"grouped"}, "Qwen3.6-35B-A3B, int4", marks=pytest.mark.extended),
        pytest.param("RTX 2080", {"grouped"}, "Qwen3.6-35B-A3B, int4", marks=pytest.mark.extended),
    ],
)
# A kernel that changes is asked for by `test_the_table_is_of_these_sources`; the table is made so.
@pytest.mark.extended
def test_kernels_compile_for_it(card: str, names: set[str], network: str, tmp_path: Path) -> None:
    """By the Triton that is installed."""
    pytest.importorskip("triton")
    out = tmp_path / "cards.json"
    ran = run("--cards", card, "--networks", network, "--only", *names, "--jobs", "1", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    ((_, cards),) = json.loads(out.read_text(encoding="utf-8")).items()
    assert {name for name, row in cards[card].items() if row["variants"]} == names

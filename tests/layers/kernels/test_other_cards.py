"""Kernels compile for cards that nobody here has, and fit their shared memory.

Those that differ most from card to card, or that an interpreter takes and the compiler may not, such as one
that writes a cache of bytes; `benchmarks/other_cards.py` compiles all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Bytes of stack: some registers put aside. A kernel whose operands don't stay in registers takes thousands.
MOST_STACK = 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "shared_kib", "names", "model"),
    [
        ("RTX 5060", 99, {"attend_splits", "rope_and_cache"}, "Qwen3-VL-2B-Instruct"),
        pytest.param("RTX 2080", 64, {"gemm"}, "Qwen3-VL-2B-Instruct", marks=pytest.mark.extended),
        ("RTX 5060", 99, {"grouped", "choose", "sort_pairs", "add_pairs"}, "Qwen3-VL-30B-A3B-Instruct"),
        pytest.param("RTX 2080", 64, {"grouped"}, "Qwen3-VL-30B-A3B-Instruct", marks=pytest.mark.extended),
    ],
)
def test_kernels_compile_for_it(card: str, shared_kib: int, names: set[str], model: str) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    words = [
        "--cards",
        card,
        "--models",
        f"Qwen/{model}",
        "--formats",
        "int4",
        "--only",
        *names,
        "--json",
    ]
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "other_cards.py", *words],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    kernels = found["kernels"]
    assert [kernel["error"] for kernel in kernels if kernel["error"]] == []
    assert {kernel["name"] for kernel in kernels} == names
    assert max(kernel["shared_bytes"] for kernel in kernels) <= shared_kib << 10
    assert max(kernel["stack_bytes"] for kernel in kernels) <= MOST_STACK

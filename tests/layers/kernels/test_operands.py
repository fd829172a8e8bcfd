"""How the compiler lays out operands of few bits: the kernels' speed stands on it, and one's results."""

import json
import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from triton.runtime import driver
from snugvl.layers.kernels.products import linear
from snugvl.layers.kernels.compiler.ahead_of_time import _DescribedDriver
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.kernels.compiler.ahead_of_time import dry_run
from snugvl.layers.weights import UPPER, Weights

H200 = Hardware((9, 0), 132)
found = {}
for name, (kind, tile) in json.loads(sys.argv[1]).items():
    linear.LONE = frozenset({kind} if name.startswith("lone") else ())
    linear.lone_tile = lambda *_, **__: tile
    linear.SKINNY_BYTES = 0
    with dry_run(H200) as launches:
        scale = torch.empty(256, 1024 // 64, dtype=torch.bfloat16, device="meta")
        words = torch.empty(256, 1024 // 8, dtype=torch.int32, device="meta")
        upper = None if kind not in UPPER else torch.empty(256, 1024 // 8, dtype=UPPER[kind], device="meta")
        x = torch.empty(1, 1024, dtype=torch.bfloat16, device="meta")
        linear.product(x, Weights(kind, 256, 1024, words, scale, scale, 64, upper=upper))
    driver.set_active(_DescribedDriver(H200))
    made = launches[-1].kernel.kernel.warmup(*launches[-1].values, grid=(1,), **launches[-1].constants)
    found[name] = launches[-1].name, made.metadata.shared, made.asm["ttgir"]
print(json.dumps(found))
"""
TILES = {
    "skinny": ("int4", None),
    "lone": ("int4", (8, 4, 4, 0)),
    "lone, in rounds": ("int4", (8, 2, 2, 3)),
    "skinny_planes, five bits": ("int5", None),
    "skinny_planes, six bits": ("int6", None),
    "lone_planes, five bits": ("int5", (8, 4, 4, 0)),
    "lone_planes, six bits": ("int6", (8, 4, 4, 0)),
}
REGISTERS = r"{name} = #ttg\.(blocked<{{sizePerThread = \[[1, ]*, 2\]|linear<{{register = \[\[[0, ]*, 1\])"


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[str, int, str]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(TILES)]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[str, int, str]] = json.loads(output)
    return found


@pytest.mark.parametrize("name", TILES)
def test_operands_of_small_groups_stay_in_registers(
    compiled: dict[str, tuple[str, int, str]], name: str
) -> None:
    kernel, shared, _ = compiled[name]
    assert kernel == name.split(",")[0] + ("_rounds" if name.endswith("rounds") else "")
    assert shared <= 4096  # the sums of warps, scales


@pytest.mark.parametrize("name", [name for name, (kind, tile) in TILES.items() if kind == "int4" and tile])
def test_a_thread_holds_two_neighbouring_words_one_after_the_other(
    compiled: dict[str, tuple[str, int, str]], name: str
) -> None:
    """Which `swapped_codes` stands on: its assembly is given two words and mixes them."""
    text = compiled[name][2]
    layouts = set(re.findall(r"elementwise_inline_asm.*-> tensor<[\dx]+xbf16, (#\w+)>", text))
    layouts |= set(re.findall(r"elementwise_inline_asm.*xi32, (#\w+)> -> \(?tensor<[\dx]+xbf16", text))
    assert layouts
    for layout in layouts:
        assert re.search(REGISTERS.format(name=layout), text), re.search(f"{layout} = .*", text)

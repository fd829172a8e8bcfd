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
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from snugvl.core.formats import FORMATS
from snugvl.layers.kernels.products import linear
from snugvl.layers.kernels.products.tiles import Fragments
from snugvl.layers.kernels.compiler.ahead_of_time import _DescribedDriver
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.kernels.compiler.ahead_of_time import dry_run
from snugvl.layers.weights import WORDS, Weights

H200 = Hardware((9, 0), 132)
# Layouts are there before any instruction, whose making takes two thirds of the time.
CUDABackend.make_ptx = lambda self, source, metadata, *_: metadata.update(name="") or ""
CUDABackend.make_cubin = lambda *_: b""
found = {}
for name, (kind, tile) in json.loads(sys.argv[1]).items():
    linear.LONE = frozenset({kind} if name.startswith("lone") else ())
    for each in ("codes", "planes", "byte", "bf16"):
        setattr(linear, each + "_tile", lambda *_, **__: Fragments(*tile))
    linear.SKINNY_BYTES = 0
    columns = 1280 if "rounds" in name else 1024  # of which some warps have less than others
    with dry_run(H200) as launches:
        group = 128 if "rounds" in name else 64
        scale = torch.empty(256, columns // group, dtype=torch.bfloat16, device="meta")
        words = torch.empty(256, columns // 8, dtype=torch.int32, device="meta")
        if kind in ("fp8", "int8"):
            group, form = 128, torch.float8_e4m3fn if kind == "fp8" else torch.int8
            words = torch.empty(256, columns, dtype=form, device="meta")
        if kind == "bf16":
            words = torch.empty(256, columns, dtype=torch.bfloat16, device="meta")
        upper = None
        if bits := FORMATS[kind].upper:
            upper = torch.empty(256, columns // 8, dtype=WORDS[bits], device="meta")
        x = torch.empty(1, columns, dtype=torch.bfloat16, device="meta")
        more = {"norm": x[0], "eps": 1e-6, "swiglu": True} if "rounds" in name else {}
        linear.product(x, Weights(kind, 256, columns, words, scale, scale, group, upper=upper), **more)
    driver.set_active(_DescribedDriver(H200))
    made = launches[-1].kernel.kernel.warmup(*launches[-1].values, grid=(1,), **launches[-1].constants)
    found[name] = launches[-1].name, made.metadata.shared, made.asm["ttgir"]
print(json.dumps(found))
"""
TILES = {
    "skinny": ("int4", None),
    "lone_codes": ("int4", (16, 4, 0, False)),
    "lone_codes, in rounds": ("int4", (16, 2, 1, True)),
    "lone_codes, many rows": ("int4", (32, 1, 1, False)),
    "lone_planes, five bits": ("int5", (8, 4, 0, False)),
    "lone_planes, five bits in rounds": ("int5", (4, 2, 1, True)),
    "lone_planes, six bits": ("int6", (8, 4, 0, False)),
    "lone_planes, six bits in rounds": ("int6", (4, 2, 1, True)),
    "lone_byte, FP8": ("fp8", (8, 4, 0, False)),
    "lone_byte, FP8 in rounds": ("fp8", (4, 2, 1, True)),
    "lone_byte, int8": ("int8", (8, 4, 0, False)),
    "lone_byte, int8 in rounds": ("int8", (16, 1, 1, True)),
    "lone_bf16": ("bf16", (8, 4, 0, False)),
    "lone_bf16, in rounds": ("bf16", (2, 2, 1, True)),
    "skinny_planes, five bits": ("int5", None),
    "skinny_planes, six bits": ("int6", None),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int, str]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("without instructions"))  # none but these may run
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(TILES)]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[str, int, str]] = json.loads(output)
    return found


@pytest.mark.parametrize("name", TILES)
def test_operands_of_small_groups_stay_in_registers(
    compiled: dict[str, tuple[str, int, str]], name: str
) -> None:
    kernel, shared, _ = compiled[name]
    assert kernel == name.split(",")[0]
    assert shared <= (1024 if "lone" in name else 4096)  # the sums of warps; of others scales, too


BASES = r"(\w+) = \[((?:\[[\d, ]*\](?:, )?)*)\]"


def threads_of(layout: str) -> list[tuple[int, ...]]:
    """Which place of a tensor each bit of a thread's number, the lane's bits first, moves it by."""
    if "blocked" in layout:
        sizes = {name: json.loads(f"[{rest}]") for name, rest in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)}
        assert sizes["sizePerThread"][0] == sizes["threadsPerWarp"][1] == sizes["warpsPerCTA"][1] == 1, layout
        count = sizes["threadsPerWarp"][0] * sizes["warpsPerCTA"][0]
        return [(1 << bit, 0) for bit in range(count.bit_length() - 1)]
    bases = {name: json.loads(f"[{rest}]") for name, rest in re.findall(BASES, layout)}
    return [tuple(base) for base in bases["lane"] + bases["warp"]]


@pytest.mark.parametrize("name", [name for name in TILES if name.startswith("lone")])
def test_the_first_axis_is_the_threads(compiled: dict[str, tuple[str, int, str]], name: str) -> None:
    """Which the assembly of `fragments.py` stands on: an instruction of a warp, and what lanes exchange."""
    text = compiled[name][2]
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    instructions = [line for line in text.splitlines() if "mma.sync" in line or "shfl.sync" in line]
    assert len(instructions) > 5
    for line in instructions:
        for layout in re.findall(r"tensor<\d+x\d+x[if]32, (#\w+)>", line):
            threads = threads_of(named[layout])
            assert threads == [(1 << bit, 0) for bit in range(len(threads))], named[layout]


@pytest.mark.parametrize("name", [name for name in TILES if name.startswith("lone")])
def test_sums_over_warps_are_of_all_lanes(compiled: dict[str, tuple[str, int, str]], name: str) -> None:
    """Where lanes are added up, too, they have to be the highest bits of a lane's number.

    Triton lets those lanes write for other warps whose higher bits are 0, whichever lie along the axis:
    with others some sums are never written, and what is read in their place was there before.
    """
    text = compiled[name][2]
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(.*?axis = (\d).*?\}\) : \(tensor<[\dx]+\w+, (#\w+)', text, re.DOTALL)
    found = [(int(axis), named[layout]) for axis, layout in sums if layout.startswith("#linear")]
    for axis, layout in found:
        bases = {part: json.loads(f"[{rest}]") for part, rest in re.findall(BASES, layout)}
        lanes = [bit for bit, base in enumerate(bases["lane"]) if base[axis]]
        if any(base[axis] for base in bases["warp"]):
            assert lanes == list(range(5 - len(lanes), 5)), layout
    assert found, "no sum of this kind: what is compiled has changed"

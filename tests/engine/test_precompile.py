"""What is compiled ahead is all that a mix of requests launches: `serving_mix.py` does the work.

And every family's step finds a kernel for each of its products: `family_steps.py` does that.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import snugvl
from snugvl.checkpoint.families import SUPPORTED
from snugvl.core.config import EngineConfig
from snugvl.engine import precompile
from snugvl.engine.precompile import _kinds, edges, rehearse
from snugvl.layers.ggml import GgmlType
from snugvl.layers.linear import Linear

KERNELS = Path(snugvl.__file__).parent / "layers" / "kernels"
MOST = {
    "2B-FP8": 48,
    "2B in 4 bits": 53,
    "Qwen3.5": 61,
    "Qwen3.5, mixture": 80,
    "2B as GGUF": 71,
    "mixture as GGUF": 71,
}  # each takes a processor half a second or more


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.compiled"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def mixes(compiled: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compiled["mixes"]
    assert set(found) == set(MOST)
    return found


def test_a_dry_run_reads_no_other_compiler(compiled: dict[str, Any]) -> None:
    """`torch._dynamo` takes a second; nothing that stands for it is left for what needs it afterwards."""
    assert compiled["compiler"] == [True, False, False]


def test_every_family_makes_its_steps(compiled: dict[str, Any]) -> None:
    kernels: dict[str, list[str] | str] = compiled["families"]
    assert {name: said for name, said in kernels.items() if isinstance(said, str)} == {}
    assert len({name.split(",")[0] for name in kernels}) == len(SUPPORTED)


def test_nothing_is_launched_that_was_not_rehearsed(mixes: dict[str, Any]) -> None:
    assert {name: mix["beyond"] for name, mix in mixes.items()} == {name: [] for name in MOST}


def test_what_a_process_warms_up_with_is_compiled_first(mixes: dict[str, Any]) -> None:
    """Else a first start waits for it: `_warm_up` of `backends/process/child.py`."""
    assert {name: mix["late"] for name, mix in mixes.items()} == {name: [] for name in MOST}


def test_there_are_few_variants(mixes: dict[str, Any]) -> None:
    """A number that makes Triton compile anew has come in where this fails: `kernels/compiler/launch.py`."""
    for name, mix in mixes.items():
        assert sum(mix["known"].values()) <= MOST[name], (name, mix["known"])


def test_every_kernel_takes_part(mixes: dict[str, Any]) -> None:
    """Each is started quickly, and found by a rehearsal."""
    entry = re.compile(r"^@launched\n@triton\.jit.*\ndef (\w+)", re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")]
    names = {name for source in sources for name in entry.findall(source)}
    others = {"round_groups", "gemv"}  # which the loader compiles; one row of float32, and before Ampere
    assert names - others == {name for mix in mixes.values() for name in mix["known"]}
    assert len(names) >= 14


def test_what_one_person_waits_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture's prompt and its answer, then texts, then what many at once need."""
    steps: list[tuple[int, ...]] = []
    cache = SimpleNamespace(storage=torch.empty(0, device="meta"), num_blocks=1, block_size=16, states=None)
    monkeypatch.setattr(precompile, "allocate", lambda *_: cache)
    monkeypatch.setattr(precompile, "support", lambda *_: None)
    network: Any = SimpleNamespace(
        tower=None,
        decoder=SimpleNamespace(layers=nn.ModuleList()),
        device=torch.device("meta"),
        config=SimpleNamespace(text=SimpleNamespace(vocab_size=9, predictors=0)),
        forward=lambda batch, _: steps.append(batch.attention.query_lens),
    )
    first: list[int] = []
    rehearse(
        network, EngineConfig(1, max_num_seqs=8, max_batched_tokens=300), lambda: first.append(len(steps))
    )
    assert steps[:3] == [(300,), (64,), (1,)]
    assert first == [3], "a server waits for no more"
    assert steps.index((65,)) < steps.index((1, 1)) < steps.index((1,) * 8) < steps.index((48,))


def test_layers_of_as_many_bytes_may_be_of_different_types() -> None:
    layers = [nn.Sequential(Linear(256, 16, bias=False)) for _ in range(3)]
    kinds: tuple[GgmlType, ...] = ("Q4_0", "Q4_K", "Q4_0")
    for layer, kind in zip(layers, kinds, strict=True):
        layer[0].store_blocks([(kind, 16)])
    assert _kinds(layers) == layers[:2]


def test_edges_stand_on_both_sides_of_powers_of_two_and_of_their_triples() -> None:
    assert edges(1) == [1]
    assert edges(7) == [1, 2, 3, 4, 5, 6, 7]
    assert {16, 17, 64, 65, 191, 192, 700} <= set(edges(700))
    assert max(edges(700)) == 700

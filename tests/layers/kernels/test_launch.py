"""A quick launch hands a compiled kernel exactly what Triton's own launch does."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from snugvl.layers.compilations import Compilations
from snugvl.layers.kernels.compiler.launch import LaunchedKernel, launched
from tests.patience import PATIENCE_S


def doubled(x, out, factor, size, SIZE: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, WIDE)
    mask = at < size
    tl.store(out + at, tl.load(x + at, mask=mask, other=0) * factor, mask=mask)


class Recorder:
    """A driver that compiles for an H200 and writes down what would be launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loaded = 0
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return self.loaded, 100 + self.loaded, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *arguments: self.launches.append(arguments)


LANGUAGE = dict(
    vars(tl.core)
)  # tests are imported before the interpreter runs, which leaves its own in there


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    for name, value in LANGUAGE.items():
        if name in vars(tl.core) and vars(tl.core)[name] is not value:
            monkeypatch.setattr(tl.core, name, value)
    before, recorder = driver._active, Recorder()
    driver.set_active(recorder)
    yield recorder
    gc.collect()  # compiled kernels are given back to the driver that they came from
    driver._active = before


VALUES = (torch.zeros(40), torch.zeros(40), 2.5, 40)


def test_a_later_launch_is_what_triton_would_do(recorder: Recorder) -> None:
    kernel = launched(JITFunction(doubled))
    assert isinstance(kernel, LaunchedKernel)
    for _ in range(2):
        kernel[(3,)](*VALUES, SIZE=16, WIDE=16, num_warps=1)
    first, second = recorder.launches
    assert first[:6] == second[:6] == (3, 1, 1, 7, 101, first[5]), "grid, stream, function, metadata"
    assert first[9:] == second[9:] == (*VALUES, 16, 16)
    assert second[6:9] == (None, None, None), "nobody's hooks are asked"


def test_threads_that_need_a_kernel_at_once_have_it_compiled_once(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that load weights, which round by the same one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", counted := Compilations())
    kernel, together = launched(JITFunction(doubled)), threading.Barrier(4)

    def launch(_: int) -> None:
        together.wait(PATIENCE_S)
        kernel[(3,)](*VALUES, SIZE=16, WIDE=16, num_warps=1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, range(4)))
    assert (counted.count, recorder.loaded, len(recorder.launches)) == (1, 1, 4)


def test_what_triton_compiles_anew_is_another_variant(recorder: Recorder) -> None:
    kernel = launched(JITFunction(doubled))
    x, out, factor, _ = VALUES
    odd = torch.zeros(44)[1:41]
    cases: list[tuple[tuple[Any, ...], dict[str, int]]] = [
        (VALUES, {"SIZE": 16, "WIDE": 16, "num_warps": 1}),
        (VALUES, {"SIZE": 8, "WIDE": 16, "num_warps": 1}),
        (VALUES, {"SIZE": 16, "WIDE": 16, "num_warps": 2}),
        ((x, out, factor, 48), {"SIZE": 16, "WIDE": 16, "num_warps": 1}),
        ((x, out, factor, 1), {"SIZE": 16, "WIDE": 16, "num_warps": 1}),
        ((odd, out, factor, 40), {"SIZE": 16, "WIDE": 16, "num_warps": 1}),
        ((x.half(), out, factor, 40), {"SIZE": 16, "WIDE": 16, "num_warps": 1}),
    ]
    for values, constants in cases * 2:
        kernel[(3, 1)](*values, **constants)
    half = len(cases)
    functions = [launch[4] for launch in recorder.launches]
    assert functions[:half] == functions[half:]
    assert len(set(functions)) == half == recorder.loaded


def test_what_a_kernel_does_not_look_at_makes_no_variant(recorder: Recorder) -> None:
    """Neither of ours nor of Triton's: a number of tokens or an odd beginning must not compile anything."""
    kernel = launched(JITFunction(doubled, do_not_specialize=["out", "size"]))
    x, out, factor, _ = VALUES
    odd = torch.zeros(44)[1:41]
    for target, size in ((out, 40), (odd, 48), (out, 1), (odd, 16)):
        kernel[(3,)](x, target, factor, size, SIZE=16, WIDE=16, num_warps=1)
    assert recorder.loaded == len(kernel._variants) == 1
    assert [launch[11:13] for launch in recorder.launches[1:]] == [(2.5, 48), (2.5, 1), (2.5, 16)]
    kernel[(3,)](x, out, factor, 1 << 40, SIZE=16, WIDE=16, num_warps=1)
    assert recorder.loaded == len(kernel._variants) == 2, "a number of 64 bits is another type"


def test_triton_tells_what_it_compiles(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in its folder already is not compiled again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", counted := Compilations())
    for _ in range(2):
        launched(JITFunction(doubled))[(3,)](*VALUES, SIZE=16, WIDE=16, num_warps=1)
    assert (counted.count, recorder.loaded) == (1, 2)

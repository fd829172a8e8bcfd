"""What is asked of Triton before the first launch: what that would ask, and nothing a start could fail of."""

import subprocess
import sys
from types import ModuleType

import pytest
import triton.language as tl
from triton.runtime import JITFunction

from snugvl.layers.kernels.compiler import first_launch
from snugvl.layers.kernels.compiler.launch import LaunchedKernel


def twice(x, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(x + at, 2 * tl.load(x + at))


def test_triton_is_read_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas_version", asked.append)
    monkeypatch.setattr("triton.runtime.build.platform_key", lambda: asked.append("platform"))
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: asked.append("itself"))
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaUtils", lambda: asked.append("its part in C"))
    assert first_launch.read_triton((9, 0))
    assert asked == [90, "platform", "itself", "its part in C"]
    assert first_launch.read_triton(None), "a process that only compiles"
    assert asked[4:] == [80, "platform", "itself"]


def test_a_machine_without_the_gpus_driver_reads_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr("triton.backends.nvidia.driver.CudaUtils", fail)
    assert first_launch.read_triton((9, 0))


def test_a_triton_that_cannot_be_read_is_the_first_launchs_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise FileNotFoundError("ptxas")

    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas_version", fail)
    assert not first_launch.read_triton((9, 0))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", None)  # Triton without NVIDIA's part
    assert not first_launch.read_triton(None)


def test_the_kernels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel = ModuleType("one of ours"), JITFunction(twice)
    vars(module).update(twice=LaunchedKernel(kernel), again=LaunchedKernel(kernel), settings={"a": 1})
    monkeypatch.setitem(sys.modules, "snugvl.layers.kernels.one_of_ours", module)
    assert kernel.hash is None
    assert first_launch.read_kernels()
    assert kernel.hash is not None


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, triton.runtime.cache, snugvl.layers.kernels.compiler.first_launch\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"

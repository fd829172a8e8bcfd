"""What is compiled without a GPU is what a launch on one finds."""

from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import JITFunction, driver

from snugvl.layers.compilations import Compilations
from snugvl.layers.kernels.compiler.ahead_of_time import Launch, TensorAddress, compile_all, dry_run
from snugvl.layers.kernels.compiler.launch import LaunchedKernel
from snugvl.layers.kernels.device import Hardware, capability, described, hardware_of
from tests.layers.kernels.test_launch import VALUES, Recorder, doubled, recorder

__all__ = ["recorder"]
H200 = Hardware((9, 0), 132)
CONSTANTS = {"SIZE": 16, "WIDE": 16, "num_warps": 1}


def broken(x, out, factor, size, SIZE: int, WIDE: int):  # type: ignore[no-untyped-def]  # noqa: N803
    return x.nonsense


def test_a_launch_finds_what_was_compiled_ahead(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", counted := Compilations())
    values = tuple(TensorAddress(v.dtype, 0) if isinstance(v, torch.Tensor) else v for v in VALUES)
    odd = (TensorAddress(torch.float32, 4), *values[1:])
    before = torch.cuda.is_initialized()
    done = compile_all(
        [Launch(LaunchedKernel(JITFunction(kernel)), each, dict(CONSTANTS)) for kernel, each in (
            (doubled, values), (broken, values), (doubled, odd),
        )],
        H200,
        threads=2,
    )  # fmt: skip
    errors = [(launch.name, error is None) for launch, error in done]
    assert errors == [("doubled", True), ("broken", False), ("doubled", True)]
    assert (counted.count, recorder.loaded) == (2, 0)
    assert torch.cuda.is_initialized() == before
    driver.set_active(recorder)
    LaunchedKernel(JITFunction(doubled))[(3,)](*VALUES, **CONSTANTS)
    assert (counted.count, recorder.loaded) == (2, 1), "found in the folder"


def test_what_launches_a_kernel_is_compiled_with_it(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a C compiler, in Triton 3.6, for each kind of values; the first launch would wait for it."""
    made: list[object] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvidia, "make_launcher", lambda *_: "a program", raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda src, metadata: made.append((src.fn.fn, metadata.name)))
    values = tuple(TensorAddress(v.dtype, 0) if isinstance(v, torch.Tensor) else v for v in VALUES)
    launches = [
        Launch(LaunchedKernel(JITFunction(kernel)), values, dict(CONSTANTS)) for kernel in (doubled, broken)
    ]
    assert [error is None for _, error in compile_all(launches, H200)] == [True, False]
    driver.set_active(recorder)
    assert made == [(doubled, "doubled")]


def test_hardware_can_be_described() -> None:
    device = torch.device("cpu")
    with described(H200):
        assert hardware_of(device) == H200
        assert capability(device) == (9, 0)
    assert capability(device) == (0, 0)


def test_what_is_written_down_is_told_at_once() -> None:
    """So it is compiled while the rest is found out."""
    told: list[Launch] = []
    kernel = LaunchedKernel(JITFunction(doubled))
    with dry_run(H200, told.append) as launches:
        for size in (16, 16, 32):
            kernel[(1,)](*VALUES, **CONSTANTS | {"SIZE": size})
            assert told == launches
    assert [each.constants["SIZE"] for each in told] == [16, 32]

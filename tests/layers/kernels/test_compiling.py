"""What is compiled without a GPU is what a launch on one finds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import JITFunction, driver

from snugvl.layers.compilations import Compilations
from snugvl.layers.kernels.compiler.ahead_of_time import KernelLaunch, TensorAddress, compile_all, dry_run
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
        [KernelLaunch(LaunchedKernel(JITFunction(kernel)), each, dict(CONSTANTS)) for kernel, each in (
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
        KernelLaunch(LaunchedKernel(JITFunction(kernel)), values, dict(CONSTANTS))
        for kernel in (doubled, broken)
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
    told: list[KernelLaunch] = []
    kernel = LaunchedKernel(JITFunction(doubled))
    with dry_run(H200, told.append) as launches:
        for size in (16, 16, 32):
            kernel[(1,)](*VALUES, **CONSTANTS | {"SIZE": size})
            assert told == launches
    assert [each.constants["SIZE"] for each in told] == [16, 32]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WHOLE, WIDE = meta(2, 3, dtype=torch.int64), meta(2, 3, dtype=torch.float32)
SHAPED: list[Callable[[], torch.Tensor]] = [
    lambda: torch.mm(meta(2, 3), meta(3, 5)),
    lambda: torch.mm(meta(2, 3), meta(3, 5), out=meta(2, 5)),
    lambda: torch.addmm(meta(5), meta(2, 3), meta(3, 5)),
    lambda: torch.addmm(meta(5), meta(2, 3), meta(3, 5), out=meta(2, 5)),
    lambda: torch.stack((meta(2, 3), meta(2, 3)), dim=-1),
    lambda: torch.stack([meta(2, 3)] * 3),
    lambda: torch.stack([meta(2, 3)] * 3, 1),
    lambda: torch.arange(0, 7, 2, dtype=torch.float32, device="meta"),
    lambda: torch.arange(5, device=torch.device("meta")),
    lambda: torch.empty_like(meta(2, 3), dtype=torch.float32),
    lambda: torch.empty_like(meta(3, 2).T),
    lambda: meta(3).repeat(4),
    lambda: meta(2, 3).repeat(5, 1, 2),
    lambda: functional.linear(meta(4, 2, 3), meta(5, 3), meta(5)),
    lambda: functional.embedding(WHOLE, meta(9, 4)),
    lambda: functional.scaled_dot_product_attention(meta(1, 4, 2, 8), meta(1, 4, 6, 8), meta(1, 4, 6, 7)),
    lambda: functional.layer_norm(meta(2, 3), (3,), meta(3), meta(3), 1e-6),
    lambda: functional.gelu(meta(2, 3), approximate="tanh"),
    lambda: torch.ops.aten.gelu_(meta(2, 3), approximate="tanh"),
    lambda: meta(2, 1).add(WIDE),
    lambda: WHOLE + 1,
    lambda: WHOLE * meta(3),
    lambda: meta(2, 3) - 1.5,
    lambda: 1 - WIDE,
    lambda: 1.0 / meta(2, 3),
    lambda: 1.0 / WHOLE,
    lambda: WHOLE / 2,
    lambda: WIDE / meta(3),
    lambda: 5e6**WIDE,
    lambda: WIDE.cos(),
    lambda: meta(3, 2).T.sin(),
    lambda: WIDE.floor(),
    lambda: WHOLE.clamp(max=4),
    lambda: meta(2, 3).add_(meta(3)),
    lambda: WIDE.sub(WIDE, alpha=2),
    lambda: WIDE.div(2, rounding_mode="floor"),
    lambda: torch.addmm(meta(5), meta(2, 3), meta(3, 5), beta=0),
    lambda: functional.linear(input=meta(4, 3), weight=meta(5, 3)),
    lambda: meta(2, 3).repeat((2, 1)),
    lambda: WHOLE.cos(),
    lambda: WHOLE.clamp(0.5),
    lambda: WIDE.clamp(min=meta(4, 1, 1, dtype=torch.float32)),
    lambda: WIDE.clamp(0, 1.5),
    lambda: meta(3, 2).T + meta(3, 2).T,
    lambda: meta(2, 3).mul_(2.0),
]


@pytest.mark.parametrize("made", SHAPED)
def test_shapes_are_those_that_torch_finds(made: Callable[[], torch.Tensor]) -> None:
    theirs = made()
    with dry_run(H200):
        ours = made()
    assert ours.is_cuda, "it goes on as if it were on a GPU"
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    assert ours.is_meta


def test_tensors_with_memory_are_torchs() -> None:
    with dry_run(H200):
        assert torch.arange(3).add(1).tolist() == [1, 2, 3]
        assert torch.ones(2).add_(1).tolist() == [2, 2]
        assert torch.stack([torch.ones(1)] * 2).tolist() == [[1], [1]]

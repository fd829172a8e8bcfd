"""Kernels that requests waited for are counted and named."""

from types import SimpleNamespace

import pytest
import torch

from snugvl.layers.compilations import Compilations, compilations


def test_what_is_compiled_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []
    counted = Compilations(lambda **told: heard.append(told["cache_hit"]))
    caplog.set_level("INFO", "snugvl")
    for hit in (False, True):
        counted(
            src=SimpleNamespace(name="gemm"),
            times=SimpleNamespace(total=1_250_000),
            cache_hit=hit,
            metadata={},
            metadata_group={},
        )
    assert (counted.count, heard) == (1, [False, True])
    assert caplog.messages == ["compiled the kernel gemm in 1.25 s"]


def test_a_cpu_compiles_none() -> None:
    assert compilations(torch.device("cpu")).count == 0

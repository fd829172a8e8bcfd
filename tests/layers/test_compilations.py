"""Kernels that requests waited for are counted and named."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from snugvl.layers.compilations import Compilations, Elsewhere, compilations
from tests.patience import PATIENCE_S


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


def test_what_another_process_compiles_is_waited_for() -> None:
    """Until it is there, has failed, or that process has ended; and not forever."""
    elsewhere, first, other = Elsewhere(most_s=0.05), object(), object()
    assert not elsewhere.wait("a")
    for digest, who in (("a", first), ("b", first), ("c", other)):
        elsewhere.begins(digest, who)
    assert elsewhere.wait("a"), "no longer than it may"
    patient = Elsewhere(PATIENCE_S)
    patient.begins("a", first)
    threading.Timer(0.05, patient.ends, ["a"]).start()
    begun = time.monotonic()
    assert patient.wait("a")
    assert time.monotonic() - begun < PATIENCE_S
    elsewhere.ends(None, first)
    assert [elsewhere.wait(digest) for digest in "abc"] == [False, False, True]

"""Streams and library handles, of which the CUDA driver takes memory."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugvl.layers import device
from snugvl.layers.device import CAPTURES, COPIES, in_thread_that_ends, stream_on

GPU = torch.device("cuda", 0)


class Cuda:
    """The driver's library: streams are numbered, unless there are none to be had."""

    def __init__(self, code: int = 0) -> None:
        self.made, self.flags = 0, set[int]()
        self._code = code

    def cuStreamCreate(self, address: Any, flags: int) -> int:  # noqa: N802
        self.made += 1
        self.flags.add(flags)
        address._obj.value = None if self._code else 1000 + self.made
        return self._code


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Streams that came from torch's pool."""
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: taken.append(str(device)))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda address, device: SimpleNamespace(address=address, device=device)
    )
    stream_on.cache_clear()
    yield taken
    stream_on.cache_clear()


def test_a_stream_a_purpose_is_made_once_by_the_driver(
    pool: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: cuda)
    captures, copies = stream_on(GPU, CAPTURES), stream_on(GPU, COPIES)
    assert captures is stream_on(GPU, CAPTURES)
    assert captures is not copies
    assert (cuda.made, cuda.flags) == (2, {1}), "they don't wait for the default stream"
    assert not pool, "torch would make 32"


@pytest.mark.parametrize("fault", ["no library", "no such call", "no stream"])
def test_where_the_driver_makes_none_it_is_torchs(
    fault: str, pool: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(_: str) -> Any:
        if fault == "no library":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return object() if fault == "no such call" else Cuda(2)

    monkeypatch.setattr(device.ctypes, "CDLL", library)
    stream_on(GPU, CAPTURES)
    assert pool == ["cuda:0"]


def test_work_in_a_thread_of_its_own_has_ended_with_it() -> None:
    thread = in_thread_that_ends(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_work_raises_comes_out() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_thread_that_ends(fail)

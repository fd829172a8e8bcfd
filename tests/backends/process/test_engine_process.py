"""What the engine's process does before torch is there, and before it is ready."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from snugvl.backends.process import child, engine_process
from snugvl.core.messages import Capabilities, Request, Text
from snugvl.errors import RequestTooLarge
from snugvl.hardware.describe import describe


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs whose contexts were made, on a machine with one."""
    found: list[int] = []
    monkeypatch.setattr("snugvl.hardware.probe.probe", lambda: describe("rtx-4060"))

    def open_context(index: int) -> bool:
        found.append(index)
        return True

    monkeypatch.setattr("snugvl.hardware.software.open_context", open_context)
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The GPUs for which Triton was read."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(engine_process, "read_triton", lambda capability: found.append(capability) or True)
    return found


def threads_beside() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "snugvl-beside"]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_gpu_is_looked_at_before_its_context_is_made(
    opened: list[int], read: list[tuple[int, int]], device: str
) -> None:
    machine = engine_process._look(device)
    for thread in threads_beside():
        thread.join()
    assert machine is not None
    assert machine.gpus[0].index == 0
    assert opened == [0]
    assert read == [(8, 9)]


def test_what_the_server_has_seen_is_not_looked_at_again(
    opened: list[int], read: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snugvl.hardware.probe.probe", lambda: pytest.fail("looked"))
    seen = describe("rtx-4060")
    assert engine_process._look("cuda:0", seen) is seen
    for thread in threads_beside():
        thread.join()
    assert opened == [0]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "cuda:x", "nonsense"])
def test_another_device_is_left_alone(opened: list[int], read: list[tuple[int, int]], device: str) -> None:
    assert engine_process._look(device) is None
    assert not threads_beside()
    assert opened == []
    assert read == []


@pytest.mark.parametrize(
    ("device", "most", "asked"),
    [
        ("CPU", 4096, [1]),
        ("NVIDIA H200", 4096, [child.WARM_TOKENS]),
        ("NVIDIA H200", 9, [child.WARM_TOKENS, 1]),
    ],
)
def test_a_gpu_warms_up_with_a_prompt_whose_kernels_are_compiled_first(
    device: str, most: int, asked: list[int]
) -> None:
    """Those of a few tokens come last at a first start. Where so long a prompt does not fit, it is short."""
    seen, read = list[int](), list[str]()

    @contextmanager
    def submit(request: Request) -> Iterator[Iterator[str]]:
        (part,) = request.messages[0].content
        assert isinstance(part, Text)
        seen.append(len(part.text.split()))
        if seen[-1] > most:
            raise RequestTooLarge("too long")
        yield map(read.append, "a")  # type: ignore[misc]

    capabilities = Capabilities("fake", most, True, True, 100, 10, device=device)
    backend: Any = SimpleNamespace(capabilities=capabilities, submit=submit, stats=lambda: "counters")
    assert child._warm_up(backend) == "counters"
    assert seen == asked
    assert read == ["a"], "to its end"

"""The driver's three calls, on a driver that is not there."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from snugvl.hardware.software import open_context


class Driver:
    """Remembers what it is asked, and answers `wrong` to one of the calls."""

    def __init__(self, wrong: str = "") -> None:
        self.asked: list[str] = []
        self.index = -1
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.asked.append(name)
            if name == "cuDeviceGet":
                self.index = arguments[1]
            return 100 if name == self._wrong else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "byref", lambda value: SimpleNamespace(value=value))


def test_a_context_is_made_on_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert open_context(3)
    assert driver.asked == CALLS
    assert driver.index == 3


@pytest.mark.parametrize("number", range(3))
def test_what_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    driver = Driver(wrong=CALLS[number])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert not open_context(0)
    assert driver.asked == CALLS[: number + 1]


def test_no_driver_is_no_context() -> None:
    assert not open_context(0, "libcuda-that-is-not-there.so.1")

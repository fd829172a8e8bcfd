"""Who has taken GPU memory, by name."""

import threading
from dataclasses import replace

import pytest

from snugvl.backends.native.planned import Neighbours, grown
from snugvl.hardware.machine import Gpu, Machine, Tenant
from tests.patience import PATIENCE_S, until

MIB = 1 << 20
GPU = Gpu(0, "a card", 8192 * MIB, 4096 * MIB, tenants=(Tenant("desktop", 400 * MIB, 7),))


def test_only_others_that_have_grown_are_named() -> None:
    before = (Tenant("desktop", 400 * MIB, 7), Tenant("driver (reserved)", 300 * MIB))
    now = (
        Tenant("python serve", 4000 * MIB, 99),
        Tenant("desktop", 410 * MIB, 7),
        Tenant("driver (reserved)", 400 * MIB),
        Tenant("game", 1536 * MIB, 12),
    )
    assert grown(before, now, 99) == ["game (pid 12) 1.50 GiB more", "driver (reserved) 100 MiB more"]
    assert grown(before, before, 99) == []


def test_it_logs_from_a_thread_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    looking, may_go = threading.Event(), threading.Event()
    machine = Machine("linux", (replace(GPU, tenants=(Tenant("game", 900 * MIB, 12),)),), 8, 1, 1, 1)
    looks = 0

    def look() -> Machine:
        nonlocal looks
        looks += 1
        looking.set()
        may_go.wait(PATIENCE_S)
        return machine

    neighbours = Neighbours(GPU, 99, look)
    neighbours()
    assert looking.wait(PATIENCE_S)
    neighbours()  # one look is enough
    may_go.set()
    assert neighbours._busy.acquire(timeout=PATIENCE_S)
    assert looks == 1
    assert "GPU memory taken by other programs since the start: game (pid 12) 900 MiB more" in caplog.text


def test_a_look_that_fails_ends_nothing_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's process a thread that ends with an error ends all of it."""

    def look() -> Machine:
        raise OSError("no driver")

    neighbours = Neighbours(GPU, 99, look)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as few:
        few.setattr("snugvl.backends.native.planned.Thread", NoThread)
        neighbours()
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    neighbours()
    until(lambda: "no driver" in caplog.text and not neighbours._busy.locked())
    assert not ended

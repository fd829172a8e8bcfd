"""Threads whose owners take turns: they end with who submits, and few are enough."""

import gc
import threading
import weakref

import pytest

from snugvl.engine.sampling import masks
from snugvl.engine.sampling.masks import Mask, MaskPace, MaskThreads, Turns
from tests.engine.test_masks import Slow
from tests.patience import PATIENCE_S, until

NAME = "turns-of-a-test"


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_threads_end_with_whoever_submits() -> None:
    made, done = Turns(3, NAME), threading.Barrier(4)
    for owner in range(3):
        made.submit(owner, done.wait)
    done.wait(PATIENCE_S)
    assert len(alive()) == 3
    del made
    until(lambda: not alive())


def test_a_job_that_holds_whoever_submitted_it_keeps_them_no_longer_than_it_runs() -> None:
    """As masks do, by a mask of theirs and by a bound method."""
    made, go = MaskThreads(2, 48), threading.Event()
    gone = weakref.ref(made)
    slow = Slow(1)
    mask = Mask(slow.start(), made, MaskPace(1.0))
    mask.accept(1)
    made.submit(made, go.wait)
    del mask, made
    gc.collect()
    assert gone() is not None
    go.set()
    slow.go.set()
    until(lambda: gone() is None)


def test_who_gets_no_more_threads_goes_on_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, done = Turns(2, NAME), threading.Event()

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as few:
        few.setattr(masks, "Thread", NoThread)
        with pytest.raises(RuntimeError):
            made.submit("a", lambda: None)
    made.submit("a", lambda: None)
    with monkeypatch.context() as few:
        few.setattr(masks, "Thread", NoThread)
        made.submit("b", done.set)
    assert done.wait(PATIENCE_S)

"""The engine's process of `faults.py`: the real one, with points at which it fails when it is told to.

A line "POINT ERROR COUNT" in the pipe that FAULTS_TOLD names makes the point raise that error once it was
passed so many times; "clear" takes back what didn't come to it. What was raised is appended to FAULTS_RAISED.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from snugvl.backends.process import child, engine_process, wire
from snugvl.backends.process.child import HostedModel
from snugvl.core.options import Progress
from snugvl.errors import DoesNotFit, EngineError


class PanicError(BaseException):
    """As Rust's are: no `Exception`."""


ERRORS: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (ValueError, MemoryError, EngineError, DoesNotFit, PanicError, KeyboardInterrupt, SystemExit)
}
told: dict[str, tuple[type[BaseException], int]] = {}


def fails(owner: Any, name: str, point: str) -> None:
    """Make a function a point."""
    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        error, left = told.get(point, (None, 0))
        if error is not None and left > 0:
            told[point] = error, left - 1
        elif error is not None:
            del told[point]
            with Path(os.environ["FAULTS_RAISED"]).open("a") as file:
                file.write(f"{point}\n")
            raise error("on purpose")
        return function(*arguments, **options)

    setattr(owner, name, run)


def listen() -> None:
    """Take orders, for ever."""
    while True:
        with Path(os.environ["FAULTS_TOLD"]).open() as pipe:
            for line in pipe:
                if line.strip() == "clear":
                    told.clear()
                    continue
                point, error, count = line.split()
                told[point] = ERRORS[error], int(count)


def load(choice: wire.EngineChoice, report: Progress) -> HostedModel:
    """The real model; its points fail from now on."""
    model = engine_process.load(choice, report)
    from snugvl.backends.engine_thread import Mailbox, Receiver
    from snugvl.backends.measure import Meter
    from snugvl.backends.native.backend import NativeBackend
    from snugvl.backends.preparers import Preparation
    from snugvl.engine.encoder import Encoder
    from snugvl.engine.engine import Engine
    from snugvl.engine.runner import Runner
    from snugvl.engine.sampling import masks

    for owner, name, point in (
        (Engine, "step", "step"),
        (Engine, "memory", "memory"),
        (Runner, "run", "forward"),
        (Encoder, "advance", "picture"),
        (masks, "_make", "mask"),
        (Receiver, "receive", "text"),
        (Mailbox, "put", "mailbox"),
        (NativeBackend, "_prompt", "prompt"),
        (NativeBackend, "_grammar", "grammar"),
        (NativeBackend, "_add", "add"),
        (NativeBackend, "_abort", "abort"),
        (NativeBackend, "_stats", "stats"),
        (Meter, "read", "measure"),
        (Preparation, "go_on", "go_on"),
        (wire, "encode", "encode"),
        (wire.Channel, "receive", "decode"),
        (child.Child, "_handle", "handle"),
        (child.Child, "_reply", "reply"),
    ):
        fails(owner, name, point)
    threading.Thread(target=listen, name="told", daemon=True).start()
    return model


if __name__ == "__main__":
    child.run(child.attach(*sys.argv[1:]), load, engine_process.prepare)

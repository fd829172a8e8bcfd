"""A process that compiles kernels ahead of time: `python -m` this module, with the PID of who starts it.

It is told on standard input what runs (`engine/precompile.py`), and which share of what that needs is its
own, and compiles that beside the engine: at the lowest priority, without the GPU, and only as long as the
engine's process lives.
"""

import os
import pickle
import sys
import threading
import time

LOOK_S = 0.5  # between two looks at the parent


def leave_with(parent: int) -> None:
    """End this process as soon as that isn't its parent any more."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


def main() -> None:
    """Work for whoever started this process; the last line that it prints is the report, in JSON."""
    if hasattr(os, "nice"):
        os.nice(19)  # before torch is imported
    threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    import json
    from dataclasses import asdict

    from snugvl.engine.precompile import compile_kernels, read_compiler

    read_compiler()  # what is to be compiled may not be known yet
    order = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the engine's process, through a pipe of its own)
    sys.stdout.write(json.dumps(asdict(compile_kernels(*order))) + "\n")


if __name__ == "__main__":
    main()

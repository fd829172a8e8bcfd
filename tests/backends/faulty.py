"""How the fake engines fail, ours in its process (`process/fake_child.py`) and the fake vLLM: the same words.

No package: a fake is started as a script, without what is installed.
"""

import os
import signal
import sys
import time
from pathlib import Path

CAUSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def act(word: str) -> None:
    """Do what a word says; words that say nothing are left to the fake."""
    match word:
        case "crash":
            print(CAUSE, flush=True)
            os._exit(1)
        case "raise":
            raise ValueError("no such thing as a model")
        case "leave":
            os._exit(0)
        case "kill":  # as the system does whose host memory ran out
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(1000)
        case "freeze":  # the main thread takes the signal: until it does, this one could answer
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        case "flood":  # far more than is kept, in lines and without any
            for _ in range(2_000):
                print("x" * 1_000)
            sys.stdout.write("y" * 5_000_000)
            print(f"\n{CAUSE}", flush=True)
            os._exit(1)


def at_start(behaviour: str) -> bool:
    """Do what is to be done at a start; whether the behaviour is one of these.

    `start:WORD` does it every time; `again:WORD:PATH` serves while there is no such file, which it makes.
    """
    when, _, rest = behaviour.partition(":")
    if when not in ("start", "again"):
        return False
    word, _, path = rest.partition(":")
    if when == "again" and not Path(path).exists():
        Path(path).touch()
    else:
        act(word)
    return True

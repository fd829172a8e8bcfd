"""The entry point of the `snugvl` command.

`snugvl serve` waits for torch's import longer than for anything else, so the process that imports it is begun
before the command line itself is imported and read. Whether it is wanted is guessed from the words: a wrong
guess costs some processor time, and the process is ended.
"""

import gc
import sys
from collections.abc import Sequence
from itertools import pairwise

from snugvl.backends.process.launch import Launched


def begin(words: Sequence[str]) -> Launched | None:
    """The engine's process, where `words` look as if it will be wanted, and it can be started."""
    if not _serves(words):
        return None
    try:
        return Launched()
    except OSError:  # it is tried again when it is needed, and told then
        return None


def main() -> None:
    """The console script."""
    gc.disable()  # what imports make stays: to look through it again and again takes a fifth of the time
    launched = begin(sys.argv[1:])
    from snugvl.cli.app import main

    main(launched)


def _serves(words: Sequence[str]) -> bool:
    """Whether `words` are `serve` with an engine in snugvl's own process: no help, no vLLM."""
    if words[:1] != ["serve"] or {"--help", "-h", "--backend=vllm"} & set(words):
        return False
    named = ("--backend", "vllm") in pairwise(words)
    return not named and not any(word.startswith("--attach") for word in words)

"""The entry point of the `snugvl` command.

`snugvl serve` waits for torch's import longer than for anything else, so the process that imports it is begun
before the command line itself is imported and read. Whether it is wanted is guessed from the words: a wrong
guess costs some processor time, and the process is ended.
"""

import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path

from snugvl.backends.process.launch import Launched
from snugvl.core.folders import give_home
from snugvl.errors import torn


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
    _open_closed_streams()
    if not (package := Path(__file__).parents[1]).is_dir():
        sys.exit(f"snugvl: {package} isn't a folder, and its models can't be read there; pip install it")
    give_home()
    gc.disable()  # what imports make stays: to look through it again and again takes a fifth of the time
    launched = begin(sys.argv[1:])
    try:
        from snugvl.cli.app import main
    except Exception as error:
        if why := torn(error):
            sys.exit(f"snugvl: {why}")
        raise
    main(launched)


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed at the start (`>&-`).

    The next file or socket would take its number otherwise, and get what processes begun here print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            stream = open(number, f"{mode}b")  # noqa: PTH123, SIM115
            setattr(sys, name, Nowhere(stream, encoding="utf-8", errors="replace"))


class Nowhere(TextIOWrapper):
    """The null device in place of a stream that was closed. `lost`: whether anything was printed there."""

    lost = False

    def write(self, text: str) -> int:
        """Count `text` as lost."""
        self.lost = self.lost or bool(text)
        return len(text)


def _serves(words: Sequence[str]) -> bool:
    """Whether `words` are `serve` with an engine in snugvl's own process: no help, no vLLM."""
    if words[:1] != ["serve"] or {"--help", "-h", "--backend=vllm"} & set(words):
        return False
    named = ("--backend", "vllm") in pairwise(words)
    return not named and not any(word.startswith("--attach") for word in words)

"""The engine's process, begun before it is known what it will load.

Importing torch takes most of a start. So the command begins the process first and plans meanwhile; it imports
little here for the same reason.

    Launched ─ taken by the first life of a `SupervisedEngine` ─► it ends it
        └───── not taken (the plan says vLLM, or nothing fits) ─► abandoned
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from snugvl.core.resources import Region

# -P: a torch.py in the current folder is not torch.
COMMAND = (sys.executable, "-P", "-m", "snugvl.backends.process.engine_process")

REGION_BYTES = 64 << 20  # for pictures; of which only what was ever in use at once is held

_SECRET = re.compile(r"(KEY|KEYS|TOKEN|SECRET|PASSWORD)$", re.I)
# torch looks through all that is installed for devices that we don't run on.
_NO_OTHER_DEVICES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


class Launched:
    """A process that waits for its first message, and our end of the socket to it. `at`: `time.time()` of its
    start; `region`: memory that it shares, for pictures; None where there is none."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """Start it; raises OSError where that can't be done."""
        self.at = time.time()
        self._taken = False
        self._socket, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(self._socket.close)
            self.region = Region.made(REGION_BYTES)
            self._popen = _popen(command, theirs.fileno(), self.region)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def take(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """(the process, our end of the socket); the caller ends them."""
        assert not self._taken, "a process is taken once"
        self._taken = True
        return self._popen, self._socket

    def abandon(self) -> None:
        """End the process if it wasn't taken. Safe to call twice."""
        if not self._taken:
            self._taken = True
            self._socket.close()
            self._popen.kill()
            self._popen.communicate()


def _popen(command: Sequence[str], descriptor: int, region: Region | None) -> "subprocess.Popen[bytes]":
    shared = [] if region is None else [region]
    try:
        return _process(
            [*command, str(descriptor), *(text for each in shared for text in each.arguments)],
            (descriptor, *(each.descriptor for each in shared)),
        )
    finally:
        for each in shared:
            each.keep_to_ourselves()


def _process(command: list[str], descriptors: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 (ourselves)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        env=_NO_OTHER_DEVICES | without_secrets(os.environ),
        process_group=0,  # Ctrl+C in a terminal is the server's business
    )


def without_secrets(environ: Mapping[str, str], but: Container[str] = ()) -> dict[str, str]:
    """The environment of a child: without keys, tokens and passwords, which it doesn't need."""
    return {name: value for name, value in environ.items() if name in but or not _SECRET.search(name)}

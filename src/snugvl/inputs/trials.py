"""Trying grammars where they can be ended (`trial.py`), before they are compiled where they can't.

check ─► a process that is free, or a new one ─► its answer
            └─ no answer: it took too much time or memory, and is gone; or nobody waits any more: it is ended
"""

import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import IO, Any, Final

from snugvl.inputs.trial import CPU_S, LENGTH

PROCESSES: Final = 2
LOOK_S: Final = 0.05  # between two looks whether anybody still waits
GROWN_BYTES: Final = 128 << 20  # a process that has become so much larger is not used again
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial said. `error`: what is wrong with the grammar, or nothing; `bytes`: memory it took."""

    error: str
    bytes: int = 0


class Trials:
    """The processes. Safe to use from several threads; they start when they are first needed."""

    def __init__(self, processes: int = PROCESSES) -> None:
        self._turns = BoundedSemaphore(processes)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = Lock()
        weakref.finalize(self, _end, self._all)

    def check(self, grammar: str, go_on: Callable[[], None]) -> Verdict:
        """Try a grammar in llguidance's own form. `go_on`: raises when nobody waits for it any more."""
        while not self._turns.acquire(timeout=LOOK_S):
            go_on()
        try:
            process = self._process()
            try:
                verdict = process.ask(grammar, go_on)
            except BaseException:
                self._drop(process)
                raise
            if verdict is None:
                self._drop(process)
                return Verdict(
                    f"compiling it takes more than {CPU_S:g} s of processor time, or too much memory; make "
                    "numbers, counts and alternatives smaller"
                )
            if process.grown_bytes > GROWN_BYTES:
                self._drop(process)
            else:
                with self._lock:
                    self._idle.append(process)
            return verdict
        finally:
            self._turns.release()

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        with self._lock:
            self._idle.clear()
        _end(self._all)

    def _process(self) -> "_Process":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._drop(process)  # somebody has ended it
        process = _Process()
        self._all.add(process)
        return process

    def _drop(self, process: "_Process") -> None:
        self._all.discard(process)
        process.end()


class _Process:
    """One process, asked by one thread at a time."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "snugvl.inputs.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what Rust says of memory that it doesn't get
            bufsize=0,
            env=environment,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._popen.poll() is None

    def ask(self, grammar: str, go_on: Callable[[], None]) -> Verdict | None:
        """What it says; None where it has ended instead."""
        assert self._popen.stdin is not None
        data = grammar.encode()
        try:
            _write(self._popen.stdin, LENGTH.pack(len(data)) + data)
        except OSError:
            return None
        head = self._exactly(LENGTH.size, go_on)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0], go_on)
        if body is None:
            return None
        answer: dict[str, Any] = json.loads(body)
        self.grown_bytes += answer["grown_bytes"]
        return Verdict(answer["error"], answer["grown_bytes"])

    def end(self) -> None:
        """Kill it."""
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()

    def _exactly(self, count: int, go_on: Callable[[], None]) -> bytes | None:
        assert self._popen.stdout is not None
        data = b""
        while len(data) < count:
            if not select.select([self._popen.stdout], [], [], LOOK_S)[0]:
                go_on()
                continue
            piece = os.read(self._popen.stdout.fileno(), count - len(data))
            if not piece:
                return None
            data += piece
        return data


def _write(stream: IO[bytes], data: bytes) -> None:
    """All of it: an unbuffered pipe may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _end(processes: set[_Process]) -> None:
    for process in tuple(processes):
        process.end()
    processes.clear()

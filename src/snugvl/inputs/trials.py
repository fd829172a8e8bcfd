"""Work on strangers' grammars and schemas where it can be ended (`trial.py`, `valid.py`).

check ─► a process that is free, or a new one ─► its answer
            └─ no answer: it took too much time or memory, and is gone; or it isn't wanted: it is ended
"""

import json
import os
import resource
import select
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from threading import BoundedSemaphore, Lock
from typing import Any, Final

from snugvl.core.resources import Worker, give_back_heap, write_all
from snugvl.errors import EngineError

CPU_S: Final = 2.0  # of processor time; real schemas take some milliseconds
MEMORY_BYTES: Final = 1 << 30  # of address space, of which half is there before the first question
GRAMMAR_BYTES: Final = 64 << 20  # that compiling one grammar may take; large schemas of real APIs take ten
LENGTH: Final = Struct("!I")
PROCESSES: Final = 2
OVERRUN: Final = (
    f"compiling it takes more than {CPU_S:g} s of processor time, or more than {GRAMMAR_BYTES >> 20} MiB of "
    "memory; make numbers, counts and alternatives smaller, or fewer"
)
LOOK_S: Final = 0.05  # between two looks whether the answer is still wanted
GROWN_BYTES: Final = 128 << 20  # a process that has become so much larger is not used again


@dataclass(frozen=True, slots=True)
class Verdict:
    """A trial's verdict. `error`: what is wrong with what was asked, or nothing; `bytes`: memory it holds."""

    error: str
    bytes: int = 0


class Trials:
    """The processes. Safe to use from several threads; they start when they are first needed."""

    def __init__(
        self, processes: int = PROCESSES, *, worker: str = "snugvl.inputs.trial", overrun: str = OVERRUN
    ) -> None:
        """`worker`: the module that a process runs; `overrun`: what is wrong with what has no verdict."""
        self._worker, self._overrun = worker, overrun
        self._turns = BoundedSemaphore(processes)
        self._closed = False
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = Lock()
        weakref.finalize(self, _end, self._all)

    def check(self, question: str, go_on: Callable[[], None]) -> Verdict:
        """Ask: a grammar in llguidance's own form, if the worker is no other. `go_on`: raises to give up.

        Raises:
            EngineError: it is closed.
        """
        while not self._turns.acquire(timeout=LOOK_S):
            go_on()
        try:
            process = self._process()
            try:
                verdict = process.ask(question, go_on)
            except BaseException:
                self._drop(process)
                raise
            if verdict is None:
                self._drop(process)
                return Verdict(self._overrun)
            if process.grown_bytes > GROWN_BYTES:
                self._drop(process)
            else:
                with self._lock:
                    self._idle.append(process)
            return verdict
        finally:
            self._turns.release()

    def close(self) -> None:
        """End the processes, and start no others. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._idle.clear()
        _end(self._all)

    def _process(self) -> "_Process":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._drop(process)  # it was ended from outside
            if self._closed:  # whoever asks was at it already, in another thread
                raise EngineError("the model is closed")
            process = _Process(self._worker)
            self._all.add(process)
            return process

    def _drop(self, process: "_Process") -> None:
        self._all.discard(process)
        process.end()


class _Process(Worker):
    """One process, asked by one thread at a time."""

    grown_bytes = 0

    def ask(self, question: str, go_on: Callable[[], None]) -> Verdict | None:
        """The process' answer; None where it has ended instead."""
        assert self._popen.stdin is not None
        data = question.encode()
        try:
            write_all(self._popen.stdin, LENGTH.pack(len(data)) + data)
        except OSError:
            return None
        head = self._exactly(LENGTH.size, go_on)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0], go_on)
        if body is None:
            return None
        answer: dict[str, Any] = json.loads(body)
        self.grown_bytes = answer["grown_bytes"]
        return Verdict(answer["error"], answer["held_bytes"])

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


def _end(processes: set[_Process]) -> None:
    for process in tuple(processes):
        process.end()
    processes.clear()


def bound() -> None:
    """Limit the memory of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(verdict: Callable[[str], tuple[str, object]], most_bytes: int | None = None) -> None:
    """Answer until the parent closes the pipe, then end.

    Args:
        verdict: what is wrong with a question, or nothing, and what it has made, whose memory is measured.
        most_bytes: that the work on one question may take; what asks for more ends the process.
    """
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    first = None
    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        question = questions.read(LENGTH.unpack(head)[0]).decode()
        give_back_heap()  # or what a question before it has left would hide what this one takes
        size, before = _memory()
        first = before if first is None else first
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (min(size + most_bytes, MEMORY_BYTES), MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        error, made = verdict(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        after = _memory()[1]
        del made
        memory = {"held_bytes": max(after - before, 0), "grown_bytes": after - first}
        answer = json.dumps({"error": error, **memory}).encode()
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()
    os._exit(0)  # at once: whoever asked is gone


def _memory() -> tuple[int, int]:
    """Address space and resident memory of this process, in bytes; without /proc the most, and 0."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return MEMORY_BYTES, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()

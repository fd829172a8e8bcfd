"""The reaper, a script between the server and an engine, so that no process of the engine outlives the
server.

    server ──(pipe: its end is the word to stop)──► reaper ──► the engine's server ──► its processes …

An engine's processes may have processes of their own. When one is killed the others may stay, with the GPU's
memory. The reaper adopts every orphan among its descendants (PR_SET_CHILD_SUBREAPER), so it can end them all:
when the engine's server has ended, when it is told to (by the pipe or by SIGTERM), and when the server that
started it is gone, however it went. It ends as that server did: with its exit code, or by its signal.

    reaper.py GRACE_SECONDS COMMAND…      standard input: the pipe
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SUBREAPER = 36  # prctl
PARENT_DEATH_SIGNAL = 1
NOT_FOUND = 127  # as a shell says it
GIVE_UP_S = 10.0  # a process in the middle of a driver call may not die


def main(grace_s: float, command: list[str]) -> NoReturn:
    """Run the command until it ends, or until the pipe does."""
    wake = _waker()
    for option, value in ((SUBREAPER, 1), (PARENT_DEATH_SIGNAL, signal.SIGTERM)):
        ctypes.CDLL(None).prctl(option, value)
    try:
        child = subprocess.Popen(  # noqa: S603 (what the user asked for)
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_the_reaper
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be started: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND)
    status = _wait(child.pid, wake)
    if status is None:
        status = _terminate(child.pid, grace_s)
    _kill_all()
    _end(signal.SIGKILL if status is None else status)


def _waker() -> int:
    """A descriptor that becomes readable when a child ends or a signal to stop comes."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the server, which decides
    signal.signal(signal.SIGTERM, lambda *_: _end_the_pipe())
    return reading


def _end_the_pipe() -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _die_with_the_reaper() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _wait(pid: int, wake: int) -> int | None:
    """The wait status of the child when it ends; None when the pipe does first."""
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if 0 in readable and not os.read(0, 1):
            return None
        with suppress(BlockingIOError):
            os.read(wake, 512)
        status = _reap(pid)
        if status is not None:
            return status


def _terminate(pid: int, grace_s: float) -> int | None:
    """Send SIGTERM and wait up to `grace_s` seconds; returns the wait status, or None."""
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while time.monotonic() < end:
        status = _reap(pid)
        if status is not None:
            return status
        time.sleep(0.01)
    return None


def _reap(pid: int) -> int | None:
    """Reap every child that has ended; returns the status of `pid` if it is among them, else None."""
    found = None
    with suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == pid:
                found = dead[1]
    return found


def _kill_all() -> None:
    """Kill the reaper's children until there are none: orphans of the killed become its own."""
    end = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> list[int]:
    own = []
    for entry in Path("/proc").glob("[0-9]*"):  # which a folder that isn't there has none of
        with suppress(OSError):
            # "pid (name, which may hold anything) state parent …"
            if int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                own.append(int(entry.name))
    return own


def _end(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

"""A decoder that a picture has taken over: `python taken_over.py [unconfined] … KIND MEMORY [REGION BYTES]`.

It starts as the real one does, and gives up what the real one gives up. Then a "picture" that begins with
`ATTACK` is an order: JSON with the parent, a sibling, and where the parent keeps a secret. It tries each way
out and answers with how each ended, as the message of an error: "done", or the name of the errno.

No way does harm where it is open: signals are number 0, what is written is what stands there.
"""

import ctypes
import errno
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from snugvl.core.resources import Region
from snugvl.errors import ImageError
from snugvl.server.media import worker

ATTACK = b"ATTACK"
Tries = dict[str, Callable[[], Any]]

_NICE = os.getpriority(os.PRIO_PROCESS, os.getppid())  # the parent's, which stays as it is where this is open
_libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # of calls that the C library has no function for: on x86_64, on aarch64
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "kcmp": (312, 272), "rt_sigqueueinfo": (129, 138), "tgkill": (234, 131), "execveat": (322, 281),
    "openat2": (437, 437), "pidfd_send_signal": (424, 424), "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434), "clone3": (435, 435), "process_madvise": (440, 440),
    "seccomp": (317, 277), "add_key": (248, 217),
}  # fmt: skip


class _Piece(ctypes.Structure):
    _fields_ = (("start", ctypes.c_char_p), ("length", ctypes.c_size_t))


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library, or a system call by its number; OSError where it fails."""
    long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if name in NUMBERS:
        number = NUMBERS[name][platform.machine() == "aarch64"]
        found = _libc.syscall(ctypes.c_long(number), *long)
    else:
        found = getattr(_libc, name)(*long)
    if found == -1:
        raise OSError(ctypes.get_errno(), name)


def _memory(parent: int, address: int, secret: str) -> Tries:
    mine = _Piece(ctypes.c_char_p(secret.encode()), len(secret))  # keeps the bytes
    theirs = _Piece(ctypes.cast(address, ctypes.c_char_p), len(secret))
    pieces = (ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return {
        "process_vm_readv": lambda: _call("process_vm_readv", parent, *pieces),
        "process_vm_writev": lambda: _call("process_vm_writev", parent, *pieces),
        "ptrace": lambda: _call("ptrace", 2, parent, address, 0),
        "memory of the parent": lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY),
        "its environment": lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY),
        "kcmp": lambda: _call("kcmp", parent, os.getpid(), 0, 0, 0),
        "process_madvise": lambda: _call("process_madvise", -1, 0, 0, 0, 0),
        "poisoned pages": lambda: _call("madvise", 0, 0, 100),
        "perf_event_open": lambda: _call("perf_event_open", 0, parent, -1, -1, 0),
    }


def _signals(parent: int, sibling: int) -> Tries:
    return {
        "kill the parent": lambda: os.kill(parent, 0),
        "kill a sibling": lambda: os.kill(sibling, 0),
        "kill its group": lambda: os.kill(0, 0),
        "tgkill": lambda: _call("tgkill", parent, parent, 0),
        "rt_sigqueueinfo": lambda: _call("rt_sigqueueinfo", parent, 0, ctypes.byref(ctypes.c_long())),
        "pidfd_open": lambda: _call("pidfd_open", parent, 0),
        "pidfd_send_signal": lambda: _call("pidfd_send_signal", -1, 0, 0, 0),
        "owner of a descriptor": lambda: _call("fcntl", 0, 8, parent),
        "limits of the parent": lambda: _call(
            "prlimit64", parent, 7, 0, ctypes.byref((ctypes.c_ulong * 2)())
        ),
        "priority of the parent": lambda: _call("setpriority", 0, parent, _NICE),
        "processors of the parent": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
    }


def _programs() -> Tries:
    nothing = ctypes.c_char_p(b"/nonexistent/nothing")
    return {
        "execve": lambda: _call("execve", nothing, 0, 0),
        "execveat": lambda: _call("execveat", -100, nothing, 0, 0, 0),
        "fork": _fork,
        "clone3": lambda: _call("clone3", 0, 0),
        "executable memory": lambda: _call("mmap", 0, 4096, 5, 0x22, -1, 0),
        "memory made executable": lambda: _call("mprotect", 0, 0, 5),
        "dumpable again": lambda: _call("prctl", 4, 1, 0, 0, 0),
    }


def _files(region_bytes: int) -> Tries:
    return {
        "read a file": lambda: os.open("/etc/hostname", os.O_RDONLY),
        "write a file": lambda: os.open("/tmp/taken", os.O_WRONLY | os.O_CREAT),
        "openat2": lambda: _call("openat2", -100, 0, 0, 0),
        "look at a file": lambda: os.stat("/etc/passwd"),  # noqa: PTH116 - the call itself
        "list a folder": lambda: os.listdir("/proc"),  # noqa: PTH208 - the call itself
        "delete a file": lambda: os.unlink("/nonexistent/nothing"),  # noqa: PTH108 - the call itself
        "truncate what is open": lambda: os.ftruncate(0, region_bytes // 2),
        "shared memory anew": lambda: os.memfd_create("taken"),
        "a segment": lambda: _call("shmget", 0, 0, 0o1600),
        "mount": lambda: _call("mount", 0, 0, 0, 0, 0),
        "socket": lambda: _call("socket", 2, 1, 0),
        "local socket": lambda: _call("socketpair", 1, 1, 0, ctypes.byref((ctypes.c_int * 2)())),
        "connect": lambda: _call("connect", 0, 0, 0),
        "splice": lambda: _call("splice", 0, 0, 1, 0, 0, 0),
    }


def _kernel() -> Tries:
    return {
        "bpf": lambda: _call("bpf", 0, 0, 0),
        "userfaultfd": lambda: _call("userfaultfd", 0),
        "io_uring": lambda: _call("io_uring_setup", 1, 0),
        "keyctl": lambda: _call("keyctl", 0, -3, 0),
        "add_key": lambda: _call("add_key", 0, 0, 0, 0, 0),
        "unshare": lambda: _call("unshare", 0),
        "setns": lambda: _call("setns", -1, 0),
        "another user": lambda: os.setuid(os.getuid()),
        "another filter": lambda: _call("seccomp", 1, 0, 0),
        "personality": lambda: _call("personality", 0xFFFFFFFF),
    }


def _fork() -> None:
    if not os.fork():
        os._exit(0)
    os.wait()


def attacked(order: dict[str, Any]) -> dict[str, str]:
    """How each way out ended."""
    tries = {
        **_memory(order["parent"], order["address"], order["secret"]),
        **_signals(order["parent"], order["sibling"]),
        **_programs(),
        **_files(order["region_bytes"]),
        **_kernel(),
    }
    return {name: _ended(attempt) for name, attempt in tries.items()}


def _ended(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def main(arguments: list[str]) -> None:
    if arguments[0] == "unconfined":
        worker.confine = lambda: ("do anything",)  # type: ignore[attr-defined]
    real = worker.answer

    def answer(job: dict[str, Any], data: bytes) -> Any:
        if data.startswith(ATTACK):
            message = json.dumps(attacked(json.loads(data[len(ATTACK) :])))
            return worker._failure(ImageError(message))
        return real(job, data)

    worker.answer = answer
    at = next(i for i, word in enumerate(arguments) if word in ("pictures", "videos"))
    kind, memory, *region = arguments[at:]
    worker.main(kind, int(memory), Region.inherited(*region) if region else None)


if __name__ == "__main__":
    main(sys.argv[1:])

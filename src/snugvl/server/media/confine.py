"""Rights that a decoder gives up for good, on Linux: what remains is to compute and to answer.

    capabilities   none are left, root's neither
    no_new_privs   no program gives any back
    Landlock       no file is opened or run, no process outside is read or traced; since Linux 6.12: signalled
    seccomp        of all system calls only those of `_FREE` and `_CHECKED` are made; any other is an EPERM

The list of calls is what decoding the tests' pictures and videos needs (memory, threads, clocks, and reading
and writing what is open already), so whatever Linux adds is refused, too. A system without one of the layers
goes on with the others, and `confine` says what a decoder that was taken over could still do.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

# What is left without any layer: first what Landlock refuses, then what it refuses since `_SCOPES_SINCE`.
ALL_RIGHTS: Final = (
    "run programs",
    "read the memory of other processes of its user",
    "signal them",
    "lower their limits",
)

# What decoders may call whatever the arguments are, by its number on x86_64 and aarch64.
_FREE: Final = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216),
    "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165), "sysinfo": (99, 179), "sigaltstack": (131, 132), "gettid": (186, 178),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "set_robust_list": (273, 99), "getcpu": (309, 168), "getrandom": (318, 278),
    "membarrier": (324, 283), "rseq": (334, 293),
}  # fmt: skip
_CLONE3: Final = 435  # its flags are behind a pointer: "not there", so that the C library takes clone
_KILL_PROCESS, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's struct seccomp_data

_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38  # of prctl
_SET_MODE_FILTER, _ALL_THREADS = 1, 1  # of seccomp
_CAPABILITIES_V3: Final = 0x2008_0522
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # of Landlock, on all processors
_RULESET_VERSION: Final = 1
# How many rights over files each version of Landlock knows; since which it knows TCP, and signals.
_FILE_BITS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_SINCE, _SCOPES_SINCE = 4, 6


@dataclass(frozen=True, slots=True)
class _Processor:
    """Which column of the table is a processor's, its name in the kernel, and two numbers more."""

    column: int
    arch: int
    seccomp: int
    capset: int


_PROCESSORS: Final = {
    "x86_64": _Processor(0, 0xC000_003E, 317, 126),
    "aarch64": _Processor(1, 0xC000_00B7, 277, 91),
}


@dataclass(frozen=True, slots=True)
class _Check:
    """A call that is allowed for some values of one argument, of which the lower 32 bits are looked at."""

    numbers: tuple[int, int]
    argument: int
    rule: Literal["equals", "has", "lacks"]
    values: tuple[int, ...]


def _checked(pid: int) -> tuple[_Check, ...]:
    """The calls that may do more than decoding needs. `pid`: of the process itself."""
    thread, executable = 0x10000, 4
    dont_need, free, huge, guard, no_guard = 4, 8, 14, 102, 103
    return (
        _Check((9, 222), 2, "lacks", (executable,)),  # mmap
        _Check((10, 226), 2, "lacks", (executable,)),  # mprotect
        # madvise: what poisons pages of the shared memory would end the parent, too
        _Check((28, 233), 2, "equals", (dont_need, free, huge, guard, no_guard)),
        _Check((56, 220), 0, "has", (thread,)),  # clone: threads, no processes
        _Check((157, 167), 0, "equals", (15,)),  # prctl: a thread's name
        _Check((234, 131), 0, "equals", (pid,)),  # tgkill: abort
        _Check((302, 261), 0, "equals", (0,)),  # prlimit64: its own limits
    )


def confine() -> tuple[str, ...]:
    """Give up all rights that decoding doesn't need, of this process, which has one thread.

    Returns:
        What code that takes this process over could still do to others; nothing where all is refused.
    """
    if sys.platform != "linux":
        return ALL_RIGHTS
    hide()
    libc = ctypes.CDLL(None)
    processor = _PROCESSORS.get(platform.machine())
    if processor is not None:
        _drop_capabilities(libc, processor)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ALL_RIGHTS
    landlock = _landlock(libc)
    if processor is not None and _seccomp(libc, processor):
        return ()
    if not landlock:
        return ALL_RIGHTS
    return ALL_RIGHTS[3 if landlock >= _SCOPES_SINCE else 2 :]


def hide() -> None:
    """Let no process of this user read this one's memory or environment, and no core dump keep them.

    Programs that it starts are as they were; a debugger of it needs root from here on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _drop_capabilities(libc: ctypes.CDLL, processor: _Processor) -> None:
    """None effective, permitted or inheritable: root's process can't trace others, nor lift its limits."""
    header, none = struct.pack("<Ii", _CAPABILITIES_V3, 0), bytes(24)
    libc.syscall(ctypes.c_long(processor.capset), header, none)


def _landlock(libc: ctypes.CDLL) -> int:
    """Open no file from here on, reach no process; the version that does so, 0 where there is none."""
    create = ctypes.c_long(_CREATE_RULESET)
    version: int = libc.syscall(create, None, ctypes.c_size_t(0), ctypes.c_uint(_RULESET_VERSION))
    if version < 1:
        return 0
    files = (1 << _FILE_BITS.get(version, max(_FILE_BITS.values()))) - 1
    rules = struct.pack(
        "=QQQ", files, 3 if version >= _TCP_SINCE else 0, 3 if version >= _SCOPES_SINCE else 0
    )
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    ruleset: int = libc.syscall(create, rules, ctypes.c_size_t(size), ctypes.c_uint(0))
    if ruleset < 0:
        return 0
    restricted = libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0
    os.close(ruleset)
    return version if restricted else 0


class _Program(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _seccomp(libc: ctypes.CDLL, processor: _Processor) -> bool:
    """Whether the kernel took the filter, for all threads."""
    code = b"".join(_filter(processor, os.getpid()))
    program = _Program(len(code) // 8, code)
    number, mode = ctypes.c_long(processor.seccomp), ctypes.c_uint(_SET_MODE_FILTER)
    return bool(libc.syscall(number, mode, ctypes.c_uint(_ALL_THREADS), ctypes.byref(program)) == 0)


def _filter(processor: _Processor, pid: int) -> Iterator[bytes]:
    """The program that the kernel runs before each call: its instructions.

    Whatever isn't named is refused, so the other numbers that a processor has (x32) are as well; a call in
    the way of another processor (32-bit x86) ends the process.
    """
    yield _instruction(_LOAD, _ARCH_AT)
    yield _instruction(_EQUAL, processor.arch, skip_if=1)
    yield _instruction(_RETURN, _KILL_PROCESS)
    yield _instruction(_LOAD, _NUMBER_AT)
    for numbers in _FREE.values():
        yield _instruction(_EQUAL, numbers[processor.column], skip_else=1)
        yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_EQUAL, _CLONE3, skip_else=1)
    yield _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    for check in _checked(pid):
        code = _ANY_BIT if check.rule in ("has", "lacks") else _EQUAL
        yield _instruction(_EQUAL, check.numbers[processor.column], skip_else=2 * len(check.values) + 2)
        yield _instruction(_LOAD, _ARGUMENTS_AT + 8 * check.argument)
        matched, otherwise = _ALLOW, _ERRNO | errno.EPERM
        if check.rule == "lacks":
            matched, otherwise = otherwise, matched
        for value in check.values:
            yield _instruction(code, value, skip_else=1)
            yield _instruction(_RETURN, matched)
        yield _instruction(_RETURN, otherwise)
    yield _instruction(_RETURN, _ERRNO | errno.EPERM)


def _instruction(code: int, value: int, *, skip_if: int = 0, skip_else: int = 0) -> bytes:
    """One instruction, as the kernel's struct sock_filter; a comparison skips so many of them."""
    return struct.pack("=HBBI", code, skip_if, skip_else, value)

"""What a decoder process may not do."""

import asyncio
import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snugvl.errors import ImageError, SnugvlError
from snugvl.server.media import confine
from snugvl.server.media.confine import ALL_RIGHTS
from snugvl.server.media.decoders import Decoders, Kind, memory_for_pictures
from tests.server.media import taken_over as probe
from tests.server.media.pictures import encoded
from tests.server.media.pool import LIMITS, decoded


def in_a_worker(code: str) -> str:
    """What `code` prints in a process whose limits alone are set, through a pipe that was open before."""
    script = f"""
import os, socket, sys
from snugvl.server.media import worker
worker.preload()
worker.confine = lambda: ()
worker.shut_doors(64 << 20)
try:
    {code}
    print("done")
except (OSError, MemoryError) as error:
    print(type(error).__name__)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.strip()


ALLOWED, REFUSED, NOT_THERE = 0x7FFF0000, 0x50001, 0x50026  # what a filter returns: EPERM, ENOSYS
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="rights of Linux")


@LINUX
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("open('/etc/hostname')", "OSError"),
        ("socket.socket()", "OSError"),
        ("os.pipe()", "OSError"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("bytearray(1 << 20)", "done"),
    ],
)
def test_a_worker_can_open_nothing_by_its_limits_alone(code: str, printed: str) -> None:
    assert in_a_worker(code) == printed


@LINUX
@pytest.mark.parametrize("kind", ["pictures", "videos"])
def test_a_taken_over_decoder_reaches_nobody(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every way out is refused, and the parent goes on: the same process decodes the next picture."""
    with taken_over(kind, monkeypatch, tmp_path) as pool:
        left, ended = attack(pool)
        assert left == ()
        assert ended.pop("clone3") == "ENOSYS", "its flags can't be looked at: threads come by clone"
        assert set(ended.values()) == {"EPERM"}, {k: v for k, v in ended.items() if v != "EPERM"}
        assert asyncio.run(decoded(pool, encoded("PNG"))).size == (8, 6)


@LINUX
def test_the_ways_out_are_open_where_nothing_confines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test above could fail: an unconfined decoder gets out, and the server is told what is left."""
    with taken_over("pictures", monkeypatch, tmp_path, "unconfined") as pool:
        left, ended = attack(pool)
    assert left == ("do anything",)
    for way in ("kill the parent", "kill a sibling", "tgkill", "fork", "executable memory"):
        assert ended[way] == "done", ended
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() == "0":
        assert ended["process_vm_readv"] == ended["process_vm_writev"] == "done", ended
    assert ended["execve"] == "ENOENT", "there is no such program; one that is there would run"


@LINUX
@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ("prctl", ALL_RIGHTS),
        ("seccomp landlock", ALL_RIGHTS),
        ("seccomp", ALL_RIGHTS[3:]),
        ("seccomp scopes", ALL_RIGHTS[2:]),
        ("landlock", ()),
    ],
)
def test_what_is_left_is_told(missing: str, left: tuple[str, ...]) -> None:
    """On systems without one of the layers, played by numbers that no call has."""
    script = """
import os, sys
from dataclasses import replace
from snugvl.server.media import confine
missing = sys.argv[1].split()
if "prctl" in missing:
    confine._SET_NO_NEW_PRIVS = -1
if "seccomp" in missing:
    confine._PROCESSORS = {k: replace(v, seccomp=-1) for k, v in confine._PROCESSORS.items()}
if "landlock" in missing:
    confine._CREATE_RULESET = -1
elif confine.ctypes.CDLL(None).syscall(444, None, 0, 1) < confine._SCOPES_SINCE:
    sys.exit("skip")
if "scopes" in missing:
    confine._SCOPES_SINCE = 1 << 20
left = confine.confine()
for one in left:
    print(one)
refused = 0
for attempt in (
    lambda: open("/proc/self/stat"),
    lambda: open(f"/proc/{os.getppid()}/mem"),
    lambda: os.kill(os.getppid(), 0),
):
    try:
        attempt()
    except PermissionError:
        refused += 1
if "landlock" in missing and "seccomp" in missing:
    none = [line for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm"))]
    assert none == ["CapPrm:\\t0000000000000000\\n", "CapEff:\\t0000000000000000\\n"], none
else:
    assert "prctl" in missing or refused == (2 if "scopes" in missing else 3), refused
"""
    run = subprocess.run([sys.executable, "-P", "-c", script, missing], capture_output=True, text=True)
    if run.stderr.strip() == "skip":
        pytest.skip("a kernel whose Landlock doesn't know signals")
    assert run.stderr == ""
    assert tuple(run.stdout.splitlines()) == left


def verdict(processor: str, number: int, arguments: Sequence[int] = (), arch: int | None = None) -> int:
    """What the filter of a processor says of a system call, by a machine that runs its program."""
    mine = confine._PROCESSORS[processor]
    data = struct.pack("<iIQ6Q", number, arch or mine.arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", b"".join(confine._filter(mine, pid=77))))
    word, at = 0, 0
    while True:
        code, skip_if, skip_else, value = program[at]
        at += 1
        if code == confine._RETURN:
            return int(value)
        if code == confine._LOAD:
            (word,) = struct.unpack_from("<I", data, value)
        else:
            met = word == value if code == confine._EQUAL else bool(word & value)
            at += skip_if if met else skip_else


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_the_filter_of_each_processor(processor: str) -> None:
    column = confine._PROCESSORS[processor].column
    assert {verdict(processor, numbers[column]) for numbers in confine._FREE.values()} == {ALLOWED}
    refused = {name: verdict(processor, numbers[column]) for name, numbers in probe.NUMBERS.items()}
    assert refused.pop("clone3") == NOT_THERE
    assert set(refused.values()) == {REFUSED}, refused
    other = "aarch64" if processor == "x86_64" else "x86_64"
    for arch in (confine._PROCESSORS[other].arch, 0x40000003):  # 32-bit x86
        assert verdict(processor, confine._FREE["read"][column], arch=arch) == 0x80000000
    assert verdict(processor, confine._FREE["write"][column] | 0x40000000) == REFUSED  # x32's
    mmap, mprotect, madvise, clone, prctl, tgkill, prlimit = (
        check.numbers[column] for check in confine._checked(77)
    )
    for number, good, bad in (
        (mmap, (0, 4096, 3), (0, 4096, 7)),
        (mprotect, (0, 4096, 1), (0, 4096, 5)),
        (madvise, (0, 4096, 4), (0, 4096, 100)),  # pages are poisoned
        (clone, (0x3D0F00,), (0x1200011,)),  # a thread; a process
        (prctl, (15,), (4, 1)),  # a name; dumpable
        (tgkill, (77, 78, 6), (76, 76, 6)),
        (prlimit, (0, 7), (76, 7)),
    ):
        assert verdict(processor, number, good) == ALLOWED
        assert verdict(processor, number, bad) == REFUSED


@LINUX
def test_a_worker_has_one_thread_when_it_is_confined() -> None:
    """Landlock and capabilities are a thread's, so none may have begun before."""
    script = (
        "import os; from snugvl.inputs.frames import preload; from snugvl.server.media import worker;"
        "worker.preload(); preload(); print(len(os.listdir('/proc/self/task')))"
    )
    environment = {"PATH": "", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.strip() == "1"


@LINUX
def test_a_hidden_process_is_read_by_none_of_its_user() -> None:
    script = "from snugvl.server.media.confine import hide, ctypes; hide(); print(ctypes.CDLL(None).prctl(3))"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"


def test_a_worker_has_no_secrets(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGVL_TEST_SECRET", "hush")
    given = {}
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        given.update(options["env"])
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    asyncio.run(decoders.warm())
    assert "PATH" in given
    assert not [name for name in given if "SECRET" in name]


@contextmanager
def taken_over(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> Iterator[Decoders]:
    """A pool whose one process does what a picture says."""
    shim = folder / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -P {probe.__file__} {" ".join(arguments)} "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shim))
    pool = Decoders(kind, 1, memory_for_pictures(LIMITS))
    yield pool
    pool.close()


def attack(pool: Decoders) -> tuple[tuple[str, ...], dict[str, str]]:
    """What the pool says is left to a decoder, and how each of its ways out ended."""
    secret = ctypes.create_string_buffer(b"a key of this server")
    order = {
        "parent": os.getpid(),
        "address": ctypes.addressof(secret),
        "secret": secret.value.decode(),
        "region_bytes": 1 << 20,
    }

    async def run() -> tuple[tuple[str, ...], dict[str, str]]:
        left = await pool.warm()
        with subprocess.Popen(["sleep", "60"]) as sibling:
            try:
                order["sibling"] = sibling.pid
                with pytest.raises(ImageError) as caught:
                    await decoded(pool, probe.ATTACK + json.dumps(order).encode())
                assert sibling.poll() is None
            finally:
                sibling.kill()
        return left, json.loads(str(caught.value))

    found = asyncio.run(run())
    assert secret.value == order["secret"].encode()  # type: ignore[union-attr]
    return found


def test_a_worker_imports_no_torch() -> None:
    script = "import sys, snugvl.server.media.worker as w; w.preload(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "pydantic", "httpcore2"} & set(run.stdout.split())


def test_a_worker_that_does_not_start_is_no_fault_of_the_picture(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def run() -> None:
        with pytest.raises(SnugvlError, match="the picture decoder did not start") as caught:
            await decoded(decoders, encoded("PNG"))
        assert not isinstance(caught.value, ImageError)

    asyncio.run(run())

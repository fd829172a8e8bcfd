"""A machine without /proc, as a bare chroot: less is known there, and nothing ends."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from snugvl.cli import running
from snugvl.core import resources

IN_A_NAMESPACE = """
from snugvl.backends.child import reaper
from snugvl.cli import running
from snugvl.core import resources
from snugvl.hardware import host
from snugvl.inputs import trials
from snugvl.server.media import worker
from snugvl.server.ollama import routes
assert resources.began() > 1e9 and resources.resident() == 0
with running.announced("http://127.0.0.1:1", "m", ("m",)):
    (server,) = running.running()
    assert running._resident(server.pid) is None
assert routes._since().endswith("Z")
assert reaper._children() == []
assert worker._address_space() > 0
assert trials._memory() == (trials.MEMORY_BYTES, 0)
memory = host.memory()
assert memory.free_bytes == memory.total_bytes > 1 << 28  # free pages alone refused a server
"""


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(1), psutil.AccessDenied(1), FileNotFoundError()])
def test_who_tells_nothing_of_a_process_stops_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> NoReturn:
        raise error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(psutil, "Process", fail)
    resources.began.cache_clear()
    try:
        assert resources.began() == pytest.approx(time.time(), abs=60)
        assert resources.resident() == 0
        with running.announced("http://127.0.0.1:1", "m", ("m",)):
            (server,) = running.running()
            assert running._resident(server.pid) is None
            assert not running._alive(server)  # the lock on its record says that it is
    finally:
        resources.began.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_an_empty_proc(tmp_path: Path) -> None:
    script = 'mount -t tmpfs none /proc && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /proc"]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no namespace of mounts may be made here")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    environment = {"PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run(
        [*command[:4], script, sys.executable, IN_A_NAMESPACE],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr

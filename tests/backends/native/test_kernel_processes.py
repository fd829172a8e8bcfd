"""The process that compiles ahead: what it is told, what it says, and when it ends."""

import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from snugvl.backends.native import kernel_processes
from snugvl.engine import precompile
from snugvl.engine.precompile import CompileReport
from tests.patience import until


def test_it_does_what_it_is_told_at_the_lowest_priority_and_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[object] = []
    order = pickle.dumps(("the order", 1, 3))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(order)))
    monkeypatch.setattr(sys, "argv", ["", str(os.getppid())])
    monkeypatch.setattr(os, "nice", told.append, raising=False)

    def compiled(
        job: str, number: int, count: int, first: Callable[[], None], said: Callable[[str, str], None]
    ) -> CompileReport:
        told.append((job, number, count))
        first()
        said("begins", "0a1b")
        return CompileReport(3, ("gemm: no",))

    monkeypatch.setattr(precompile, "read_compiler", lambda: told.append("read"))
    monkeypatch.setattr(precompile, "compile_kernels", compiled)
    kernel_processes.main()
    assert told == [19, "read", ("the order", 1, 3)]
    first, begun, last = capsys.readouterr().out.splitlines()
    assert first == kernel_processes.FIRST
    assert begun == kernel_processes.VARIANT + "begins 0a1b"
    assert json.loads(last) == {"kernels": 3, "failed": ["gemm: no"]}


def test_it_ends_with_whoever_started_it() -> None:
    """Killed, the engine can't end it."""
    child = "import sys, snugvl.backends.native.kernel_processes as k; k.leave_with(int(sys.argv[1]))"
    parent = f"""
        import os, subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())]).pid, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert psutil.pid_exists(pid)
        started.kill()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

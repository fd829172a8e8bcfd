"""A first start's check: in a process of its own, whatever becomes of that, and only once."""

import errno
import io
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugvl.backends.native import checking
from snugvl.backends.native.ahead import KernelsAhead
from snugvl.backends.native.checking import check_model, run, settle
from snugvl.backends.place import TargetDevice
from snugvl.core import kernel_checks
from snugvl.core.kernel_checks import OK, CheckedOn, KernelCheck, KernelVerdict, checks_file
from snugvl.core.options import LoadOptions
from snugvl.engine.precompile import CompileJob
from snugvl.errors import EngineError
from snugvl.layers import replaced
from snugvl.models.loader import Storage
from tests.backends.native.orders import READS
from tests.engine.check_jobs import tiny_job
from tests.engine.toy import engine
from tests.patience import PATIENCE_S

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
HERE = CheckedOn("NVIDIA GeForce RTX 5060", "12.0", "580.95", "2.13.0", "3.7.1", "0.2.0")
GOOD = KernelVerdict("gemv", "1×128", 0.001, 0.1, OK)
BAD = KernelVerdict("skinny", "2×128", 0.5, 0.0, "not equal to plain torch")


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(replaced, "_withdrawn", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def job() -> CompileJob:
    return tiny_job(Storage("int4", "int8"), most=2, sees=False)


def say(*lines: object) -> str:
    """A program that says what a process that checks would."""
    texts = [json.dumps(each) if not isinstance(each, str) else each for each in lines]
    return "".join(f"print({text!r}, flush=True)\n" for text in texts)


def checked(code: str, job: CompileJob) -> KernelCheck:
    program = READS + "job, limit = load(sys.stdin.buffer)\n" + code
    return run(job, "a job", HERE, 7, "cpu", (sys.executable, "-S", "-c", program))


def as_line(verdict: KernelVerdict) -> dict[str, Any]:
    return {field: getattr(verdict, field) for field in KernelVerdict.__dataclass_fields__}


def test_what_a_process_finds_is_kept(job: CompileJob) -> None:
    code = say({"begins": "gemv"}, as_line(GOOD), "a remark", {"begins": "skinny"}, as_line(BAD))
    found = checked(
        "assert (limit, sys.argv[2]) == (7, 'cpu')\n" + code + say({"loaded_bytes": 3 << 20}), job
    )
    assert (found.verdicts, found.whole, found.loaded_bytes) == ((GOOD, BAD), True, 3 << 20)
    assert found.withdrawn == (BAD,)
    assert found.network == "Qwen3VLForConditionalGeneration (bf16, int4, int8; KV cache bf16)"
    kernel_checks.add(checks_file(), found)
    assert kernel_checks.load(checks_file()) == (found,)


def test_what_the_bare_context_took_is_kept_where_the_driver_tells(job: CompileJob) -> None:
    found = checked(say({"context_bytes": 300 << 20, "loaded_bytes": 3 << 20}), job)
    assert (found.context_bytes, found.loaded_bytes) == (300 << 20, 3 << 20)
    assert checked(say({"loaded_bytes": 3 << 20}), job).context_bytes == -1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((300, 520), {"context_bytes": 300 << 20, "loaded_bytes": 180 << 20}),
        ((300, 310), {"context_bytes": 300 << 20, "loaded_bytes": 0}),
        ((None, None), {"loaded_bytes": 5 << 20}),
        ((300, None), {"loaded_bytes": 5 << 20}),
    ],
)
def test_what_others_take_meanwhile_is_not_the_checks(
    told: tuple[int | None, ...], said: dict[str, int], job: CompileJob,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The process's own memory counts, without torch's part (40 MiB here); else what the card has lost."""
    found = iter(each if each is None else each << 20 for each in told)
    monkeypatch.setattr(checking, "process_reader", lambda device: lambda: next(found))
    monkeypatch.setattr(checking.torch.cuda, "memory_reserved", lambda device: 40 << 20)
    monkeypatch.setattr("snugvl.engine.kernel_check.check_kernels", lambda job, device, tell: 5 << 20)
    monkeypatch.setattr(sys, "argv", ["check", str(os.getpid()), "cpu"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps((job, 7)))))
    monkeypatch.setattr(checking, "leave_with", lambda pid: None)
    checking.main()
    assert json.loads(capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("end", "verdict"),
    [("os._exit(9)", "ends its process"), ("time.sleep(1000)", "doesn't return within 3 s")],
)
def test_a_kernel_that_ends_or_stops_its_process_is_left_out_of_the_next(
    end: str, verdict: str, job: CompileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "RETURN_S", 3.0)
    first = say({"begins": "gemv"}, as_line(GOOD), {"begins": "scan"}) + end + "\n"
    code = "if 'scan' not in job.withdrawn:\n" + "".join(f"    {line}\n" for line in first.splitlines())
    found = checked(code + say({"loaded_bytes": 0}), job)
    assert found.whole
    assert [(each.kernel, each.verdict) for each in found.verdicts] == [("gemv", OK), ("scan", verdict)]


def test_a_process_that_fails_by_itself_blames_no_kernel(
    job: CompileJob, caplog: pytest.LogCaptureFixture
) -> None:
    found = checked("raise SystemExit('no CUDA')", job)
    assert (found.verdicts, found.whole) == ((), False)
    assert "kernels can't be checked here: no CUDA" in caplog.messages


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGKILL", "SIGTERM"])
def test_a_process_that_something_else_ended_blames_no_kernel(
    name: str, job: CompileJob, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the system, for want of host memory: the kernel would be withdrawn for ever."""
    end = f"import signal\nsignal.signal(signal.{name}, signal.SIG_DFL)\n" if name != "SIGKILL" else ""
    number = int(getattr(signal, name))
    found = checked(say({"begins": "gemv"}, as_line(GOOD), {"begins": "scan"}) + end + kill(number), job)
    assert (found.verdicts, found.whole) == ((GOOD,), False)
    assert "kernels can't be checked here: something else ended its process" in caplog.messages


def kill(number: int) -> str:
    return f"os.kill(os.getpid(), {number})\n"


def test_a_kernel_that_crashes_is_no_other_s_fault(job: CompileJob) -> None:
    """SIGSEGV is a kernel's, or its driver's."""
    code = "if 'scan' not in job.withdrawn:\n    print('{\"begins\": \"scan\"}', flush=True)\n    " + kill(11)
    found = checked(code + say({"loaded_bytes": 0}), job)
    assert [(each.kernel, each.verdict) for each in found.verdicts] == [("scan", "ends its process")]


def test_a_machine_without_room_for_a_process_starts_all_the_same(
    job: CompileJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = run(job, "a job", HERE, 7, "cpu", ("/nowhere/python",))
    assert (found.verdicts, found.whole) == ((), False)
    assert "kernels can't be checked here: No such file or directory" in caplog.messages


def test_a_process_that_never_reads_is_not_waited_for(
    job: CompileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "START_S", 1.0)
    long = replace(job, withdrawn=tuple(f"a kernel of a long name, {number}" for number in range(10_000)))
    found = run(long, "a job", HERE, 7, "cpu", (sys.executable, "-c", "import time\ntime.sleep(1000)"))
    assert (found.verdicts, found.whole) == ((), False)


def test_a_check_takes_no_longer_than_it_may(job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "CHECK_S", 2.0)
    found = checked(say({"begins": "gemv"}, as_line(GOOD), {"begins": "scan"}) + "time.sleep(1000)", job)
    assert not found.whole
    assert set(found.verdicts) <= {GOOD}, "nobody knows what was wrong"


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="kernels are interpreted")
def test_faults_of_every_kind_in_a_process(job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken as `unseen_card/` breaks them, where a GPU is, too."""
    faults = "nan:lone_codes slightly:lone_byte compile:rms_norm crash:attend_splits"
    monkeypatch.setenv("SNUGVL_FAULTS", faults)
    monkeypatch.setenv("SNUGVL_AS_ON_A_GPU", "1")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).with_name('unseen_card')}:{ROOT}")
    found = run(job, "a job", HERE, 0, "cpu")
    assert found.whole
    assert {each.kernel: each.verdict for each in found.withdrawn} == {
        "lone_codes": "not finite",
        "lone_byte": "not equal to plain torch",
        "rms_norm": "doesn't compile",
        "attend_splits": "ends its process",
    }
    assert {"attend_chunk", "embed", "rope_and_cache"} <= {
        e.kernel for e in found.verdicts if e.verdict == OK
    }


class Kernels(KernelsAhead):
    """Compiles nothing."""

    begun = 0

    def begin(self, *_: object) -> None:
        self.begun += 1
        self.finished.set()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], list[CompileJob]]]:
    """Start an engine on a card; what is not used, and the jobs that were checked until then."""
    made: Any = engine()
    jobs: list[CompileJob] = []
    place: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(checking, "compile_job_of", lambda *_: replace(tiny, withdrawn=replaced.withdrawn()))
    tiny = tiny_job(Storage("bf16"), sees=False)

    def check(job: CompileJob, digest: str, on: CheckedOn, *_: object, **__: object) -> KernelCheck:
        jobs.append(job)
        return KernelCheck(on, digest, "Toy", 1.0, "now", 0, whole, (GOOD, BAD))

    monkeypatch.setattr(checking, "run", check)
    monkeypatch.setattr(checking, "room", lambda: 1)  # no process begins before
    whole = True

    def start(
        on: CheckedOn = HERE,
        kernels: KernelsAhead | None = None,
        *,
        all_of_it: bool = True,
        clear: bool = True,
    ) -> Any:
        nonlocal whole
        whole = all_of_it
        if clear:
            replaced._withdrawn.clear()
        monkeypatch.setattr(checking, "checked_on", lambda _: on)
        found = settle(made.model, made.config, place, kernels, 0, lambda *_: None)
        assert replaced.withdrawn() == tuple(each.kernel for each in found)
        return [each.kernel for each in found], list(jobs)

    return start


def test_a_second_start_reads_what_the_first_has_found(
    starts: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    kernels = Kernels()
    found, jobs = starts(kernels=kernels)
    assert (found, len(jobs), kernels.begun) == (["skinny"], 1, 1)
    sentence = (
        "the kernel skinny isn't used on this GPU (not equal to plain torch): slower ones or plain torch "
        "compute the same"
    )
    assert caplog.messages == [sentence]
    assert starts(kernels=Kernels()) == (["skinny"], jobs), "nothing is checked"
    assert starts() == (["skinny"], jobs), "nor where nothing is compiled ahead"


@pytest.mark.parametrize("field", CheckedOn.__dataclass_fields__)
def test_whatever_is_new_is_checked(field: str, starts: Callable[..., Any]) -> None:
    starts(kernels=Kernels())
    other = replace(HERE, **{field: "another"})
    found, jobs = starts(other, Kernels())
    assert len(jobs) == 2
    assert jobs[1].withdrawn == (), "what was wrong on the other is tried again"
    assert found == ["skinny"]


def test_a_check_that_was_cut_short_goes_on_at_the_next_start(starts: Callable[..., Any]) -> None:
    starts(kernels=Kernels(), all_of_it=False)
    _, jobs = starts(kernels=Kernels())
    assert len(jobs) == 2
    assert jobs[1].withdrawn == ("skinny",), "without what is known"
    assert len(starts(kernels=Kernels())[1]) == 2


def test_a_second_model_of_a_process_is_checked_without_what_is_withdrawn(
    starts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even where nothing could be kept of the first."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernel_checks, "add", full)
    starts(kernels=Kernels())
    kept = "what a check of kernels found isn't kept, the next start checks again: No space left on device"
    assert kept in caplog.messages
    _, jobs = starts(kernels=Kernels(), clear=False)
    assert jobs[1].withdrawn == ("skinny",)


def test_the_process_that_checks_begins_while_kernels_are_compiled(
    starts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host has room for it; what it is started for may not come."""
    monkeypatch.setattr(checking, "room", lambda: 2)
    monkeypatch.setattr(checking, "COMMAND", (sys.executable, "-c", "import time\ntime.sleep(1000)"))
    monkeypatch.setattr(checking, "COMPILE_S", 0.05)
    begun: list[Any] = []
    real = checking._started
    monkeypatch.setattr(checking, "_started", lambda *args: begun.append(real(*args)) or begun[-1])
    slow = KernelsAhead()
    monkeypatch.setattr(slow, "begin", lambda *_: None)
    starts(kernels=slow)
    assert [each._process.returncode for each in begun] == [-signal.SIGKILL]
    used: list[Any] = []
    check = checking.run
    monkeypatch.setattr(
        checking, "run", lambda *args, started: used.append(started) or check(*args, started=started)
    )
    starts(kernels=Kernels())
    assert used == begun[1:]
    assert begun[1]._process.returncode is not None


def test_a_start_doesnt_wait_forever_for_the_compiler(
    starts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checking, "COMPILE_S", 0.05)
    slow = KernelsAhead()
    monkeypatch.setattr(slow, "begin", lambda *_: None)
    assert starts(kernels=slow) == ([], [])
    assert "kernels take long to compile, so they are checked at the next start, not now" in caplog.messages


def test_a_cpu_has_no_kernels() -> None:
    made: Any = engine()
    place = TargetDevice(torch.device("cpu"), "host memory", 1 << 30)
    kernels = KernelsAhead()
    assert settle(made.model, made.config, place, kernels, 0, lambda *_: None) == ()
    assert kernels.finished.is_set()
    with pytest.raises(EngineError, match="kernels run on NVIDIA's GPUs"):
        check_model(LoadOptions("pocket", device="cpu", context=512), lambda *_: None)


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    for text in ("", "[]", '{"schema": 1, "checks": [{}]}', '{"schema": 2, "checks": []}'):
        file.write_text(text)
        assert kernel_checks.load(file) == ()
    found = KernelCheck(HERE, "a job", "Toy", 1.0, "now", 0, True, (GOOD,))
    file.write_text(json.dumps({"schema": 1, "checks": [{"on": 7}]}))
    kernel_checks.add(file, found)
    kernel_checks.add(file, replace(found, seconds=2.0))
    assert [each.seconds for each in kernel_checks.load(file)] == [2.0]


def test_the_process_ends_with_its_lines(job: CompileJob) -> None:
    """Threads that read end, too."""
    checked(say({"loaded_bytes": 0}), job)
    for thread in [each for each in threading.enumerate() if each.name == "snugvl-check"]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

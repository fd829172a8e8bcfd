"""Compiling ahead: once for what runs, beside it, and never in its way."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugvl.backends.native import ahead
from snugvl.backends.native.ahead import KernelsAhead
from snugvl.backends.native.kernel_processes import FIRST, KernelProcesses, ahead_of, nothing_compiled, room
from snugvl.backends.native.loading import load_engine
from snugvl.backends.process import engine_process
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.config import EngineConfig
from snugvl.core.options import LoadOptions
from snugvl.engine import precompile
from snugvl.engine.engine import Engine
from snugvl.engine.precompile import CompileJob, compile_job_of
from snugvl.errors import RequestError
from snugvl.hardware import host
from snugvl.layers.kernels.compiler import ahead_of_time
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from tests.backends.native.orders import READS
from tests.engine.toy import engine
from tests.patience import PATIENCE_S, until

SAYS = 'print(\'a remark\'); print(\'{"kernels": 3, "failed": ["gemm: too large"]}\')'


def job_of(made: Engine) -> CompileJob:
    network: Any = made.model
    return compile_job_of(network, made.config, made.model.device)


def with_cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine, or that a container is given of it."""
    monkeypatch.setattr(host, "cores", lambda: count)


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one process, unless a test says otherwise."""
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(8 << 30, 3 << 30))
    with_cores(2, monkeypatch)


@pytest.fixture
def wanted() -> CompileJob:
    return job_of(engine())


def attempt(code: str) -> KernelsAhead:
    program = READS + "order = sys.stdin.buffer.read()\n" + code
    return KernelsAhead(KernelProcesses((sys.executable, "-S", "-c", program)))


def test_what_is_compiled_once_is_not_asked_for_again(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snugvl")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('.'); assert b'CompileJob' in order; " + SAYS
    folder = tmp_path / "not there yet"
    for version in ("3.6.0", "3.6.0", "3.7.0"):
        attempt(code).compile(wanted, folder, version)
    assert ran.read_text() == "..", "another version of Triton compiles anew"
    assert [path.suffix for path in folder.iterdir()] == [".done"] * 2
    assert "a kernel can't be compiled ahead: gemm: too large" in caplog.messages
    assert any(message.startswith("3 kernels are compiled, in ") for message in caplog.messages)


def test_a_first_start_waits_for_what_a_first_question_needs(
    wanted: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the rest; and not for long where every process but one has it."""
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(64 << 30, 32 << 30))
    with_cores(4, monkeypatch)
    early, late = tmp_path / "early", tmp_path / "late"
    code = (
        f"number = load(io.BytesIO(order))[1]; first = {FIRST!r}\n"
        f"while number and not os.path.exists({str(late)!r}): time.sleep(0.01)\n"
        f"print(first, flush=True); open({str(early)!r}, 'w'); time.sleep(1000)"
    )
    kernels = attempt(code)
    thread = threading.Thread(target=kernels.compile, args=(wanted, tmp_path, "3.6.0"))
    thread.start()
    until(early.exists)
    said: list[str] = []
    monkeypatch.setattr(ahead, "FIRST_S", 0.3)
    kernels.wait_for_first(lambda stage, _: said.append(stage))
    assert said == ["compiling kernels, for the first start of this model on this GPU"]
    assert not kernels.first.is_set()
    late.touch()
    assert kernels.first.wait(PATIENCE_S)
    assert not kernels.finished.is_set()
    kernels.wait_for_first(lambda stage, _: said.append(stage))
    assert len(said) == 1, "nobody waits for what is there"
    kernels.stop()
    thread.join(PATIENCE_S)


def test_another_model_or_gpu_is_compiled_anew(wanted: CompileJob) -> None:
    other = CompileJob(wanted.outline, wanted.engine, Hardware((8, 9), 76))
    names = {ahead.name_of(each, "3.6.0") for each in (wanted, wanted, other)}
    assert len(names) == 2
    larger = job_of(engine(num_blocks=99))
    assert larger == wanted, "how much memory is free today makes no difference"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no triton')", "no triton"),
        ("os._exit(7)", "its process ended with 7"),
    ],
)
def test_a_failure_is_said_and_tried_again_at_the_next_start(
    code: str, why: str, wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snugvl")
    attempt(code).compile(wanted, tmp_path, "3.6.0")
    assert caplog.messages == [f"kernels can't be compiled ahead, each is compiled when it is needed: {why}"]
    assert not list(tmp_path.iterdir())


def test_little_host_memory_is_left_alone(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "snugvl")
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(2 << 30, 1 << 30))
    attempt("raise SystemExit").compile(wanted, tmp_path, "3.6.0")
    assert caplog.messages == ["too little host memory is free to compile kernels ahead"]


def test_stopping_ends_the_process_and_says_nothing(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snugvl")
    kernels = attempt("time.sleep(1000)")
    thread = threading.Thread(target=kernels.compile, args=(wanted, tmp_path, "3.6.0"))
    thread.start()
    until(lambda: kernels._processes._started)
    kernels.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    kernels.compile(wanted, tmp_path, "3.6.0")
    assert not caplog.messages
    assert not list(tmp_path.iterdir())


def test_several_processes_have_a_share_each(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "snugvl")
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(64 << 30, 32 << 30))
    with_cores(4, monkeypatch)
    told = f"open({str(tmp_path / 'told')!r}, 'a').write(f'{{number}} of {{count}}\\n'); "
    kernels = attempt("job, number, count = load(io.BytesIO(order)); " + told + SAYS)
    kernels.compile(wanted, tmp_path / "folder", "3.6.0")
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["0 of 2", "1 of 2"]
    assert any(message.startswith("6 kernels are compiled, in ") for message in caplog.messages)


@pytest.mark.parametrize(
    ("free_gib", "cores", "count"), [(1, 16, 0), (2, 16, 1), (4, 16, 3), (60, 64, 8), (60, 8, 4), (60, 2, 1)]
)
def test_as_many_as_there_is_room_for(
    free_gib: int, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(64 << 30, free_gib << 30))
    with_cores(cores, monkeypatch)
    assert room() == count


def test_shares_are_all_kernels_and_none_twice(wanted: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    @contextmanager
    def dry_run(_: Hardware, noted: Callable[[str], None]) -> Iterator[None]:
        tell.append(noted)
        yield

    def rehearse(*_: object) -> None:
        for kernel in "abcdefg":
            order.append(kernel)
            tell[-1](kernel)

    class Compiler:
        def __init__(self, *_: object, **__: object) -> None:
            self.mine: list[str] = []

        def add(self, kernel: str) -> Future[None]:
            self.mine.append(kernel)
            compiling = Future[None]()

            def compile_it() -> None:
                sleep(0.02)
                order.append(f"{kernel} is compiled")
                compiling.set_result(None)

            if len(self.mine) == 1:
                threading.Thread(target=compile_it).start()
            return compiling

        def results(self) -> list[tuple[SimpleNamespace, Exception | None]]:
            compiled.extend(self.mine)
            return [
                (SimpleNamespace(name=each), OSError("no") if each == "e" else None) for each in self.mine
            ]

    tell: list[Callable[[str], None]] = []
    order: list[str] = []
    monkeypatch.setattr(ahead_of_time, "dry_run", dry_run)
    monkeypatch.setattr(ahead_of_time, "Compiler", Compiler)
    monkeypatch.setattr(precompile, "network_from", lambda _: None)
    monkeypatch.setattr(precompile, "rehearse", rehearse)
    reports = [precompile.compile_kernels(wanted, number, 3) for number in range(3)]
    assert [report.kernels for report in reports] == [3, 2, 2]
    assert [report.failed for report in reports] == [(), ("e: no",), ()]
    assert sorted(compiled) == list("abcdefg")
    assert compiled[:3] == ["a", "d", "g"], "what is needed first is everybody's first"
    assert order[:4] == ["a", "a is compiled", "b", "c"], "and done before it looks further"
    assert order[8:12] == ["a", "b", "b is compiled", "c"]


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_machine_where_nothing_was_compiled(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path if variable == "TRITON_CACHE_DIR" else tmp_path / ".triton" / "cache"
    assert nothing_compiled()
    folder.mkdir(parents=True, exist_ok=True)
    assert nothing_compiled()
    (folder / "snugvl-0.done").touch()
    assert not nothing_compiled()


def test_a_process_without_a_home_looks_where_triton_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it gives where nobody has a home
    monkeypatch.chdir(tmp_path)
    assert nothing_compiled()
    folder = tmp_path / "~" / ".triton" / "cache"
    folder.mkdir(parents=True)
    (folder / "snugvl-0.done").touch()
    assert not nothing_compiled()


@pytest.mark.parametrize(("new", "said", "early"), [(True, "", 1), (True, "none", 0), (False, "", 0)])
def test_a_first_start_has_the_processes_ready(
    new: bool, said: str, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch is read; and where the engine turns out to need none, they end."""
    started: list[KernelProcesses] = []
    monkeypatch.setenv("SNUGVL_AHEAD", said)
    monkeypatch.setattr(engine_process, "_look", lambda *_: object())
    monkeypatch.setattr(engine_process, "_beside", lambda *_: None)
    monkeypatch.setattr(engine_process, "_collect_garbage", lambda: None)
    monkeypatch.setattr(engine_process, "nothing_compiled", lambda: new)
    monkeypatch.setattr(KernelProcesses, "start", lambda processes: started.append(processes))

    def load(*_: Any, kernels: KernelsAhead | None, **__: Any) -> None:
        assert len(started) == early
        if kernels is not None:
            made: Any = engine()
            kernels.begin(made.model, made.config, torch.device("cpu"))
        raise ZeroDivisionError

    monkeypatch.setattr("snugvl.backends.native.loading.load_engine", load)
    with pytest.raises(ZeroDivisionError):
        engine_process.native(EngineChoice("pocket"), lambda *_: None)
    assert all(each.stopped for each in started)


def test_a_cpu_needs_none() -> None:
    kernels = KernelsAhead(KernelProcesses(("no such command",)))
    made: Any = engine()
    kernels.begin(made.model, made.config, made.model.device)
    assert kernels.finished.is_set()
    assert kernels.first.is_set()


def test_what_cant_be_told_is_compiled_when_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a GPU that this process doesn't see."""
    kernels = KernelsAhead(KernelProcesses(("no such command",)))
    made: Any = engine()
    kernels.begin(made.model, made.config, torch.device("cuda"))
    assert kernels.finished.wait(PATIENCE_S)
    assert "kernels can't be compiled ahead; each is compiled when it is needed" in caplog.messages


STORED = {
    "bf16": Storage(),
    "int8, all of it": Storage("int8", "int8", tower="int8"),
    "int4, for its inputs": Storage("int4", "int8", group=32),
}


@pytest.mark.parametrize("storage", STORED.values(), ids=STORED)
def test_a_network_is_known_before_it_has_memory(storage: Storage, tiny: Path) -> None:
    """What is compiled while it loads is what the engine needs that it becomes."""
    seen: list[CompileJob] = []
    made, cpu = engine(), torch.device("cpu")

    def outlined(network: LoadableNetwork) -> None:
        assert next(network.parameters()).is_meta
        assert not any(isinstance(each, Linear) and each.squares is not None for each in network.modules())
        seen.append(compile_job_of(network, made.config, cpu))

    network = load_model(tiny, dtype=torch.bfloat16, device=cpu, storage=storage, outlined=outlined)
    assert seen == [compile_job_of(network, made.config, cpu)]


def test_an_engine_has_its_kernels_compiled_while_it_loads() -> None:
    begun: list[tuple[int, str]] = []

    class Watched(KernelsAhead):
        def begin(self, network: LoadableNetwork, config: EngineConfig, device: torch.device) -> None:
            assert next(network.parameters()).is_meta
            begun.append((config.max_num_seqs, device.type))

    kernels = Watched()
    options = LoadOptions("pocket", device="cpu", context=512)
    with closing(load_engine(options, kernels=kernels).backend) as backend:
        assert begun == [(backend._engine.config.max_num_seqs, "cpu")]
        assert backend._kernels is kernels


@pytest.mark.parametrize(("said", "times"), [("kernels", 1), ("graphs", 1), ("none", 0)])
def test_the_engines_process_has_them_compiled_unless_it_is_told_not_to(
    said: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setenv("SNUGVL_AHEAD", said)

    waited: list[object] = []
    monkeypatch.setattr(KernelsAhead, "begin", lambda *told: begun.append(told))
    monkeypatch.setattr(KernelsAhead, "wait_for_first", lambda *told: waited.append(told))
    monkeypatch.setattr(engine_process, "_collect_garbage", lambda: None)  # it would be for all tests
    choice = EngineChoice("pocket", device="cpu", context=512)
    hosted: Any = engine_process.native(choice, lambda *_: None)
    with closing(hosted.backend):
        assert len(begun) == times
        assert len(waited) == times


def test_the_variable() -> None:
    assert [ahead_of(value) for value in (None, "", "none", "kernels", "graphs")] == [
        "kernels", "kernels", "none", "kernels", "graphs",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="SNUGVL_AHEAD 'all' is unknown; use none, kernels, graphs"):
        ahead_of("all")

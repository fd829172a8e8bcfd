"""Compiling ahead: once for what runs, beside it, and never in its way."""

import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.backends.native import ahead
from snugvl.backends.native.ahead import KernelsAhead, ahead_of
from snugvl.backends.native.loading import load_engine
from snugvl.backends.process import engine_process
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.config import EngineConfig
from snugvl.core.options import LoadOptions
from snugvl.engine.engine import Engine
from snugvl.engine.precompile import CompileJob, compile_job_of
from snugvl.errors import RequestError
from snugvl.hardware import host
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from tests.engine.toy import engine
from tests.patience import PATIENCE_S, until

READS = "import sys; order = sys.stdin.buffer.read(); "
SAYS = 'print(\'a remark\'); print(\'{"kernels": 3, "failed": ["gemm: too large"]}\')'


def job_of(made: Engine) -> CompileJob:
    network: Any = made.model
    return compile_job_of(network, made.config, made.model.device, threads=2)


@pytest.fixture
def wanted() -> CompileJob:
    return job_of(engine())


def attempt(code: str) -> KernelsAhead:
    return KernelsAhead((sys.executable, "-c", READS + code))


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


def test_another_model_or_gpu_is_compiled_anew(wanted: CompileJob) -> None:
    other = CompileJob(wanted.outline, wanted.engine, Hardware((8, 9), 76), wanted.threads)
    names = {ahead._name_of(each, "3.6.0") for each in (wanted, wanted, other)}
    assert len(names) == 2
    larger = job_of(engine(num_blocks=99))
    assert larger == wanted, "how much memory is free today makes no difference"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no triton')", "no triton"),
        ("import os; os._exit(7)", "its process ended with 7"),
    ],
)
def test_a_failure_is_said_and_tried_again_at_the_next_start(
    code: str, why: str, wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snugvl")
    attempt(code).compile(wanted, tmp_path, "3.6.0")
    assert caplog.messages == [f"kernels can't be compiled ahead, each is compiled when it is needed: {why}"]
    assert not list(tmp_path.iterdir())


def test_little_main_memory_is_left_alone(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "snugvl")
    monkeypatch.setattr(host, "memory", lambda: host.Memory(2 << 30, 1 << 30))
    attempt("raise SystemExit").compile(wanted, tmp_path, "3.6.0")
    assert caplog.messages == ["too little main memory is free to compile kernels ahead"]


def test_stopping_ends_the_process_and_says_nothing(
    wanted: CompileJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snugvl")
    kernels = attempt("import time; time.sleep(1000)")
    thread = threading.Thread(target=kernels.compile, args=(wanted, tmp_path, "3.6.0"))
    thread.start()
    until(lambda: kernels._process is not None)
    kernels.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    kernels.compile(wanted, tmp_path, "3.6.0")
    assert not caplog.messages
    assert not list(tmp_path.iterdir())


def test_a_cpu_needs_none() -> None:
    kernels = KernelsAhead(("no such command",))
    made: Any = engine()
    kernels.begin(made.model, made.config, made.model.device)
    assert kernels.finished.is_set()


def test_what_cant_be_told_is_compiled_when_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a GPU that this process doesn't see."""
    kernels = KernelsAhead(("no such command",))
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
        seen.append(compile_job_of(network, made.config, cpu, 2))

    network = load_model(tiny, dtype=torch.bfloat16, device=cpu, storage=storage, outlined=outlined)
    assert seen == [compile_job_of(network, made.config, cpu, 2)]


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
    monkeypatch.setattr(KernelsAhead, "begin", lambda *told: begun.append(told))
    monkeypatch.setattr(engine_process, "_collect_garbage", lambda: None)  # it would be for all tests
    choice = EngineChoice("pocket", device="cpu", context=512)
    hosted: Any = engine_process.native(choice, lambda *_: None)
    with closing(hosted.backend):
        assert len(begun) == times


def test_the_variable() -> None:
    assert [ahead_of(value) for value in (None, "", "none", "kernels", "graphs")] == [
        "kernels", "kernels", "none", "kernels", "graphs",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="SNUGVL_AHEAD 'all' is unknown; use none, kernels, graphs"):
        ahead_of("all")

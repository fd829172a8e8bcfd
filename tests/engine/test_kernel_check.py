"""Kernels beside plain torch: all of them agree, and each kind of fault is found, named and replaced."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

import snugvl
from snugvl.core.kernel_checks import OK, KernelVerdict
from snugvl.engine.kernel_check import check_kernels, compared, give_values
from snugvl.engine.memory import allocate
from snugvl.engine.precompile import CompileJob, _batch, network_from
from snugvl.layers.replaced import plainly, recordable, usable, withdraw, withdrawn
from snugvl.models.loader import Storage
from tests.engine.check_jobs import FP8, MIXTURE, QWEN3_5, QWEN3_VL, launches, leave_out_repetitions, tiny_job
from tests.engine.check_jobs import as_on_a_gpu as as_on_a_gpu

CPU = torch.device("cpu")
KERNELS = Path(snugvl.__file__).parent / "layers" / "kernels"
# Those that nothing of this size, or nothing but a GPU, launches: `tests/layers/kernels` has them.
LARGE = {"search_support", "gemv", "sixteenth", "lone_ggml"}
JOBS: dict[str, Callable[[], CompileJob]] = {
    "int4": lambda: tiny_job(Storage("int4", "int8", tower="int8")),
    "bf16 with an FP8 cache": lambda: tiny_job(Storage("bf16"), "fp8", most=18),
    "FP8": lambda: tiny_job(Storage("fp8"), "bf16", QWEN3_VL | {"quantization_config": FP8}),
    "int6": lambda: tiny_job(Storage("int6", "int8"), most=34),
    "Qwen3.5": lambda: tiny_job(Storage("bf16"), "bf16", QWEN3_5, most=9),
    "GGUF": lambda: tiny_job(Storage("int4"), "bf16", blocks=True, most=66),
    "a mixture": lambda: tiny_job(Storage("bf16"), "bf16", MIXTURE, sees=False),
    "experts in host memory": lambda: tiny_job(Storage("int4", expert_slots=3), "bf16", MIXTURE, sees=False),
    "a mixture's GGUF": lambda: tiny_job(Storage("int4"), "bf16", MIXTURE, blocks=True, sees=False),
    "int8, long": lambda: tiny_job(Storage("int8"), most=194),
}


def verdicts_of(job: CompileJob) -> list[KernelVerdict]:
    found: list[KernelVerdict] = []
    check_kernels(job, CPU, lambda said: found.append(said) if isinstance(said, KernelVerdict) else None)
    return found


def break_kernel(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a kernel end with `fault`, which is given all that it was launched with, by name."""
    real = InterpretedFunction.__getitem__

    def take(kernel: Any, grid: Any) -> Any:
        launch = real(kernel, grid)
        if kernel.fn.__name__ != name:
            return launch

        def run(*values: Any, **constants: Any) -> None:
            launch(*values, **constants)
            fault(**dict(zip(kernel.arg_names, values, strict=False)))

        return run

    monkeypatch.setattr(InterpretedFunction, "__getitem__", take)


# The others check kernels of the same kinds in other formats and sizes, as `tests/layers/kernels` does.
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.sample("Qwen3.5", "a mixture's GGUF")
def test_every_kernel_is_its_twin(name: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]()
    launched = leave_out_repetitions(job, monkeypatch)
    found = verdicts_of(job)
    assert len(found) == len(launched)
    assert {each.kernel for each in found} == {kernel for kernel, _ in launched}
    assert {each.verdict for each in found} == {OK}
    assert max(each.error for each in found) < (0.03 if "cache" in name else 1e-4)
    assert all(each.ms > 0 and each.shape for each in found)
    assert withdrawn() == ()


def test_no_kernel_is_left_out(as_on_a_gpu: None) -> None:
    checked = {kernel for job in JOBS.values() for kernel, _ in launches(job())}
    entry = re.compile(r"^@launched\n@triton\.jit.*\ndef (\w+)", re.MULTILINE)
    names = {
        name for path in KERNELS.rglob("*.py") for name in entry.findall(path.read_text(encoding="utf-8"))
    }
    assert names - checked == LARGE


def nan(out: torch.Tensor, **_: object) -> None:
    out.fill_(torch.nan)


def slightly(out: torch.Tensor, **_: object) -> None:
    out.mul_(1.02)


def one_value(out: torch.Tensor, **_: object) -> None:
    out.view(-1)[0] += out.abs().amax()


def uncompiled(**_: object) -> None:
    class CompilationError(Exception):
        pass

    raise CompilationError("/home/someone: no such instruction")


def raising(**_: object) -> None:
    raise RuntimeError("shared memory")


# Packed weights take the interpreter twice as long: one kind of fault in them does.
@pytest.mark.parametrize(
    ("kernel", "fault", "verdict"),
    [
        ("lone_codes", nan, "not finite"),
        ("skinny", slightly, "not equal to plain torch"),
        ("lone_byte", one_value, "not equal to plain torch"),
        ("rms_norm", uncompiled, "doesn't compile"),
        ("embed", raising, "raises RuntimeError"),
        ("attend_chunk", slightly, "not equal to plain torch"),
    ],
    ids=["lone_codes", "skinny", "lone_byte", "rms_norm", "embed", "attend_chunk"],
)
@pytest.mark.sample("rms_norm", "attend_chunk")
def test_a_fault_is_found_named_and_replaced(
    kernel: str, fault: Callable[..., None], verdict: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That kernel and no other, in all that it is used for; what takes its place is looked at, too."""
    break_kernel(kernel, fault, monkeypatch)
    packed = kernel in ("lone_codes", "skinny", "lone_byte", "embed")
    found = verdicts_of(tiny_job(Storage("int4", "int8") if packed else Storage("bf16"), most=2, sees=False))
    assert {each.kernel: each.verdict for each in found if each.withdrawn} == {kernel: verdict}
    assert withdrawn() == (kernel,)


def test_kernels_that_are_used_together_go_together(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel("merge_splits", nan, monkeypatch)
    verdicts_of(tiny_job(Storage("bf16"), most=2, sees=False))
    assert withdrawn() == ("attend_splits", "merge_splits")


def test_what_replaces_a_kernel_may_be_wrong_as_well(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until nothing is left but plain torch, which is right; graphs can't be recorded of it then."""
    broken = (
        "lone_codes",
        "lone_byte",
        "skinny",
        "gemv",
        "gemm",
        "dequantize",
        "attend_chunk",
        "attend_splits",
    )
    for name in broken:
        break_kernel(name, raising, monkeypatch)
    found = verdicts_of(tiny_job(Storage("int4", "int8"), most=2, sees=False))
    assert set(withdrawn()) == {each.kernel for each in found if each.withdrawn} <= set(broken)
    assert not usable("lone_codes")
    assert not recordable()


def test_a_wrong_whole_number_is_wrong(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(slots: torch.Tensor, **_: object) -> None:
        slots += 1

    break_kernel("place_tokens", shifted, monkeypatch)
    found = verdicts_of(tiny_job(Storage("bf16"), most=2, sees=False))
    (wrong,) = (each for each in found if each.withdrawn)
    assert (wrong.kernel, wrong.verdict) == ("place_tokens", "2 of 2 whole numbers differ")


def test_what_torch_cant_do_says_nothing_of_a_kernel(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("snugvl.layers.linear.plain_norm", exhausted)
    found = verdicts_of(tiny_job(Storage("bf16"), most=2, sees=False))
    wrong = {each.verdict for each in found if each.verdict != OK}
    assert wrong == {"not checked: plain torch's twin: no memory"}
    assert withdrawn() == ()


def test_the_answer_stays_right_without_kernels(as_on_a_gpu: None) -> None:
    """A network's logits, by kernels, by torch, and with some kernels withdrawn."""
    job = tiny_job(Storage("int4", "int8"))
    network = network_from(job.outline)
    torch.manual_seed(5)
    give_values(network, CPU)
    cache = allocate(network, replace(job.engine, num_blocks=32))

    def logits() -> torch.Tensor:
        cache.storage.zero_()
        return network.forward(_batch((3, 1), cache), cache)

    with torch.inference_mode():
        ours = logits()
        with plainly():
            right = logits()
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)
        both = ("gemm", "dequantize")
        for names in (("skinny",), both, ("attend_chunk",), ("attend_splits",), ("rms_norm",)):
            withdraw(names)
            torch.testing.assert_close(logits(), right, atol=1e-4, rtol=1e-4)


def test_compared_is_of_what_torch_found_finite() -> None:
    right = torch.tensor([1.0, 2.0, torch.inf])
    assert compared([(torch.tensor([1.0, 2.0, 5.0]), 0.01)], [(right, 0.01)]) == (0.0, "")
    assert compared([(torch.tensor([1.0, torch.nan, 5.0]), 0.01)], [(right, 0.01)])[1] == "not finite"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError("no room"), "not checked: no memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "not checked: no memory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "not checked: No space left on device"),
        (CalledProcessError(1, ["/usr/bin/gcc", "/home/me/x.c"]), "not checked: the C compiler fails"),
    ],
    ids=["torch's memory", "the driver's memory", "a full disk", "the C compiler"],
)
@pytest.mark.sample("the driver's memory")
def test_what_isnt_a_kernels_fault_withdraws_none(
    error: Exception, verdict: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> None:
        raise error

    break_kernel("embed", fails, monkeypatch)
    found = verdicts_of(tiny_job(Storage("bf16"), most=2, sees=False))
    assert {each.verdict for each in found if each.kernel == "embed"} == {verdict}
    assert {each.verdict for each in found if each.kernel != "embed"} == {OK}
    assert withdrawn() == ()
    assert "take_highest" in {each.kernel for each in found}, "the rest is looked at"


def test_a_check_ends_where_nothing_has_memory(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a kernel nor its twin: none is to blame, and nothing can go on without a result."""

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    break_kernel("rms_norm", no_memory, monkeypatch)
    monkeypatch.setattr("snugvl.layers.linear.plain_norm", no_memory)
    found = verdicts_of(tiny_job(Storage("bf16"), most=2, sees=False))
    assert "not checked: plain torch's twin: no memory" in {each.verdict for each in found}
    assert not any(each.withdrawn for each in found)
    assert withdrawn() == ()

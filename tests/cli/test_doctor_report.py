"""The file for an issue: all that helps, and nothing that says whose machine it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.core.kernel_checks import OK, CheckedOn, KernelCheck, KernelVerdict, add, checks_file
from snugvl.core.ledger import keep_last_start, last_start_file
from snugvl.diagnose.report import report, struck_out
from snugvl.hardware import probe
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Machine, Tenant
from snugvl.hardware.software import TorchBuild, torch_build
from snugvl.version import __version__
from tests.command import Ran

Run = Callable[..., Ran]
SECRETS = ("mallory", "wintermute", "/home/mallory", "my-private-model", "sk-ant-1234")


def check(torch: str, *verdicts: KernelVerdict) -> KernelCheck:
    on = CheckedOn("NVIDIA GeForce RTX 5060", "12.0", "580.95", torch, "3.7.1", __version__)
    return KernelCheck(on, "0a", "Qwen3VL (int4)", 4.2, "2026-11-27", 61 << 20, True, verdicts)


GOOD = KernelVerdict("attend_splits", "1×16×128 64×8×128", 0.0021, 0.034, OK)
BAD = KernelVerdict("lone_codes", "1×2048 6144×256", 0.4, 0.0, "not equal to plain torch")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """An RTX 5060 under WSL2, of somebody whose names are everywhere that a program finds some."""
    machine = describe("rtx-5060", os="wsl2", held="1GiB")
    tenants = (Tenant("/home/mallory/bin/my-private-model", 1 << 30, 77),)
    gpu = replace(
        machine.gpus[0], name="NVIDIA GeForce RTX 5060", driver="580.95", tenants=tenants, uuid="GPU-77"
    )
    machine = replace(machine, gpus=(gpu,), source="probed", notes=("/home/mallory is full",))
    monkeypatch.setattr(probe, "probe", lambda: machine)
    home = tmp_path / "home" / "mallory"
    for name, value in {
        "USER": "mallory", "LOGNAME": "mallory", "HOSTNAME": "wintermute", "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN": "sk-ant-1234",
        "SNUGVL_MODEL": "/home/mallory/my-private-model",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "wintermute.example.org")
    return machine


def test_it_has_what_an_issue_needs(here: Machine) -> None:
    start = {
        "when": "2026-11-27T12:00:00+00:00", "network": "Qwen3VL", "weights": "int4", "context": 8192,
        "rows": [{"name": "text weights", "planned_bytes": 2 << 30, "measured_bytes": 3 << 30}],
    }  # fmt: skip
    speed = {"clients": 1, "decode of one request, median, tokens/s": "81"}
    text = report(
        here, TorchBuild("2.13.0", (13, 0), cpu_only=False), [check("2.13.0", GOOD, BAD)],
        {"start": start, "speed": speed},
    )  # fmt: skip
    lines = [" ".join(line.replace("|", " ").split()) for line in text.splitlines()]
    for wanted in (
        f"snugvl {__version__}", "WSL2 yes", "CUDA of torch 13.0", "## NVIDIA GeForce RTX 5060",
        "compute capability 12.0", "driver 580.95", "text weights 2.00 GiB 3.00 GiB", "context 8192",
        "decode of one request, median, tokens/s 81",
        "attend_splits 1×16×128 64×8×128 0.0021 0.03 ok",
        "lone_codes 1×2048 6144×256 0.4 – not equal to plain torch",
    ):  # fmt: skip
        assert wanted in lines
    assert any("2 checked in 4 s, 1 not ok; kernels and libraries took 61 MiB" in line for line in lines)
    assert text.index("lone_codes") < text.index("attend_splits"), "what is wrong comes first"


def test_it_names_nobody(snugvl: Run, here: Machine, tmp_path: Path) -> None:
    """Not even where a name has come into what it is made of."""
    build = torch_build()
    assert build is not None
    odd = replace(BAD, verdict="raises OSError in /home/mallory/.triton")
    add(checks_file(), check(build.version, GOOD, odd))
    start = {"network": "Mallory at wintermute", "rows": [], "model": "my-private-model"}
    keep_last_start(last_start_file(), "start", start)
    file = tmp_path / "report.md"
    ran = snugvl("doctor", "--report", file)
    assert ran.code == 0
    assert "read it before you attach it" in ran.err
    text = file.read_text(encoding="utf-8")
    assert "lone_codes" in text
    for secret in (*SECRETS, "GPU-77", str(tmp_path)):
        assert secret.lower() not in text.lower()
    assert snugvl("doctor", "--report", "-").out == text


def test_names_are_struck_out_as_words() -> None:
    text = struck_out("ann: /home/ann/x, annotated, Ann.", {"ann", "/home/ann"})
    assert text == "(struck out): (struck out)/x, annotated, (struck out)."


def test_doctor_says_what_isnt_used_here(snugvl: Run, here: Machine) -> None:
    assert "Kernels:" not in snugvl("doctor").out
    build = torch_build()
    assert build is not None
    add(checks_file(), check(build.version, GOOD, BAD))
    add(checks_file(), replace(check("1.0", replace(BAD, kernel="gemm")), job="1b"))
    out = snugvl("doctor").out
    assert "Kernels: 2 checked beside plain torch, 1 not used" in out
    assert "the kernel lone_codes isn't used on this GPU (not equal to plain torch)" in out
    assert "gemm" not in out, "that was another torch"
    assert "Kernels:" not in snugvl("doctor", "--gpu", "rtx-5060").out


def test_a_check_prints_a_table(snugvl: Run, here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def checked(model: str, _: object) -> KernelCheck:
        asked.append(model)
        return check("2.13.0", GOOD, *bad)

    bad: list[KernelVerdict] = []
    monkeypatch.setattr("snugvl.loading.check_kernels", checked)
    ran = snugvl("doctor", "--check")
    assert (ran.code, asked) == (0, ["pocket"])
    assert "| attend_splits | 1×16×128 64×8×128 | 0.0021    | 0.03 | ok      |" in ran.out
    assert ran.out.endswith("1 kernels checked in 4 s\n")
    bad.append(BAD)
    ran = snugvl("doctor", "--check", "Qwen/Qwen3-VL-2B-Instruct")
    assert (ran.code, asked[1]) == (1, "Qwen/Qwen3-VL-2B-Instruct")
    assert "the kernel lone_codes isn't used on this GPU" in ran.out
    assert '"verdict": "not equal to plain torch"' in snugvl("doctor", "--check", "--json").out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--check", "--gpu", "rtx-5060"), "of this machine"),
        (("--report", "x.md", "--gpu", "rtx-5060"), "of this machine"),
        (("pocket",), "a model is for --check"),
        (("--log", "x", "--check"), "no other option"),
    ],
)
def test_what_it_cant_do_is_said(snugvl: Run, here: Machine, arguments: tuple[str, ...], why: str) -> None:
    ran = snugvl("doctor", *arguments)
    assert ran.code != 0
    assert why in " ".join(ran.err.replace("│", " ").split())

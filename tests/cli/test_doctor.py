"""`snugvl doctor`: on each recorded machine, described ones, and what can't be."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from snugvl.core.kernel_checks import CheckedOn, KernelCheck, KernelVerdict
from snugvl.core.sizes import GIB, MIB, format_size
from snugvl.hardware import calibration, probe
from snugvl.hardware.calibration import ContextStages
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Gpu, Machine, Tenant, record, replay
from tests.command import Ran

Run = Callable[..., Ran]

RECORDINGS = sorted((Path(__file__).parents[1] / "hardware" / "recordings").glob("*.json"))
PAGE = Path(__file__).parents[2] / "docs" / "machine.md"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """This machine, as the probe would find it: the RTX 3090 of the recordings, with nothing measured."""
    machine = replay(next(path for path in RECORDINGS if "3090" in path.stem))
    machine = replace(machine, source="probed", gpus=(replace(machine.gpus[0], context_bytes=None),))
    monkeypatch.setattr(probe, "probe", lambda: machine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return machine


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_recording_is_told_in_full(snugvl: Run, path: Path) -> None:
    machine = replay(path)
    ran = snugvl("doctor", "--machine", path)
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    assert "(recorded)" in ran.out.splitlines()[0]
    for gpu in machine.gpus:
        assert f"cuda:{gpu.index}  {gpu.name}" in ran.out
        assert f"{format_size(gpu.held_bytes)} held, {format_size(gpu.free_bytes)} free" in ran.out
        for tenant in gpu.tenants:
            assert f"{format_size(tenant.held_bytes)}  {tenant.name}" in ran.out
    for note in machine.notes:
        assert note in ran.out
    assert "No GPU" in ran.out if not machine.gpus else "compute" in ran.out


def test_the_bar_shows_what_is_held(snugvl: Run) -> None:
    out = snugvl("doctor", "--vram", "8GiB", "--held", "2GiB").out
    (bar,) = re.findall("█+░+", out)
    assert (bar.count("█"), bar.count("░")) == (12, 28)  # 2 GiB and what the driver keeps on Linux


def test_most_bytes_come_first(snugvl: Run) -> None:
    path = next(path for path in RECORDINGS if "3090" in path.stem)
    steps = snugvl("doctor", "--machine", path).out.partition("What to do")[2]
    assert steps.index("5.71 GiB") < steps.index("647 MiB") < steps.index("611 MiB") < steps.index("398 MiB")


def test_a_terminal_gets_colour_and_wrapped_lines(
    snugvl: Run, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = snugvl("doctor", "--gpu", "rtx-5060", "--os", "wsl2", "--held", "951MiB").out
    assert "\x1b[" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    about = [line for line in plain.splitlines() if "GB/s" not in line and "█" not in line]
    assert max(len(line) for line in about) <= 60


def test_names_of_processes_cannot_steer_the_terminal(snugvl: Run, tmp_path: Path) -> None:
    from snugvl.hardware.machine import record

    machine = describe("rtx-3090", held=GIB)
    evil = Tenant("evil\x1b[2J\x07", GIB, 5)
    path = tmp_path / "m.json"
    path.write_text(record(replace(machine, gpus=(replace(machine.gpus[0], tenants=(evil,)),))))
    ran = snugvl("doctor", "--machine", path)
    assert "evil[2J" in ran.out
    assert "\x1b" not in ran.out


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_json_is_the_documented_object(snugvl: Run, path: Path) -> None:
    ran = snugvl("doctor", "--machine", path, "--json")
    document = json.loads(ran.out)
    assert list(document) == ["schema", "machine", "torch", "odd", "steps", "kernels"]
    assert document["machine"].keys() == {field.name for field in fields(Machine)}
    assert [gpu["name"] for gpu in document["machine"]["gpus"]] == [gpu.name for gpu in replay(path).gpus]
    assert all(step.keys() == {"text", "frees_bytes", "resource", "gpu"} for step in document["steps"])


def test_the_page_names_every_field() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    own = {"schema", "machine", "torch", "odd", "steps", "text", "frees_bytes", "resource", "gpu", "kernels"}
    kinds = (Machine, Gpu, Tenant, KernelCheck, CheckedOn, KernelVerdict)
    known = {field.name for kind in kinds for field in fields(kind)}
    assert documented == own | known | {"version", "cuda", "cpu_only"}


def test_this_machine(snugvl: Run, here: Machine) -> None:
    out = snugvl("doctor").out
    assert "ollama" in out
    assert "--measure-context measures it" in out
    assert "CPU build" in out or "cuda" in json.loads(snugvl("doctor", "--json").out)["torch"]


def test_a_recording_of_this_machine(snugvl: Run, here: Machine, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    ran = snugvl("doctor", "--record", file)
    assert (ran.code, str(file) in ran.err) == (0, True)
    assert replay(file) == replace(here, source="recorded")
    ran = snugvl("doctor", "--record", tmp_path / "none" / "m.json")
    assert (ran.code, ran.err.count("\n")) == (1, 1)


def test_a_full_disk_names_what_can_go(
    snugvl: Run, here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe", lambda: replace(here, disk_free_bytes=3 * GIB))
    blobs = tmp_path / "hub" / "models--Qwen--old" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "a").open("wb") as file:
        file.truncate(9 * GIB)
    assert "9.00 GiB  disk: Delete the download of Qwen/old" in snugvl("doctor").out


def test_the_context_is_measured_and_remembered(
    snugvl: Run, here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = ContextStages(7000 * MIB, 6700 * MIB, 6650 * MIB, 6560 * MIB, 6577 * MIB, 7000 * MIB)
    monkeypatch.setattr(calibration, "_run", lambda gpu, environ: stages)
    assert (
        "423 MiB  of what is free goes to the CUDA context of each program with torch, once it starts (m"
        in snugvl("doctor", "--measure-context").out
    )
    (kept,) = calibration.load(calibration.calibration_file()).measurements
    assert (kept.component, kept.measured_bytes) == ("context", 423 * MIB)


def test_a_context_without_a_gpu(snugvl: Run, here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda: replace(here, gpus=(), notes=("There is none.",)))
    ran = snugvl("doctor", "--measure-context")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "There is none." in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpu", "rtx-5061"], 2, "rtx-5060"),
        (["--gpu", "rtx-5060", "--held", "9GiB"], 2, "9.00 GiB"),
        (["--gpu", "rtx-5060", "--held", "-1GiB"], 2, "negative"),
        (["--gpu", "rtx-5060", "--vram", "banana"], 2, "'banana'"),
        (["--gpu", "rtx-5060", "--gpus", "0"], 2, "number of GPUs 0"),
        (["--gpu", "rtx-5060", "--os", "plan9"], 2, "plan9"),
        (["--held", "1GiB"], 2, "--held describes a machine"),
        (["--machine", "no.json"], 3, "no.json"),
        (["--machine", "no.json", "--vram", "8GiB"], 2, "--vram describes another"),
        (["--gpu", "none", "--measure-context"], 2, "--measure-context"),
        (["--log", "-", "--gpu", "rtx-5060"], 2, "--log"),
    ],
)
def test_what_cannot_be(snugvl: Run, arguments: list[str], code: int, said: str) -> None:
    ran = snugvl("doctor", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert said in ran.err


def test_nothing_slow_is_imported() -> None:
    # pydantic is Typer's own: it loads it for any option of any command.
    code = (
        "import sys\nfrom snugvl.cli.app import run\n"
        "assert run(['doctor', '--gpu', 'rtx-5060', '--os', 'wsl2', '--held', '951MiB']) == 0\n"
        "assert run(['doctor']) == 0\n"
        "slow = {'torch', 'transformers', 'PIL', 'numpy', 'huggingface_hub', 'rich'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_probing_this_very_machine_never_fails() -> None:
    machine = probe.probe()
    assert machine.cpu_cores >= 1
    assert machine.gpus or machine.notes


def test_what_a_stranger_misread_is_said(snugvl: Run) -> None:
    """Memory that is not the GPU's, a context that is not held yet, a GPU that can't be used."""
    here = snugvl("doctor", "--gpu", "rtx-5060", "--os", "wsl2").out
    assert "System memory 14.00 GiB free of 16.00 GiB" in here
    assert "450 MiB  of what is free goes to the CUDA context" in here
    assert "What to do: on the left what each step frees at most" in here
    mac = snugvl("doctor", "--gpu", "none", "--os", "macos").out
    assert "No GPU that snugvl can use" in mac
    assert "On Apple silicon llama.cpp runs GGUF files on the GPU" in mac
    assert "Nothing to free" in mac
    assert "Nothing to do" not in mac
    assert "nothing is known of other programs' memory" in snugvl("doctor", "--gpu", "rtx-3090").out
    old = " ".join(snugvl("doctor", "--gpu", "gtx-1080").out.split())
    assert "Too old for snugvl's engines but llama.cpp's" in old
    assert "compute capability 6.1 is older than 7.5" in old
    assert "Too old" not in here


def test_a_described_gpu_of_another_maker_has_no_empty_name(snugvl: Run, tmp_path: Path) -> None:
    """Once "Apple M4 Max (), 48.00 GiB free": nobody has asked llama.cpp for its list."""
    machine = describe("m4-max", os="macos", ram="64GiB")
    (tmp_path / "mac.json").write_text(record(machine))
    out = snugvl("doctor", "--machine", tmp_path / "mac.json").out
    assert "Apple M4 Max, 48.00 GiB free of 48.00 GiB: GGUF files run on it" in out

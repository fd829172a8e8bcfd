"""What is odd, and what to do, most bytes first."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.sizes import GIB, MIB
from snugvl.hardware.advice import advise, unusable
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Machine, Tenant, replay
from snugvl.hardware.software import (
    BuildTools,
    TorchBuild,
    build_tools,
    driver_too_old,
    lacks_kernels,
    torch_build,
)

RECORDINGS = Path(__file__).parent / "recordings"


def recorded(name: str) -> Machine:
    return replay(RECORDINGS / f"{name}.json")


def test_a_desktop() -> None:
    steps = advise(recorded("rtx3090-desktop")).steps
    assert [step.frees_bytes // MIB for step in steps] == [5846, 647, 611, 398]
    assert "`ollama stop MODEL`" in steps[0].text
    assert "gnome-shell, Xorg" in steps[1].text
    assert "Close firefox (process 5120)" in steps[2].text
    assert not any("reserved" in step.text for step in steps)


def test_wsl2() -> None:
    advice = advise(recorded("rtx5060-wsl2"))
    (step,) = advice.steps
    assert (step.frees_bytes, step.gpu) == (951 * MIB, 0)
    assert "Task Manager" in step.text
    assert any("system memory and everything gets" in sentence for sentence in advice.odd)
    assert any("pinned" in sentence for sentence in advice.odd)


def test_nothing_is_ended_that_somebody_may_need_without_a_word_of_it() -> None:
    """Each step names what it costs: a desktop's programs, others' work, all of WSL."""
    desktop = [step.text for step in advise(recorded("rtx3090-desktop")).steps]
    assert any("every program in it" in text and "graphical.target" in text for text in desktop)
    for name in ("rtx3090-desktop", "h100x2-server"):
        texts = [step.text for step in advise(recorded(name)).steps if "process " in step.text]
        assert texts
        assert all("it isn't needed" in text or "If it isn't" in text for text in texts)
    assert "ask whether they need it" in advise(recorded("l4-container")).steps[1].text
    small = replace(recorded("rtx5060-wsl2"), ram_total_bytes=6 * GIB)
    assert any("ends everything that runs in WSL" in step.text for step in advise(small).steps)


def test_a_laptop_has_no_socket_on_its_mainboard() -> None:
    (laptop,) = advise(describe("rtx-4060-laptop", os="wsl2")).steps
    assert "mainboard" not in laptop.text
    assert "hybrid graphics" in laptop.text
    (tower,) = advise(describe("rtx-4060", os="wsl2")).steps
    assert "where the processor has some (monitor on the mainboard's socket)" in tower.text


def test_a_container_and_a_server() -> None:
    advice = advise(recorded("l4-container"))
    assert [(step.resource, step.frees_bytes // GIB) for step in advice.steps] == [("ram", 23), ("gpu", 2)]
    assert any("8.00 GiB of 31.00 GiB" in sentence for sentence in advice.odd)
    (step,) = advise(recorded("h100x2-server")).steps
    assert (step.gpu, "vLLM" in step.text) == (0, True)


def test_a_slice_and_no_gpu() -> None:
    assert any("MIG" in sentence for sentence in advise(recorded("a100-mig")).odd)
    advice = advise(recorded("laptop-no-gpu"), downloads=[("Qwen/big", 9 * GIB), ("a/b", 2 * MIB)])
    assert [(step.resource, step.frees_bytes) for step in advice.steps] == [("disk", 9 * GIB)]
    assert "snugvl rm --all Qwen/big" in advice.steps[0].text
    assert any("14.00 GiB are free on the disk" in sentence for sentence in advice.odd)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ollama", "Xorg", "firefox", "vllm"]), st.integers(0, GIB)), max_size=8
    )
)
def test_steps_never_free_more_than_is_held(tenants: list[tuple[str, int]]) -> None:
    machine = describe("rtx-3090", held=sum(size for _, size in tenants))
    named = tuple(Tenant(name, size, pid) for pid, (name, size) in enumerate(tenants))
    machine = replace(machine, gpus=(replace(machine.gpus[0], tenants=named),))
    freed = [step.frees_bytes for step in advise(machine).steps]
    assert freed == sorted(freed, reverse=True)
    assert sum(freed) <= machine.gpus[0].held_bytes


CPU = TorchBuild("2.13.0+cpu", None, cpu_only=True)
CU126 = TorchBuild("2.9.1+cu126", (12, 6), cpu_only=False)
CU130 = TorchBuild("2.13.0", (13, 0), cpu_only=False)


@pytest.mark.parametrize(
    ("name", "build", "said"),
    [
        ("rtx3090-desktop", CPU, "CPU build"),
        ("rtx3090-desktop", CPU, ": pip install --force-reinstall torch==2.13.0"),
        ("l4-container", CU130, "too old for torch 2.13.0 (CUDA 13.0); update it to 580.65"),
        ("l4-container", CU130, ", or install a torch for CUDA 12: pip install 'torch<2.11'"),
        ("rtx5060-wsl2", CU126, "no code for NVIDIA GeForce RTX 5060; install one built with CUDA 12.8"),
    ],
)
def test_torch_that_does_not_match(name: str, build: TorchBuild, said: str) -> None:
    assert any(said in sentence for sentence in advise(recorded(name), build).odd)


def test_a_torch_for_cuda_12_is_named_where_it_would_run() -> None:
    machine = recorded("l4-container")
    (gpu,) = machine.gpus
    ancient = replace(gpu, driver="515.105.01")
    said = unusable(ancient, machine, CU130)
    assert said is not None
    assert said.endswith("update it to 580.65 or later")
    volta = replace(machine, gpus=(replace(gpu, driver="580.95.05", compute_capability=(7, 0)),))
    (odd,) = [sentence for sentence in advise(volta, CU130).odd if "no code" in sentence]
    assert odd.endswith("built with CUDA 12: pip install 'torch<2.11'")


@pytest.mark.parametrize("build", [CPU, CU126, CU130])
def test_torch_that_matches_or_has_no_gpu_to_match(build: TorchBuild) -> None:
    def about_torch(machine: Machine) -> list[str]:
        return [sentence for sentence in advise(machine, build).odd if "torch" in sentence]

    assert about_torch(recorded("laptop-no-gpu")) == []
    if not build.cpu_only:
        assert about_torch(recorded("rtx3090-desktop")) == []


@pytest.mark.parametrize(
    ("driver", "build", "windows", "lowest"),
    [
        ("535.261.03", CU130, False, "580.65"),
        ("580.65.06", CU130, False, None),
        ("580.00", CU130, True, None),
        ("527.41", CU126, True, "528.33"),
        ("525.60.13", CU126, False, None),
        ("418.197", TorchBuild("2.5.1+cu118", (11, 8), cpu_only=False), False, "450.80"),
        (None, CU130, False, None),
        ("535.1", CPU, False, None),
        ("unknown", CU130, False, None),
    ],
)
def test_drivers(driver: str | None, build: TorchBuild, windows: bool, lowest: str | None) -> None:
    assert driver_too_old(driver, build, windows=windows) == lowest


def test_kernels() -> None:
    assert lacks_kernels((7, 0), CU130) == "12"
    assert lacks_kernels((7, 5), CU130) is None
    assert lacks_kernels((12, 0), CU130) is None
    assert lacks_kernels((10, 0), CU126) == "12.8 or later"
    assert lacks_kernels(None, CU126) is None


def installed(**packages: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        try:
            return packages[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    return version


@pytest.mark.parametrize(
    ("packages", "build"),
    [
        ({}, None),
        ({"torch": "2.13.0+cpu"}, CPU),
        ({"torch": "2.9.1+cu126"}, CU126),
        ({"torch": "2.13.0", "nvidia_cuda_runtime": "13.0.96"}, CU130),
        (
            {"torch": "2.8.0", "nvidia_cuda_runtime_cu12": "12.8.90"},
            TorchBuild("2.8.0", (12, 8), cpu_only=False),
        ),
        ({"torch": "2.8.0"}, TorchBuild("2.8.0", None, cpu_only=False)),
        ({"torch": "2.8.0+rocm6.3"}, TorchBuild("2.8.0+rocm6.3", None, cpu_only=False)),
    ],
)
def test_which_torch_is_installed(packages: dict[str, str], build: TorchBuild | None) -> None:
    assert torch_build(installed(**packages)) == build


FRESH = BuildTools(None, headers=False, venv=False, apt=True, python="3.12")


def test_a_fresh_ubuntu_under_wsl2_lacks_what_triton_compiles_with() -> None:
    odd = advise(recorded("rtx5060-wsl2"), tools=FRESH).odd
    line = "sudo apt install build-essential python3.12-dev python3.12-venv"
    (compiles,) = [sentence for sentence in odd if "Triton" in sentence]
    (installs,) = [sentence for sentence in odd if "environments" in sentence]
    assert "no C compiler and no Python.h" in compiles
    assert compiles.endswith(line)
    assert installs.endswith(line)


def test_only_what_is_missing_is_named() -> None:
    tools = replace(FRESH, compiler="/usr/bin/gcc", venv=True)
    (said,) = [
        sentence for sentence in advise(recorded("rtx5060-wsl2"), tools=tools).odd if "Triton" in sentence
    ]
    assert said.endswith("there is no Python.h: sudo apt install python3.12-dev")
    assert "apt" not in " ".join(advise(recorded("rtx5060-wsl2"), tools=replace(tools, apt=False)).odd)
    whole = replace(tools, headers=True)
    assert advise(recorded("rtx5060-wsl2"), tools=whole) == advise(recorded("rtx5060-wsl2"))


def test_without_a_gpu_nothing_is_compiled() -> None:
    assert advise(recorded("laptop-no-gpu"), tools=FRESH) == advise(recorded("laptop-no-gpu"))


def test_compilers_are_looked_for_as_triton_does(tmp_path: Path) -> None:
    def which(*names: str) -> Callable[[str], str | None]:
        return lambda name: f"/usr/bin/{name}" if name in names else None

    def found(name: str) -> None:
        return None

    bare = build_tools({}, which("apt"), tmp_path, found)
    assert (bare.compiler, bare.headers, bare.venv, bare.apt) == (None, False, False, True)
    assert len(bare.packages) == 3
    (tmp_path / "Python.h").touch()
    clang = build_tools({}, which("clang"), tmp_path, lambda name: name)
    assert (clang.compiler, clang.headers, clang.venv, clang.apt) == ("/usr/bin/clang", True, True, False)
    assert clang.packages == ()
    assert build_tools({"CC": "gcc-13 -m64"}, which("gcc-13", "gcc"), tmp_path).compiler == "/usr/bin/gcc-13"
    # Triton believes $CC: where it names nothing, no other compiler is tried.
    assert build_tools({"CC": "nowhere"}, which("gcc"), tmp_path).compiler is None


def test_the_running_python_is_asked() -> None:
    tools = build_tools()
    assert tools.python.count(".") == 1
    assert all(name.startswith(("build-", f"python{tools.python}")) for name in tools.packages)

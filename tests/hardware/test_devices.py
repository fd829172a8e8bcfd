"""GPUs of AMD, Intel and Apple by what llama.cpp lists, on machines of other people."""

import sys
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from snugvl.core.sizes import GIB, MIB
from snugvl.hardware import devices
from snugvl.hardware.devices import with_others
from snugvl.hardware.machine import Machine
from snugvl.hardware.probe import probe
from tests.hardware.fake_nvml import FakeNvml
from tests.hardware.listings import LISTINGS, Listing

# Of each machine what is to be used: llama.cpp's name, MiB in all and free, whether it is host memory.
USED: dict[str, tuple[str, int, int, bool] | None] = {
    "macbook-m1-8gb": ("MTL0", 5461, 5120, True),  # 5 GiB of host memory were free
    "macbook-m5-pro": ("MTL0", 18186, 17408, True),
    "mac-m4-max": ("Metal", 98304, 98303, True),
    "rx-6950-xt-in-use": ("Vulkan1", 16368, 1798, False),
    "rx-6700-xt-rocm": ("ROCm0", 12272, 12248, False),
    "rx-580-windows": ("Vulkan0", 8192, 7402, False),
    "rx-7900-xtx-and-processor": ("Vulkan0", 24560, 23749, False),
    "strix-halo": ("ROCm0", 110511, 110357, True),
    "arc-b580": ("SYCL0", 12216, 11959, False),
    "arc-pro-b70": ("SYCL0", 32656, 31665, False),
    "lunar-lake": ("Vulkan0", 18413, 17645, True),
    "rtx-2060-freebsd": ("Vulkan0", 6144, 5136, False),
    "rx-9070-xt-too-new": None,
}
SYSTEMS = {"darwin": "macos", "linux": "linux", "win32": "windows"}


def machine(ram_gib: int = 32, free_gib: int = 24) -> Machine:
    return Machine("linux", (), 8, ram_gib * GIB, free_gib * GIB, 100 * GIB)


def read(each: Listing) -> Machine:
    return with_others(machine(each.ram_gib, each.free_gib), each.text)


@pytest.mark.parametrize("name", LISTINGS)
def test_which_gpu_is_used(name: str) -> None:
    found = read(LISTINGS[name])
    wanted = USED[name]
    if wanted is None:
        assert not found.others
        assert any("lists no GPU" in note for note in found.notes)
        return
    (gpu,) = found.others
    assert (gpu.listed, gpu.total_bytes // MIB, gpu.free_bytes // MIB, gpu.unified) == wanted
    assert gpu.api != "cuda"
    assert "MiB" not in gpu.name
    assert any(f"{gpu.name} is for GGUF files alone" in note for note in found.notes)
    assert any("shares host memory" in note for note in found.notes) == (
        name in ("rx-6950-xt-in-use", "rx-7900-xtx-and-processor", "arc-b580", "arc-pro-b70")
    )


def listed(*lines: str) -> tuple[tuple[str, bool], ...]:
    return tuple((gpu.listed, gpu.unified) for gpu in with_others(machine(), "\n".join(lines)).others)


def test_what_the_driver_says_counts_more_than_the_name() -> None:
    card = "  Vulkan0: AMD Radeon Graphics (RADV GFX1201) (16304 MiB, 15488 MiB free)"
    assert listed(card) == (("Vulkan0", True),), "so are processors' called"
    log = "ggml_vulkan: 0 = AMD Radeon Graphics (RADV GFX1201) (radv) | uma: 0 | fp16: 1 | warp size: 64"
    assert listed(log, card) == (("Vulkan0", False),)


def test_one_card_of_two_backends_is_one_card() -> None:
    assert listed(
        "  Vulkan0: AMD Radeon RX 7900 XTX (RADV NAVI31) (24560 MiB, 23749 MiB free)",
        "  ROCm0: Radeon RX 7900 XTX (24560 MiB, 24520 MiB free)",
    ) == (("ROCm0", False),)


def test_two_cards_are_two_the_freer_first() -> None:
    line = "  Vulkan{}: AMD Radeon RX 7900 XTX (24560 MiB, {} MiB free)"
    assert listed(line.format(0, 1000), line.format(1, 24000)) == (("Vulkan1", False), ("Vulkan0", False))


@pytest.mark.parametrize(
    "line",
    [
        "  BLAS: Accelerate (0 MiB, 0 MiB free)",
        "  CPU: Intel(R) Core(TM) Ultra 9 185H (64000 MiB, 64000 MiB free) [cpu]",
        "  Vulkan0: x (0 MiB, 0 MiB free)",
        "  Vulkan0: no sizes",
        "  COREML0: Apple Silicon NPU (CoreML backend) (110100 MiB, 110100 MiB free)",
        "\x00" * 100,
    ],
)
def test_what_is_no_gpu_is_none(line: str) -> None:
    assert listed(line) == ()


def install(folder: Path, script: str) -> dict[str, str]:
    """A llama-server of a few lines, and the environment that finds it."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -S\nimport sys\n{script}\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_machine_without_nvidia_is_asked(tmp_path: Path, platform: str) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    text = LISTINGS["rx-6700-xt-rocm"].text
    environ = install(tmp_path, f"assert sys.argv[1:] == ['--list-devices']\nprint({text!r})")
    found = probe(
        root=tmp_path,
        environ=environ,
        nvml_module=FakeNvml(init=[pynvml.NVML_ERROR_LIBRARY_NOT_FOUND]),
        platform=platform,
    )
    assert found.os == SYSTEMS[platform]
    assert not found.gpus
    assert [gpu.name for gpu in found.others] == ["AMD Radeon RX 6700 XT"]
    assert not any("NVIDIA" in note for note in found.notes)


def test_nothing_is_asked_where_there_can_be_no_gpu(tmp_path: Path) -> None:
    environ = install(tmp_path, f"open({str(tmp_path / 'asked')!r}, 'w')")
    assert devices.listing("linux", tmp_path, environ) == ""
    assert not (tmp_path / "asked").exists()
    assert devices.listing("darwin", tmp_path, environ) == ""
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("script", ["raise SystemExit(1)", "print('nonsense')", "import time; time.sleep(9)"])
def test_one_that_fails_is_no_gpu(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LOOK_S", 1.0)
    found = with_others(machine(), devices.listing("win32", tmp_path, install(tmp_path, script)))
    assert found == machine()

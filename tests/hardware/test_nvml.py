"""GPUs by NVML, over a fake of its Python API."""

import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from snugvl.hardware import calibration, nvml
from snugvl.hardware.machine import Machine, Tenant
from tests.hardware.conftest import WSL2
from tests.hardware.fake_nvml import MIB, Card, FakeNvml, Process

Probe = Callable[..., Machine]


def test_a_desktop_with_named_processes(probed: Probe) -> None:
    card = Card(
        free=(20000 * MIB,),
        reserved=300 * MIB,
        compute=[Process(7, 3000 * MIB), Process(8, 500 * MIB)],
        graphics=[Process(8, 500 * MIB), Process(9, 200 * MIB)],
    )
    fake = FakeNvml(
        card, names={7: "/usr/local/bin/ollama", 8: "/usr/bin/python3.12", 9: "/usr/lib/xorg/Xorg"}
    )
    machine = probed(fake, {"proc/8/cmdline": "python3.12\0-u\0/home/me/ComfyUI/main.py\0--port\08188\0"})
    (gpu,) = machine.gpus
    assert gpu.tenants == (
        Tenant("ollama", 3000 * MIB, 7),
        Tenant("python3.12 main.py", 500 * MIB, 8),
        Tenant("Xorg", 200 * MIB, 9),
        Tenant(nvml.RESERVED, 300 * MIB),
        Tenant(nvml.UNNAMED, 576 * MIB),
    )
    assert sum(tenant.held_bytes for tenant in gpu.tenants) == gpu.held_bytes
    assert (gpu.driver, gpu.compute_capability, gpu.bandwidth) == ("580.95.05", (8, 6), 936e9)
    assert (machine.os, machine.spills, machine.pinned_bytes, machine.notes) == ("linux", False, None, ())
    assert (fake.started, fake.stopped) == (1, 1)


def test_free_is_the_lowest_of_a_moment(probed: Probe) -> None:
    free = [20000 * MIB, 19000 * MIB, 18500 * MIB, 20500 * MIB]
    machine = probed(FakeNvml(Card(free=free)))
    assert machine.gpus[0].free_bytes == 18500 * MIB


def test_sampling_takes_the_documented_moment() -> None:
    pauses: list[float] = []
    around = nvml.Around(wsl2=False, container=False, ram_total_bytes=1, ram_free_bytes=1)
    nvml.read({}, around, FakeNvml(Card()), pauses.append)
    assert sum(pauses) == pytest.approx(nvml.SAMPLE_SECONDS)


def test_wsl2_tells_no_bytes_of_processes(probed: Probe) -> None:
    card = Card("NVIDIA GeForce RTX 5060", total=8151 * MIB, free=(7200 * MIB,), graphics=[Process(30, None)])
    fake = FakeNvml(card, driver="581.57", names={30: "/Xwayland"})
    machine = probed(fake, {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, version=WSL2)
    assert machine.gpus[0].tenants == (Tenant("desktop and other apps (Xwayland among them)", 951 * MIB),)
    assert (machine.os, machine.spills, machine.notes) == ("wsl2", True, ())
    assert machine.gpus[0].cuda_total_bytes == machine.gpus[0].total_bytes
    assert machine.pinned_bytes == machine.ram_total_bytes // 2


def test_a_few_mebibytes_beside_a_process_are_the_drivers(probed: Probe) -> None:
    """As an H200 in a container showed them."""
    card = Card(free=(23000 * MIB,), compute=[Process(7, 1567 * MIB)])
    machine = probed(FakeNvml(card, names={7: "python3"}), {".dockerenv": ""})
    assert machine.gpus[0].tenants[-1] == Tenant(nvml.UNNAMED, 9 * MIB)


def test_a_container_sees_no_processes_outside(probed: Probe) -> None:
    machine = probed(FakeNvml(Card(free=(20000 * MIB,))), {".dockerenv": ""})
    assert machine.container
    assert [tenant.name for tenant in machine.gpus[0].tenants] == [nvml.OUTSIDE]


@pytest.mark.parametrize("refusal", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_processes_that_may_not_be_listed(probed: Probe, refusal: int) -> None:
    machine = probed(FakeNvml(Card(free=(24000 * MIB,), compute=refusal)))
    assert machine.gpus[0].tenants == (Tenant(nvml.UNNAMED, 576 * MIB),)


def test_a_driver_too_old_for_reserved_memory(probed: Probe) -> None:
    machine = probed(FakeNvml(Card(free=(24000 * MIB,), reserved=300 * MIB), v2=False))
    assert machine.gpus[0].tenants == (Tenant(nvml.UNNAMED, 576 * MIB),)


@pytest.mark.parametrize(
    ("error", "files", "said"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, {}, "No NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, {".dockerenv": ""}, "--gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, {}, "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, {}, "restart"),
        (pynvml.NVML_ERROR_NO_PERMISSION, {}, "/dev/nvidia*"),
        (pynvml.NVML_ERROR_UNKNOWN, {}, "Unknown Error"),
    ],
)
def test_nvml_that_does_not_start_is_a_note(
    probed: Probe, error: int, files: dict[str, str], said: str
) -> None:
    machine = probed(FakeNvml(Card(), init=[error]), files)
    assert machine.gpus == ()
    (note,) = machine.notes
    assert said in note


def test_nvml_of_wsl2_is_found_beside_the_path(probed: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml.host, "load_nvml", lambda root: True)
    fake = FakeNvml(Card(), init=[pynvml.NVML_ERROR_LIBRARY_NOT_FOUND])
    assert len(probed(fake, {"dev/dxg": ""}, version=WSL2).gpus) == 1


def test_a_lost_gpu_is_left_out(probed: Probe) -> None:
    cards = [Card(uuid="GPU-a", broken=pynvml.NVML_ERROR_GPU_IS_LOST), Card(uuid="GPU-b")]
    machine = probed(FakeNvml(*cards))
    assert [(gpu.index, gpu.uuid, gpu.position) for gpu in machine.gpus] == [(0, "GPU-b", 1)]
    assert "GPU 0 doesn't answer" in machine.notes[0]


def test_memory_that_cannot_be_read(probed: Probe) -> None:
    machine = probed(FakeNvml(Card(uuid="GPU-a", memory_error=pynvml.NVML_ERROR_UNKNOWN), Card(uuid="GPU-b")))
    assert [gpu.uuid for gpu in machine.gpus] == ["GPU-b"]
    assert len(machine.notes) == 1


def test_a_gpu_that_shares_system_memory(probed: Probe) -> None:
    card = Card("NVIDIA GB10", memory_error=pynvml.NVML_ERROR_NOT_SUPPORTED, capability=(12, 1))
    machine = probed(FakeNvml(card))
    assert machine.gpus[0].total_bytes == machine.ram_total_bytes
    assert machine.gpus[0].free_bytes == machine.ram_free_bytes
    assert "shares the system's" in machine.notes[0]
    assert machine.gpus[0].unified, "what is taken there is missing in host memory"


def test_a_measured_context_is_filled_in(probed: Probe, tmp_path: Path) -> None:
    machine = probed(FakeNvml(Card()))
    assert machine.gpus[0].context_bytes is None
    stages = calibration.ContextStages(900 * MIB, 700 * MIB, 650 * MIB, 500 * MIB, 500 * MIB, 900 * MIB)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    calibration.measure(machine.gpus[0], environ, lambda gpu, environ: stages)
    assert probed(FakeNvml(Card())).gpus[0].context_bytes == 400 * MIB


def test_cudas_total_is_what_the_driver_leaves_unless_it_was_measured(probed: Probe, tmp_path: Path) -> None:
    assert probed(FakeNvml(Card())).gpus[0].cuda_total_bytes is None  # nothing is said to be reserved
    card = Card(reserved=300 * MIB)
    (gpu,) = probed(FakeNvml(card)).gpus
    assert gpu.cuda_total_bytes == gpu.total_bytes - 300 * MIB
    stages = calibration.ContextStages(900, 700, 650, 500, 500, 900, total=gpu.total_bytes - 301 * MIB)
    calibration.measure(gpu, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, lambda gpu, environ: stages)
    assert probed(FakeNvml(card)).gpus[0].cuda_total_bytes == gpu.total_bytes - 301 * MIB


def test_a_gpu_that_is_not_in_the_table(probed: Probe) -> None:
    (gpu,) = probed(FakeNvml(Card("NVIDIA Future 9000"))).gpus
    assert (gpu.bandwidth, gpu.bf16_flops, gpu.compute_capability) == (None, None, (8, 6))


def mig_card() -> Card:
    slices = [
        Card(
            f"NVIDIA A100-SXM4-80GB MIG {size}", f"MIG-{size}", total=mib * MIB, free=(mib * MIB - 40 * MIB,)
        )
        for size, mib in (("2g.20gb", 19968), ("1g.10gb", 9728))
    ]
    return Card(
        "NVIDIA A100-SXM4-80GB",
        "GPU-a",
        81920 * MIB,
        (81000 * MIB,),
        capability=(8, 0),
        mig=True,
        slices=slices,
    )


def test_a_slice_of_a_gpu(probed: Probe) -> None:
    machine = probed(FakeNvml(mig_card()))
    (gpu,) = machine.gpus
    assert (gpu.uuid, gpu.mig, gpu.total_bytes) == ("MIG-2g.20gb", True, 19968 * MIB)
    assert gpu.bandwidth == pytest.approx(2039e9 * 19968 / 81920)
    assert "MIG-1g.10gb" in machine.notes[0]


def test_another_slice_by_name(probed: Probe) -> None:
    machine = probed(FakeNvml(mig_card()), environ={"CUDA_VISIBLE_DEVICES": "MIG-1g"})
    assert [(gpu.uuid, gpu.position) for gpu in machine.gpus] == [("MIG-1g.10gb", None)]


def test_mig_without_slices(probed: Probe) -> None:
    card = mig_card()
    card.slices = ()
    machine = probed(FakeNvml(card))
    assert machine.gpus == ()
    assert any("without a slice" in note for note in machine.notes)


def test_visible_devices_choose_and_order(probed: Probe) -> None:
    cards = [Card(uuid="GPU-a"), Card(uuid="GPU-b"), Card(uuid="GPU-c")]
    machine = probed(FakeNvml(*cards), environ={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(gpu.index, gpu.uuid, gpu.position) for gpu in machine.gpus] == [(0, "GPU-c", 2), (1, "GPU-a", 0)]
    assert "hides 1 of 3" in machine.notes[0]


def test_gpus_of_two_kinds_may_be_numbered_otherwise(probed: Probe) -> None:
    cards = [Card("NVIDIA GeForce GTX 1650", "GPU-a"), Card(uuid="GPU-b")]
    assert any("PCI_BUS_ID" in note for note in probed(FakeNvml(*cards)).notes)
    assert not probed(FakeNvml(*cards), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes


def test_the_slot_of_a_card(probed: Probe) -> None:
    def link(card: Card) -> float | None:
        return probed(FakeNvml(card)).gpus[0].link_bandwidth

    assert link(Card()) == pytest.approx(31.5e9, rel=0.01)
    assert link(Card(link=(5, 8))) == pytest.approx(31.5e9, rel=0.01)
    assert link(Card(link=(9, 1))) == pytest.approx(7.563e9)  # newer than the table: its last row
    assert link(Card(link=None)) is None


@pytest.mark.parametrize(
    ("processes", "held_bytes"),
    [
        ([Process(7, 300 * MIB), Process(8, 200 * MIB), Process(9, 100 * MIB)], 500 * MIB),
        ([Process(99, 300 * MIB)], 300 * MIB),  # a container's process ids are not the driver's
        ([Process(98, 300 * MIB), Process(99, 200 * MIB)], 0),
        ([Process(7, None)], 0),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, 0),
    ],
)
def test_what_processes_hold(processes: list[Process] | int, held_bytes: int) -> None:
    assert nvml.held_by(FakeNvml(), Card(compute=processes), {7, 8}) == held_bytes


@pytest.mark.parametrize("fake", [FakeNvml(), FakeNvml(Card(), init=[pynvml.NVML_ERROR_NO_PERMISSION])])
def test_a_driver_that_can_not_be_asked(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml.started() is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Card()))
    assert nvml.started() is not None

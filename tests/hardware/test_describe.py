"""A described machine, and one written down."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.sizes import GIB, MIB, format_size
from snugvl.errors import InputError
from snugvl.hardware.describe import describe
from snugvl.hardware.gpus import reserved_bytes
from snugvl.hardware.machine import RESERVED, SYSTEM_BYTES, Gpu, Machine, Tenant, record, replay
from snugvl.planner.budget import budgets

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


def test_the_machine_of_the_readme() -> None:
    machine = describe("rtx-5060", os="wsl2", held="951MiB")
    (gpu,) = machine.gpus
    assert (gpu.total_bytes, gpu.free_bytes, gpu.held_bytes) == (8151 * MIB, 7200 * MIB, 951 * MIB)
    assert gpu.tenants == (Tenant("desktop and other apps", 951 * MIB),)
    assert (machine.os, machine.spills, machine.source) == ("wsl2", True, "described")


def test_what_is_not_said_is_assumed_and_noted() -> None:
    machine = describe("rtx-5060", os="wsl2")
    assert machine.gpus[0].held_bytes == GIB
    assert len(machine.notes) == 2
    assert machine.notes[0].endswith("; --ram SIZE says how much there is.")
    card = describe("rtx-3090")
    kept = format_size(reserved_bytes(card.gpus[0].total_bytes))
    assert (
        f"hold nothing of the GPU's memory, beside the {kept} that the driver keeps; --held" in card.notes[1]
    )
    assert describe("rtx-5060", os="linux").gpus[0].tenants[0].name == RESERVED  # and nobody else
    said = describe("rtx-5060", held=0, ram="32GiB")
    assert said.notes == (
        "System memory: 2.00 GiB of it is assumed to be held by the system and other programs.",
    )
    assert said.ram_total_bytes - said.ram_free_bytes == 2 * GIB
    assert describe("none", ram="4GiB").ram_free_bytes == 3 * GIB


def test_several_gpus_and_sizes_in_bytes() -> None:
    machine = describe("h100", count=4, held=2 * GIB, ram=512 * GIB)
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
    kept = reserved_bytes(81_559 * MIB)
    assert {gpu.held_bytes for gpu in machine.gpus} == {2 * GIB + kept}
    assert machine.gpus[0].tenants == (Tenant("desktop and other apps", 2 * GIB), Tenant(RESERVED, kept))
    assert machine.ram_total_bytes == 512 * GIB


def test_gpus_that_have_host_memory() -> None:
    """CUDA lends all of it, Vulkan half; what they take is missing there."""
    spark = describe("gb10")
    (gpu,) = spark.gpus
    assert gpu.total_bytes == spark.ram_total_bytes == 124610 * MIB
    assert gpu.free_bytes == spark.ram_free_bytes == gpu.total_bytes - SYSTEM_BYTES
    assert (gpu.unified, gpu.api, gpu.compute_capability, gpu.bandwidth) == (True, "cuda", (12, 1), 273e9)
    assert "NVIDIA GB10 has no memory of its own and shares the system's." in spark.notes
    assert budgets(spark)[0].device.host_bytes == 0
    halo = describe("8060s", ram="64GiB")
    (other,) = halo.others
    assert (other.unified, other.api, other.total_bytes) == (True, "vulkan", 32 * GIB)
    with pytest.raises(InputError, match="host memory as its own; describe that with --ram alone"):
        describe("gb10", vram="64GiB")


def test_any_gpu_of_a_size_and_none() -> None:
    (gpu,) = describe(vram="10GiB").gpus
    assert (gpu.total_bytes, gpu.bandwidth, gpu.compute_capability) == (10 * GIB, None, None)
    assert describe("none").gpus == ()
    assert describe("rtx 4060 ti", vram="16GiB").gpus[0].total_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "--gpu"),
        ({"gpu": "rtx-5061"}, "rtx-5061"),
        ({"gpu": "rtx-5060", "held": "9GiB"}, "9.00 GiB"),
        ({"gpu": "rtx-5060", "held": "-1GiB"}, "negative"),
        ({"gpu": "rtx-5060", "held": -1}, "negative"),
        ({"gpu": "rtx-5060", "vram": "0"}, "zero"),
        ({"gpu": "rtx-5060", "vram": "0GiB"}, "zero"),
        ({"gpu": "rtx-5060", "ram": "lots"}, "'lots'"),
        ({"gpu": "rtx-5060", "count": 0}, "number of GPUs 0"),
        ({"gpu": "rtx-5060", "count": 10**9}, "1024"),
        ({"gpu": "rtx-5060", "os": "plan9"}, "'plan9'"),
        ({"gpu": "none", "vram": "8GiB"}, "none"),
    ],
)
def test_nonsense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_held_and_free_make_the_whole(total: int, held: int) -> None:
    try:
        (gpu,) = describe(vram=total, held=held).gpus
    except InputError:
        assert held > total - reserved_bytes(total)
    else:
        assert gpu.free_bytes + held + reserved_bytes(total) == gpu.total_bytes == total
        assert gpu.cuda_total_bytes == total - reserved_bytes(total)


def test_under_wsl2_cudas_total_is_nvmls() -> None:
    (gpu,) = describe("rtx-4060", os="wsl2", held=0).gpus
    assert gpu.cuda_total_bytes == gpu.total_bytes == gpu.free_bytes


sizes = st.integers(1, 2**50)
gpus = st.builds(
    lambda total, share, **rest: Gpu(total_bytes=total, free_bytes=int(total * share), **rest),
    total=sizes,
    share=st.floats(0, 1),
    index=st.integers(0, 63),
    name=st.text(max_size=20),
    compute_capability=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    bandwidth=st.none() | st.floats(1, 1e14),
    tenants=st.lists(st.builds(Tenant, st.text(max_size=9), sizes, st.none() | st.integers(1, 9))).map(tuple),
    driver=st.none() | st.text(max_size=9),
    context_bytes=st.none() | sizes,
    mig=st.booleans(),
)
machines = st.builds(
    lambda total, **rest: Machine(ram_total_bytes=total, ram_free_bytes=total // 2, **rest),
    total=sizes,
    os=st.sampled_from(["linux", "wsl2", "windows", "other"]),
    gpus=st.lists(gpus, max_size=3).map(tuple),
    cpu_cores=st.integers(1, 999),
    disk_free_bytes=sizes,
    notes=st.lists(st.text(max_size=20), max_size=2).map(tuple),
)


@given(machine=machines)
def test_a_recording_is_the_machine(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "machine.json"
    path.write_text(record(machine), encoding="utf-8")
    assert replay(path) == dataclasses.replace(machine, source="recorded")


def test_a_clock_that_a_recording_lacks_is_the_tables(
    tmp_path: Path,
) -> None:
    """Older recordings lack it; a machine whose card had none then is recorded as it was."""
    card = Gpu(0, "NVIDIA GeForce RTX 3060", 12 << 30, 12 << 30)
    machine = Machine(
        os="linux", gpus=(card,), ram_total_bytes=2, ram_free_bytes=1, cpu_cores=1, disk_free_bytes=1
    )
    value = json.loads(record(machine))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert replay(path).gpus == (card,)
    del value["machine"]["gpus"][0]["cycles_per_s"]
    path.write_text(json.dumps(value), encoding="utf-8")
    (filled,) = replay(path).gpus
    assert filled.cycles_per_s == pytest.approx(28 * 1.777e9)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_recordings_replay(path: Path) -> None:
    machine = replay(path)
    assert machine.source == "recorded"
    for gpu in machine.gpus:
        assert sum(tenant.held_bytes for tenant in gpu.tenants) == gpu.held_bytes


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 6


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda value: value.update(schema=2), "schema 2"),
        (lambda value: value.pop("machine"), "not a recording"),
        (lambda value: value["machine"].pop("os"), "lacks 'os'"),
        (lambda value: value["machine"].update(os="amiga"), "'amiga'"),
        (lambda value: value["machine"].update(cpu_cores="8"), "machine.cpu_cores"),
        (lambda value: value["machine"].update(spills=1), "machine.spills"),
        (lambda value: value["machine"].update(cpu_cores=True), "machine.cpu_cores"),
        (lambda value: value["machine"].update(cpu_cores=0), "CPU"),
        (lambda value: value["machine"].update(colour="red"), "'colour'"),
        (lambda value: value["machine"].update(gpus={}), "machine.gpus"),
        (lambda value: value["machine"]["gpus"][0].update(free_bytes=2**60), "machine.gpus[0]"),
        (lambda value: value["machine"]["gpus"][0].update(total_bytes=-1), "machine.gpus[0]"),
        (lambda value: value["machine"]["gpus"][0].update(compute_capability=[12]), "compute_capability"),
        (lambda value: value["machine"].update(ram_free_bytes=2**60), "RAM"),
    ],
)
def test_a_spoilt_recording_names_the_field(spoil: Spoil, said: str, tmp_path: Path) -> None:
    value = json.loads(record(describe("rtx-5060")))
    spoil(value)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError) as caught:
        replay(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00\xff", " " * (2**20 + 1)])
def test_a_file_that_is_no_recording(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"m\.json"):
        replay(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="can't be read"):
            replay(path)

"""WSL2, containers and the host, on the files of other machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.core.folders import hub_cache
from snugvl.core.sizes import GIB
from snugvl.hardware import host
from tests.hardware.conftest import LINUX, WSL2, Write

KIB = 1024
TOTAL = 16384000 * KIB
AVAILABLE = 12288000 * KIB


def test_a_plain_machine(write: Write) -> None:
    found = host.look(write({"proc/self/cgroup": "0::/user.slice\n", "proc/1/cgroup": "0::/init.scope"}), {})
    assert (found.ram_total_bytes, found.ram_free_bytes) == (TOTAL, AVAILABLE)
    assert (found.host_ram_bytes, found.container) == (None, False)
    assert found.cores == len(os.sched_getaffinity(0))
    assert host.detect(write({}), TOTAL) is None


def test_version_2_limits_and_page_cache(write: Write) -> None:
    group = "sys/fs/cgroup/job/step"
    root = write(
        {
            "proc/self/cgroup": "0::/job/step\n",
            f"{group}/memory.max": "max\n",
            f"{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 7\n",
            "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
        }
    )
    found = host.look(root, {})
    assert (found.ram_total_bytes, found.ram_free_bytes) == (8 * GIB, 5 * GIB)
    assert (found.host_ram_bytes, found.cores) == (TOTAL, 1)
    assert host.memory(root) == host.HostMemory(8 * GIB, 5 * GIB)


def test_a_quota_rounds_up_to_whole_cores(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, cores in (("250000", 3), ("10000", 1), ("9900000", 8)):
        files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000"}
        root = write(files)
        assert host.look(root, {}).cores == host.cores(root) == cores


def test_version_2_in_a_namespace_of_its_own(write: Write) -> None:
    files = {"proc/self/cgroup": "0::/../../kubepods/pod1\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}"}
    assert host.look(write(files), {}).ram_total_bytes == 2 * GIB


def test_version_1_limits(write: Write) -> None:
    root = write(
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}",
            "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert host.limits(root) == host.Limits(4 * GIB, 2 * GIB, 1.5)


@pytest.mark.parametrize("limit", ["9223372036854771712", "max", "", "banana", "-1"])
def test_no_limit(write: Write, limit: str) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert host.limits(write(files)) == host.Limits()


def test_a_limit_beyond_the_machine_limits_nothing(write: Write) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{900 * GIB}"}
    found = host.look(write(files), {})
    assert (found.ram_total_bytes, found.host_ram_bytes, found.ram_free_bytes) == (TOTAL, None, AVAILABLE)


@pytest.mark.parametrize(
    ("files", "environ"),
    [
        ({".dockerenv": ""}, {}),
        ({"run/.containerenv": "engine=podman"}, {}),
        ({"proc/1/cgroup": "0::/kubepods.slice/x"}, {}),
        ({}, {"container": "lxc"}),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    ],
)
def test_containers(write: Write, files: dict[str, str], environ: dict[str, str]) -> None:
    assert host.in_container(write(files), environ)


def test_wsl2(write: Write) -> None:
    root = write({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, version=WSL2)
    assert host.detect(root, 8 * GIB) == host.Wsl((5, 15, 167), 4 * GIB, ())
    assert not host.is_wsl1(root)


def test_wsl2_with_a_kernel_too_old_to_pin(write: Write) -> None:
    version = "Linux version 4.19.104-microsoft-standard (oe-user@oe-host)"
    found = host.detect(write({"dev/dxg": "", "usr/lib/wsl/lib/x": ""}, version=version), 8 * GIB)
    assert found is not None
    assert found.pinned_bytes == 0
    assert "4.19.104" in found.notes[0]


def test_wsl2_without_its_gpu(write: Write) -> None:
    found = host.detect(write({}, version=WSL2), GIB)
    assert found is not None
    assert "wsl --update" in found.notes[0]
    inside = host.detect(write({}), GIB, container=True)
    assert inside is None  # the same folder now says Linux


def test_wsl2_without_driver_or_with_a_foreign_one(write: Write) -> None:
    foreign = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    found = host.detect(write({"dev/dxg": "", foreign: ""}, version=WSL2), GIB)
    assert found is not None
    assert "/usr/lib/wsl/lib" in found.notes[0]
    assert "hides the Windows one" in found.notes[1]
    inside = host.detect(write({}, version=WSL2), GIB, container=True)
    assert inside is not None
    assert inside.notes == ()  # there the runtime mounts the driver


def test_wsl1_is_none_and_known(write: Write) -> None:
    root = write({}, version="Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)")
    assert host.detect(root, GIB) is None
    assert host.is_wsl1(root)
    assert not host.is_wsl1(write({}, version=LINUX))


def test_nvml_beside_the_loaders_path(tmp_path: Path) -> None:
    assert not host.load_nvml(tmp_path)
    library = tmp_path / host.LIBRARIES / host.NVML_LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("no library")
    assert not host.load_nvml(tmp_path)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/x"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": ""}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_where_downloads_go(environ: dict[str, str], folder: str) -> None:
    assert hub_cache(environ) == Path(folder)


def test_disk_of_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert host.disk_free(tmp_path / "not" / "yet") > 0
    assert host.disk_free(Path("relative/not/yet")) > 0


def test_memory_without_proc(tmp_path: Path) -> None:
    found = host.look(tmp_path, {})
    assert 0 < found.ram_free_bytes <= found.ram_total_bytes
    assert host.memory(tmp_path).total_bytes == found.ram_total_bytes


def test_the_room_imports_nothing_slow() -> None:
    folder = Path(host.__file__).parent
    names = ", ".join(
        f"snugvl.hardware.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"
    )
    slow = "{'torch', 'transformers', 'numpy', 'pydantic', 'huggingface_hub', 'pynvml', 'psutil', 'rich'}"
    code = f"import sys\nimport {names}\nassert not {slow} & set(sys.modules), {slow} & set(sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_linux_without_proc_has_memory_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` and `plan` ended with "/proc/meminfo: No such file or directory"."""

    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr("psutil.virtual_memory", gone)
    found = host.memory(tmp_path)
    assert 0 < found.free_bytes <= found.total_bytes

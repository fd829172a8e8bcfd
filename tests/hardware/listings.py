"""What `llama-server --list-devices` printed on machines of other people, and where they showed it.

Lines are as they stand there; host memory is what the source says, or what such a machine has.
"""

from typing import Final, NamedTuple


class Listing(NamedTuple):
    """One machine. `ram_gib`: all of it, and what was free is assumed."""

    source: str
    platform: str
    ram_gib: int
    free_gib: int
    text: str


LISTINGS: Final = {
    "macbook-m1-8gb": Listing(
        "a benchmark's notes on an M1", "darwin", 8, 5, "  MTL0: Apple M1 (5461 MiB, 5460 MiB free)\n"
    ),
    "macbook-m5-pro": Listing(
        "a guide for an M5 Pro with 24 GiB: working set 18.2 of them",
        "darwin", 24, 17, "MTL0: Apple M5 Pro (18186 MiB, 18185 MiB free)\n",
    ),
    "mac-m4-max": Listing(
        "ardanlabs/kronk, issue 10",
        "darwin", 128, 100,
        "ggml_metal_device_init: GPU name:   Apple M4 Max\n"
        "ggml_metal_device_init: has unified memory    = true\n"
        "ggml_metal_device_init: recommendedMaxWorkingSetSize  = 103079.22 MB\n"
        "Available devices:\n"
        "  Metal: Apple M4 Max (98304 MiB, 98303 MiB free)\n"
        "  BLAS: Accelerate (0 MiB, 0 MiB free)\n",
    ),
    "rx-6950-xt-in-use": Listing(
        "a guide to run the container server-vulkan: the processor's GPU is listed first",
        "linux", 64, 50,
        "Available devices:\n"
        "  Vulkan0: AMD Ryzen 9 7950X3D 16-Core Processor (RADV RAPHAEL_MENDOCINO) "
        "(72540 MiB, 71657 MiB free)\n"
        "  Vulkan1: AMD Radeon RX 6950 XT (RADV NAVI21) (16368 MiB, 1798 MiB free)\n",
    ),
    "rx-6700-xt-rocm": Listing(
        "ollama's recordings",
        "linux", 32, 24,
        "  Device 0: AMD Radeon RX 6700 XT, gfx1031 (0x1031), VMM: no, Wave Size: 32, VRAM: 12272 MiB\n"
        "Available devices:\n"
        "  ROCm0: AMD Radeon RX 6700 XT (12272 MiB, 12248 MiB free)\n",
    ),
    "rx-580-windows": Listing(
        "notes on a validated runtime, b10414",
        "win32", 16, 10,
        "Available devices:\n  Vulkan0: AMD Radeon RX 580 2048SP (8192 MiB, 7402 MiB free)\n",
    ),
    "rx-7900-xtx-and-processor": Listing(
        "a project's recording", "linux", 32, 24,
        "Available devices:\n"
        "  Vulkan0: AMD Radeon RX 7900 XTX (24560 MiB, 23749 MiB free)\n"
        "  Vulkan1: AMD Radeon(TM) Graphics (16209 MiB, 15398 MiB free)\n",
    ),
    "strix-halo": Listing(
        "AMD's playbook for llama.cpp on gfx1151",
        "win32", 128, 110,
        "ggml_cuda_init: found 1 ROCm devices:\n"
        "  Device 0: AMD Radeon(TM) Graphics, gfx1151 (0x1151), VMM: no, Wave Size: 32\n"
        "Available devices:\n"
        "  ROCm0: AMD Radeon(TM) Graphics (110511 MiB, 110357 MiB free)\n",
    ),
    "arc-b580": Listing(
        "notes on a machine whose second GPU claims host memory",
        "linux", 80, 30,
        "  SYCL0: Intel(R) Arc(TM) B580 Graphics (12216 MiB, 11959 MiB free)\n"
        "  SYCL1: Intel(R) Graphics (76029 MiB, 23270 MiB free)\n",
    ),
    "arc-pro-b70": Listing(
        "a guide to SYCL builds",
        "linux", 32, 20,
        "Available devices:\n"
        "  SYCL0: Intel(R) Arc(TM) Pro B70 Graphics (32656 MiB, 31665 MiB free)\n"
        "  SYCL1: Intel(R) Graphics (29115 MiB, 11642 MiB free)\n",
    ),
    "lunar-lake": Listing(
        "notes of a project on an Arc 140V",
        "win32", 32, 20,
        "Available devices:\n  Vulkan0: Intel(R) Arc(TM) 140V GPU (16GB) (18413 MiB, 17645 MiB free)\n",
    ),
    "rtx-2060-freebsd": Listing(
        "llama.cpp, issue 16659: an NVIDIA card where there is no NVML",
        "freebsd14", 32, 24,
        "ggml_vulkan: Found 1 Vulkan devices:\n"
        "ggml_vulkan: 0 = NVIDIA GeForce RTX 2060 (NVIDIA) | uma: 0 | fp16: 1 | bf16: 1 | warp size: 32 | "
        "shared memory: 49152 | int dot: 1 | matrix cores: NV_coopmat2\n"
        "Available devices:\n"
        "  Vulkan0: NVIDIA GeForce RTX 2060 (6144 MiB, 5136 MiB free)\n",
    ),
    "rx-9070-xt-too-new": Listing(
        "llama.cpp, issue 15106: a build that doesn't know the card",
        "win32", 32, 24,
        "load_backend: loaded CPU backend from C:\\llama\\ggml-cpu-icelake.dll\nAvailable devices:\n",
    ),
}  # fmt: skip

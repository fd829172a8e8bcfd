"""GPUs of AMD, Intel and Apple, as llama.cpp sees them: `llama-server --list-devices`.

    ggml_vulkan: 1 = AMD Radeon RX 6950 XT (RADV NAVI21) (radv) | uma: 0 | fp16: 1 | …
    Available devices:
      Vulkan1: AMD Radeon RX 6950 XT (RADV NAVI21) (16368 MiB, 1798 MiB free)

It lists all makers' GPUs in one form, under the names that its `-dev` takes, and can use only those. A GPU in
the processor has host memory, and claims most of it; where there is a card of its own, that alone is used.
One card that two of its backends list is one card.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from snugvl.core.sizes import MIB, format_size
from snugvl.hardware.machine import Api, Gpu, Machine

PROGRAM: Final = "llama-server"
HEAD: Final = "Available devices:"
EXAMPLE: Final = "Qwen/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M"
NOT_NVIDIA: Final = "No NVIDIA driver"  # a note of NVML's reader that these machines don't need
LOOK_S: Final = 20.0  # the first look of all compiles Metal's kernels
# llama.cpp's names, the one to be taken first of those that list the same card.
APIS: Final[Mapping[str, Api]] = {
    "CUDA": "cuda", "ROCm": "rocm", "SYCL": "sycl", "MTL": "metal", "Metal": "metal", "Vulkan": "vulkan",
}  # fmt: skip
NAMES: Final[Mapping[Api, str]] = {
    "cuda": "CUDA", "rocm": "ROCm", "sycl": "SYCL", "metal": "Metal", "vulkan": "Vulkan",
}  # fmt: skip
_LINE: Final = re.compile(
    rf"^\s*((?:{'|'.join(APIS)})\d*): (.+) \((\d+) MiB(?:, (\d+) MiB free)?\)(?: \[\w+\])?\s*$", re.MULTILINE
)
_VULKAN: Final = re.compile(r"ggml_vulkan: (\d+) = .*\| uma: ([01]) \|")
# Of a processor. "Arc(TM) 140V" and "Arc(TM) Graphics" are, "Arc(TM) A770" and "Arc(TM) Pro B50" aren't.
_IN_PROCESSOR: Final = re.compile(
    r"Apple|Ryzen|Radeon(?:\(TM\))? (?:Graphics|Vega|\d{3,4}[MS]\b)|Intel\(R\) (?:U?HD |Iris|Graphics)|"
    r"Arc\((?:TM|tm)\) (?:Pro )?(?:\d{3}[A-Z]|Graphics)|GB10"
)
_MAKER: Final = re.compile(r"^(?:AMD|NVIDIA|Intel\(R\)|Intel) |\(.*?\)| Graphics$")
_WHEEL: Final = """
import xllamacpp
for each in xllamacpp.get_device_info():
    total, free = each["memory_total"] >> 20, each["memory_free"] >> 20
    print(f"  {each['name']}: {each['description']} ({total} MiB, {free} MiB free)")
"""


def listing(platform: str, root: Path, environ: Mapping[str, str]) -> str:
    """llama.cpp's list of devices here; empty where it isn't installed or sees none. May take seconds."""
    if platform.startswith("linux") and not (root / "dev/dri").exists() and not (root / "dev/kfd").exists():
        return ""
    program = shutil.which(PROGRAM, path=environ.get("PATH", ""))
    if program is not None:
        return _said([program, "--list-devices"])
    if platform == "darwin" and importlib.util.find_spec("xllamacpp") is not None:  # elsewhere it has no GPU
        return _said([sys.executable, "-c", _WHEEL])
    return ""


def _said(words: list[str]) -> str:
    try:
        run = subprocess.run(  # noqa: S603 (a program that the user has installed)
            words, capture_output=True, text=True, errors="replace", timeout=LOOK_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stderr + run.stdout


def with_others(machine: Machine, text: str) -> Machine:
    """The machine with the GPUs of a listing, and notes on them."""
    found = _once(list(_listed(text, machine)))
    cards = [gpu for gpu in found if not gpu.unified]
    used = sorted(cards or found[:1], key=lambda gpu: -gpu.free_bytes)
    notes = [
        f"{gpu.name} ({gpu.listed}) shares host memory with the processor; {used[0].name} is used instead."
        for gpu in found
        if gpu.unified and cards
    ]
    if not found and HEAD in text:
        notes.append("llama-server lists no GPU: its build has nothing for the one here, or doesn't know it.")
    said = [note for note in machine.notes if not (used and note.startswith(NOT_NVIDIA))]
    machine = replace(machine, notes=(*said, *notes))
    return with_used(machine, tuple(used)) if used else machine


def with_used(machine: Machine, used: tuple[Gpu, ...]) -> Machine:
    """The machine with GPUs that llama.cpp uses, in its order, and notes on that."""
    first, notes = used[0], list(machine.notes)
    if first.unified:
        notes.append(
            f"{first.name} has no memory of its own: llama.cpp may take up to "
            f"{format_size(first.total_bytes)} of host memory, which other programs then lack."
        )
    rest = "needs WSL2" if machine.os == "windows" else "runs on the processor"
    notes.append(
        f"{first.name} is for GGUF files alone, by llama.cpp, such as {EXAMPLE}; everything else {rest}."
    )
    return replace(machine, others=used, notes=tuple(notes))


def _listed(text: str, machine: Machine) -> Iterator[Gpu]:
    """Every GPU of a listing, also those that are listed twice."""
    shared = {f"Vulkan{number}": uma == "1" for number, uma in _VULKAN.findall(text)}
    for listed, name, total, free in _LINE.findall(text):
        unified = shared.get(listed, _IN_PROCESSOR.search(name) is not None)
        total_bytes = int(total) * MIB
        free_bytes = min(int(free or total) * MIB, total_bytes)
        if unified:
            free_bytes = min(free_bytes, machine.ram_free_bytes)
        if total_bytes:
            yield Gpu(
                index=0,
                name=name,
                total_bytes=total_bytes,
                free_bytes=free_bytes,
                api=APIS[listed.rstrip("0123456789")],
                listed=listed,
                unified=unified,
            )


def _once(found: list[Gpu]) -> list[Gpu]:
    """The GPUs without duplicates: each name is taken from one backend of llama.cpp's alone."""
    order = list(APIS.values())
    apis = sorted({gpu.api for gpu in found}, key=order.index)
    kept: list[Gpu] = []
    for api in apis:
        known = {_plain(gpu.name) for gpu in kept}
        kept += [gpu for gpu in found if gpu.api == api and _plain(gpu.name) not in known]
    return kept


def _plain(name: str) -> str:
    return _MAKER.sub("", name).strip().casefold()

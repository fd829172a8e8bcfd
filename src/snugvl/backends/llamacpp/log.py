"""llama.cpp's log: how it is written, and every buffer that it says it made.

Lines are those of llama.cpp in October 2026; older ones lack the time before them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from snugvl.backends.spawned import LogForm
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import MIB

# What the plan calls a buffer → the line of it: its device, where the line has one, and its size in MiB.
BUFFERS: Final[Mapping[str, str]] = {
    Kind.WEIGHTS: r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB",
    Kind.CACHE: r"llama_kv_cache\w*: +(\S+) KV buffer size = +([\d.]+) MiB",
    Kind.STATES: r"(\S+) RS buffer size = +([\d.]+) MiB",
    "compute buffer": r"sched_reserve: +(\S+) compute buffer size = +([\d.]+) MiB",
    "output buffer": r"llama_context: +(\S+) +output buffer size = +([\d.]+) MiB",
    "vision tower": r"load_hparams: model size:() +([\d.]+) MiB",
    "mmproj compute buffer": r"reserve_compute_meta: +(\S+) compute buffer size = +([\d.]+) MiB",
}
_TOWER_DEVICE: Final = re.compile(r"clip_ctx: CLIP using (\S+) backend")

FORM: Final = LogForm(
    r"^(?:[\d.]{10,16} [A-Z] )?",
    r"(?:\w+ +\w+: )?(?:error\b|.*\b(?:failed|error:|GGML_ASSERT|out of memory)|exception|terminate called)",
    (
        (r"build_info|system_info", "llama.cpp reads its arguments", 0.05, 0.05),
        (r"loaded meta data", "llama.cpp knows the model", 0.10, 0.10),
        (r"load_tensors: loading model tensors", "loading the weights", 0.20, 0.20),
        (r"model buffer size", "loading the weights", 0.50, 0.50),
        (r"llama_context: constructing", "making room for contexts", 0.60, 0.60),
        (r"warming up the model", "running an empty step", 0.70, 0.70),
        (r"clip_model_loader: model name|clip_ctx:", "loading the vision tower", 0.80, 0.80),
        (r"model loaded|server is listening|all slots are idle", "the server starts", 0.98, 0.98),
    ),
    chatty=True,
)


def read_buffers(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    """Bytes of each buffer by its name and its device ("CPU" for all of host memory)."""
    text = "\n".join(lines)
    tower = _TOWER_DEVICE.search(text)
    found: dict[tuple[str, str], int] = {}
    for name, pattern in BUFFERS.items():
        for device, size in re.findall(pattern, text):
            where = device or (tower[1] if tower else "CPU")
            key = name, "CPU" if where.startswith("CPU") or where.endswith("_Host") else where
            found[key] = found.get(key, 0) + round(float(size) * MIB)
    return found

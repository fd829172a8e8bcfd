"""Readings of a llama.cpp server's log and counters: the log's form, every buffer that it made, the ledger.

The ledger is the plan beside the log's buffers and what its processes hold. Lines are those of llama.cpp in
October 2026; older ones lack the time before them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psutil

from snugvl.backends.child.watch import Gauge, samples
from snugvl.backends.spawned import LogForm
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Load
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


REST: Final = "libraries and the rest"
TOWER: Final = "vision tower"
KINDS: Final = {TOWER: Kind.VISION, REST: Kind.CONTEXT}  # of rows that are called otherwise
# The counter → the field of `Load`.
_FIELDS: Final = {
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:tokens_predicted_total": "generated_tokens",
    "llamacpp:prompt_tokens_cached_total": "prefix_hit_tokens",
}


def read_load(text: str, slots: int, context_tokens: int) -> Load:
    """What the counters say. A block is the context of one slot: they share nothing."""
    found: dict[str, Any] = {
        _FIELDS[name]: int(value) for name, _, value in samples(text, _FIELDS.__contains__)
    }
    queried = found.get("prompt_tokens", 0) + found.get("prefix_hit_tokens", 0)
    return Load(
        num_blocks=slots,
        free_blocks=max(slots - found.get("running", 0), 0),
        block_size=context_tokens,
        prefix_query_tokens=queried,
        draft_method="",
        **found,
    )


class LlamacppGauge:
    """The ledger of one llama.cpp server, of the GPU where buffers are on one, else of host memory."""

    def __init__(
        self,
        planned: Sequence[LedgerRow],
        buffers: Mapping[tuple[str, str], int],
        gpu_uuids: Sequence[str],
        device: str,
    ) -> None:
        """`buffers`: see `read_buffers`."""
        self._planned = _joined(planned)
        self._gauge = Gauge(gpu_uuids)
        self._device = device
        on_gpu = any(where != "CPU" for _, where in buffers)
        self._buffers: dict[str, int] = {}
        for (name, where), nbytes in buffers.items():
            if (where != "CPU") == on_gpu:
                self._buffers[name] = self._buffers.get(name, 0) + nbytes

    def read(self, family: Sequence[psutil.Process]) -> Ledger:
        """The ledger now. Takes milliseconds: call it in a thread."""
        held = self._gauge.read(family)
        # Weights that are mapped from the file are there once they were read.
        rest = max(held.held - sum(self._buffers.values()), 0)
        measured = {**self._buffers, REST: rest} if self._buffers else {}
        rows = [
            LedgerRow(name, self._planned.get(name), measured.get(name), kind=KINDS.get(name) or Kind(name))
            for name in dict.fromkeys((*self._planned, *measured))
        ]
        rows.sort(key=lambda row: -(row.planned_bytes or row.measured_bytes or 0))
        return Ledger(self._device or held.device, tuple(rows), held.total, held.free, held.held)


def _joined(planned: Sequence[LedgerRow]) -> dict[str, int]:
    """The plan's rows under the names of the log's buffers."""
    found: dict[str, int] = {}
    for row in planned:
        name = row.name
        if row.kind.group is Kind.WEIGHTS:
            name = TOWER if row.kind is Kind.VISION else Kind.WEIGHTS
        elif name not in BUFFERS:
            name = REST
        found[name] = found.get(name, 0) + (row.planned_bytes or 0)
    return found

"""The ledger of a llama.cpp server: the plan beside its log's buffers and what its processes hold."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from snugvl.backends.child.held import Gauge
from snugvl.backends.llamacpp.log import BUFFERS
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Load

REST: Final = "libraries and the rest"
TOWER: Final = "vision tower"
KINDS: Final = {TOWER: Kind.VISION, REST: Kind.CONTEXT}  # of rows that are called otherwise
# The counter without llama.cpp's prefix → the field of `Load`.
_FIELDS: Final = {
    "requests_processing": "running",
    "requests_deferred": "waiting",
    "prompt_tokens_total": "prompt_tokens",
    "tokens_predicted_total": "generated_tokens",
    "prompt_tokens_cached_total": "prefix_hit_tokens",
}
_PREFIX: Final = "llamacpp:"


def read_load(text: str, slots: int, context_tokens: int) -> Load:
    """The load by the counters. A block is the context of one slot, as slots share nothing."""
    found: dict[str, Any] = {_FIELDS[name]: int(value) for name, value in _samples(text) if name in _FIELDS}
    queried = found.get("prompt_tokens", 0) + found.get("prefix_hit_tokens", 0)
    return Load(
        num_blocks=slots,
        free_blocks=max(slots - found.get("running", 0), 0),
        block_size=context_tokens,
        prefix_query_tokens=queried,
        draft_method="",
        **found,
    )


def _samples(text: str) -> Iterable[tuple[str, float]]:
    lines = [line for line in text.splitlines() if line.startswith(_PREFIX)]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name.removeprefix(_PREFIX), sample.value


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

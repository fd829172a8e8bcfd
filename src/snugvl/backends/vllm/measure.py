"""The ledger of a vLLM server: the plan beside what its log, its counters and the driver say, for one GPU.

vLLM tells less than our own engine: weights come with the buffers that are made with them ("Model loading
took"), and what a step needs is in no line. So the plan's rows are joined to those that can be compared:

    weights and buffers · KV cache · CUDA graphs · activations and libraries (the rest of the process)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from snugvl.backends.child.held import Gauge
from snugvl.backends.vllm.log import Measured
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Load

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_USAGE: Final = "vllm:kv_cache_usage_perc"
_CONFIG: Final = "vllm:cache_config_info"
# The sum over all engines (of data parallelism) of each → the field of `Load`.
_SUMS: Final = {
    _RUNNING: "running",
    _WAITING: "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:prefix_cache_queries_total": "prefix_query_tokens",
    "vllm:mm_cache_queries_total": "items_encoded",
}
_WANTED: Final = (*_SUMS, _USAGE, _CONFIG)


@dataclass(frozen=True, slots=True)
class Counters:
    """vLLM's load and counters. `kv_usage`: part of the KV cache in use, 0 to 1; `kv_bytes`: its size or
    None."""

    load: Load
    kv_usage: float
    kv_bytes: int | None = None


def read_counters(text: str) -> Counters:
    """The counters in the text of `/metrics`, summed over all engines of one server."""
    sums: dict[str, Any] = dict.fromkeys(_SUMS.values(), 0)
    usages: list[float] = []
    config: Mapping[str, str] = {}
    engines = 0
    for name, labels, value in _samples(text):
        if name in _SUMS:
            sums[_SUMS[name]] += int(value)
        elif name == _USAGE:
            usages.append(value)
        elif name == _CONFIG:
            config, engines = labels, engines + 1
    usage = sum(usages) / len(usages) if usages else 0.0
    blocks = _whole(config.get("num_gpu_blocks")) * max(engines, 1)
    load = Load(
        free_blocks=blocks - round(blocks * usage),
        num_blocks=blocks,
        block_size=_whole(config.get("block_size")) or 1,
        draft_method="",
        **sums,
    )
    return Counters(load, usage, _whole(config.get("kv_cache_memory_bytes")) or None)


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """Samples that we want; the others are most of the text and would take the parser its time."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


LOADED: Final = "weights and buffers"
REST: Final = "activations and libraries"
# Kinds of the plan's rows → the row that can be compared; weights are loaded, all others are the rest.
_JOINED: Final = {
    Kind.ROUNDING: LOADED, Kind.BUFFERS: LOADED, Kind.CACHE: Kind.CACHE,
    Kind.GRAPHS: Kind.GRAPHS,
}  # fmt: skip
_KINDS: Final = {LOADED: Kind.WEIGHTS, REST: Kind.CONTEXT}


class VllmGauge:
    """The ledger of one vLLM server. `gpu_uuids`: see `Gauge`."""

    def __init__(self, planned: Sequence[LedgerRow], gpu_uuids: Sequence[str], device: str) -> None:
        self._planned = _join_rows(planned)
        self._gauge = Gauge(gpu_uuids)
        self._device = device

    def read(self, log: Measured, counters: Counters, family: Sequence[psutil.Process]) -> Ledger:
        """The ledger now. Takes milliseconds: call it in a thread."""
        name, total, free, held_bytes = self._gauge.read(family)
        kv = log.kv if log.kv is not None else counters.kv_bytes
        known: dict[str, int | None] = {LOADED: log.loaded, Kind.CACHE: kv, Kind.GRAPHS: log.graphs}
        rest = held_bytes - sum(nbytes or 0 for nbytes in known.values())
        # While it sleeps it holds less than it loaded.
        sizes: dict[str, int | None] = known | {
            REST: rest if held_bytes and log.loaded is not None and rest > 0 else None
        }
        used: dict[str, int | None] = {Kind.CACHE: None if kv is None else round(kv * counters.kv_usage)}
        rows = [
            LedgerRow(
                str(part),
                self._planned.get(part),
                sizes.get(part),
                used.get(part),
                _KINDS.get(part) or Kind(part),
            )
            for part in sizes
            if sizes.get(part) is not None or part in self._planned
        ]
        rows.sort(key=lambda row: -(row.planned_bytes or row.measured_bytes or 0))
        return Ledger(self._device or name, tuple(rows), total, free, held_bytes)


def _join_rows(planned: Sequence[LedgerRow]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in planned:
        weights = row.kind.group is Kind.WEIGHTS
        name = LOADED if weights else _JOINED.get(row.kind, REST)
        found[name] = found.get(name, 0) + (row.planned_bytes or 0)
    return found

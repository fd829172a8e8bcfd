"""vLLM's counters (`GET /metrics`, Prometheus' text) as ours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from snugvl.backends.service import Load

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
    """What vLLM does. `kv_usage`: part of the KV cache that requests hold, from 0 to 1."""

    load: Load
    kv_usage: float
    kv_bytes: int | None = None


def read(text: str) -> Counters:
    """The counters of all engines of one server."""
    sums = dict.fromkeys(_SUMS.values(), 0)
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
        **sums,
    )
    return Counters(load, usage, _whole(config.get("kv_cache_memory_bytes")) or None)


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """Those that we want; the others are most of the text and would take the parser its time."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0

"""The metrics of `/metrics`, in Prometheus' form, whose labels come from our own code, never from users; and
the record of one request, in its scope, which they and the access log read."""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from snugvl.core.ledger import Ledger
from snugvl.core.messages import Usage
from snugvl.core.service import EngineService, Load

WARNINGS = 16  # of one answer
WARNING = 240  # characters of each
_NOT_IN_HEADERS = re.compile(r"[^ -:<-~]")  # what ends a line, is not ASCII, or parts two warnings
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STATES = ("starting", "ready", "restarting", "draining", "failed")

# Metric, what it counts, and the field of `Load` that has it. They restart from 0 with the engine.
ENGINE_COUNTERS = (
    ("snugvl_engine_prompt_tokens", "Prompt tokens that this engine computed.", "prompt_tokens"),
    ("snugvl_engine_generated_tokens", "Tokens that this engine generated.", "generated_tokens"),
    ("snugvl_engine_items_encoded", "Images and videos that went through the vision tower.", "items_encoded"),
    ("snugvl_encoder_queries", "Images and videos that prompts needed.", "encoder_queries"),
    ("snugvl_encoder_hits", "Images and videos that were encoded already.", "encoder_hits"),
    ("snugvl_preemptions", "Sequences that gave their KV blocks up for a while.", "preemptions"),
    ("snugvl_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("snugvl_prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("snugvl_forced_tokens", "Tokens that a grammar forced, without a step for each.", "forced_tokens"),
    ("snugvl_engine_faults", "Steps of the engine that failed.", "faults"),
    ("snugvl_engine_shortages", "Steps that ran out of memory and were tried in parts.", "shortages"),
    ("snugvl_kernel_compilations", "Kernels compiled while requests waited.", "kernel_compilations"),
    ("snugvl_graph_captures", "CUDA graphs recorded since requests are taken.", "graph_captures"),
)

# By what drafts them: "ngram", "mtp", or "off".
DRAFT_COUNTERS = (
    ("snugvl_drafted_tokens", "Tokens drafted and computed beside the newest one.", "drafted_tokens"),
    ("snugvl_accepted_tokens", "Drafted tokens that were accepted.", "accepted_tokens"),
)


@dataclass(slots=True)
class RequestNotes:
    """Findings of reading a request: warnings for its answer, and schemas to check it by.

    Attributes:
        warnings: what was ignored or done otherwise than asked, for the header of the answer.
        unenforced: schemas of which a grammar leaves keywords out, by tool; None: of the answer itself.
    """

    warnings: list[str] = field(default_factory=list)
    unenforced: dict[str | None, Mapping[str, Any]] = field(default_factory=dict)

    def warn(self, text: str) -> str:
        """Add a line to the answer's `Snugvl-Warning` header; returns the line as it stands there.

        Names in it may be a stranger's.
        """
        line = _NOT_IN_HEADERS.sub("?", text)[:WARNING]
        if len(self.warnings) < WARNINGS and line not in self.warnings:
            self.warnings.append(line)
        return line


@dataclass(slots=True)
class RequestRecord:
    """Record of one request; changes while it runs.

    Attributes:
        id: our id of the request, also sent to the client.
        key: fingerprint of the API key, or "-"; never the key.
        status: HTTP status of the answer; 499 when the client left before there was one.
        error: the error that it ended with, also in the middle of a stream.
        left: whether the client was gone before the answer was complete.
        lingering: what is still being ended for it when its answer is out; it keeps its place until then.
        notes: warnings, and schemas that the answer is validated against.
    """

    id: str
    key: str = "-"
    status: int | None = None
    error: Exception | None = None
    left: bool = False
    lingering: "asyncio.Future[Any] | None" = None
    usage: Usage | None = None
    notes: RequestNotes = field(default_factory=RequestNotes)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started

    def add(self, usage: Usage) -> None:
        """Count the tokens of one generation; a request may have several."""
        self.usage = (self.usage or Usage(0, 0)) + usage


_RECORD: Final = "snugvl.record"  # where it is, in the scope of its request


def begin_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    """Give a connection's request its record, before any layer or route runs."""
    scope[_RECORD] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record of the request with this scope; a new one where no layer has given it any."""
    if _RECORD not in scope:
        begin_record(scope, RequestRecord("-"))
    record: RequestRecord = scope[_RECORD]
    return record


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, service: EngineService) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Engine(service))
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter("snugvl_requests", "Requests answered.", ("method", "path", "status"))
        self.refusals = counter("snugvl_refusals", "Requests that ended in an error.", ("status", "code"))
        self.departures = counter(
            "snugvl_clients_left", "Requests whose client left before the answer was complete."
        )
        self.in_flight = Gauge(
            "snugvl_requests_in_flight", "Requests that are being answered.", registry=registry
        )
        self.request_seconds = histogram(
            "snugvl_request_seconds",
            "From the first byte of a request's head to the last of its answer.",
            ("path",),
            buckets=REQUEST_S,
        )
        self.first_token_seconds = histogram(
            "snugvl_time_to_first_token_seconds",
            "From handing a request to the engine to its first token.",
            buckets=FIRST_TOKEN_S,
        )
        self.token_seconds = histogram(
            "snugvl_inter_token_seconds", "Between two pieces of one answer.", buckets=TOKEN_S
        )
        self.finished = counter("snugvl_finished", "Answers, by how they ended.", ("reason",))
        self._tokens = counter(
            "snugvl_tokens", "Tokens of finished requests; image tokens are part of the prompt's.", ("kind",)
        )
        for kind in ("prompt", "generated", "image"):
            self._tokens.labels(kind)

    def count(self, usage: Usage) -> None:
        """Add the tokens of a finished request."""
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("generated").inc(usage.completion_tokens)
        self._tokens.labels("image").inc(usage.image_tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's metrics, read when they are asked for."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing: names are checked by tests, not by the registry, which would have to collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """State, load and ledger."""
        health = self._service.health
        state = GaugeMetricFamily(
            "snugvl_engine_state", "1 for the state the engine is in.", labels=("state",)
        )
        for name in STATES:
            state.add_metric((name,), float(name == health.state))
        yield state
        yield CounterMetricFamily(
            "snugvl_engine_restarts", "How often the engine came back.", health.restarts
        )
        snapshot = self._service.snapshot
        if snapshot is not None:
            yield from _load(snapshot.load)
            yield from _ledger(snapshot.ledger)


def _load(load: Load) -> Iterator[Metric]:
    yield GaugeMetricFamily("snugvl_running", "Requests that the engine computes.", load.running)
    yield GaugeMetricFamily("snugvl_waiting", "Requests in the engine's queue.", load.waiting)
    used = load.num_blocks - load.free_blocks
    yield GaugeMetricFamily("snugvl_kv_blocks_used", "KV blocks that requests hold.", used)
    yield GaugeMetricFamily("snugvl_kv_blocks", "KV blocks in all.", load.num_blocks)
    planned = load.planned_blocks or load.num_blocks
    yield GaugeMetricFamily("snugvl_kv_blocks_planned", "KV blocks without other programs.", planned)
    yield GaugeMetricFamily("snugvl_kv_block_tokens", "Tokens of one KV block.", load.block_size)
    for name, what, counter in ENGINE_COUNTERS:
        yield CounterMetricFamily(name, what, getattr(load, counter))
    for name, what, counter in DRAFT_COUNTERS:
        drafts = CounterMetricFamily(name, what, labels=("method",))
        drafts.add_metric((load.draft_method or "off",), getattr(load, counter))
        yield drafts


def _ledger(ledger: Ledger) -> Iterator[Metric]:
    kinds = ("planned", "measured", "used")
    rows = GaugeMetricFamily(
        "snugvl_memory_bytes",
        "Components of memory: planned, measured, in use.",
        labels=("component", "kind"),
    )
    for row in ledger.rows:
        for kind in kinds:
            value = getattr(row, f"{kind}_bytes")
            if value is not None:
                rows.add_metric((row.name, kind), value)
    yield rows
    device = GaugeMetricFamily("snugvl_device_bytes", "Memory of the device.", labels=("kind",))
    device.add_metric(("total",), ledger.total_bytes)
    device.add_metric(("free",), ledger.free_bytes)
    device.add_metric(("process",), ledger.process_bytes)
    device.add_metric(("others",), ledger.others_bytes)
    if ledger.cap_bytes is not None:
        device.add_metric(("cap",), ledger.cap_bytes)
    yield device

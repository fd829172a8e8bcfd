"""Readings of a vLLM server's log and counters: the log's form, its measurements, the ledger of one GPU.

Lines are those of vLLM 0.20 to 0.33; what the numbers mean is read by `diagnose`.

vLLM tells less than our own engine: weights come with the buffers that are made with them ("Model loading
took"), and what a step needs is in no line. So the plan's rows are joined to those that can be compared:

    weights and buffers · KV cache · CUDA graphs · activations and libraries (the rest of the process)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import shorten
from typing import Any, ClassVar, Final

import psutil

from snugvl.backends.child.watch import Gauge, samples
from snugvl.backends.spawned import LogForm
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Load
from snugvl.diagnose.facts import Value, gather
from snugvl.diagnose.scan import blocks, scan

_PREFIX: Final = r"^(?:\([^)]{1,80}\) )?(?:[A-Z]{4,8} \d\d-\d\d [\d:.]+ \[[^\]]*\] )?"
# What was raised, not the traceback before it.
_FAILED: Final = r"[\w.]*(?:Error|Exception)\b|terminate called|Segmentation fault|.*\berror: "
_STAGES: Final = (
    (r"vLLM API server version|version \d+\.\d+|non-default args", "vLLM reads its arguments", 0.05, 0.05),
    (r"Resolved architecture", "vLLM knows the model", 0.10, 0.10),
    (r"LLM engine \(v", "the engine process is up", 0.15, 0.15),
    (r"Starting to load model", "loading the weights", 0.20, 0.20),
    (r"Loading safetensors .*?(\d{1,3})% Completed", "loading the weights", 0.20, 0.60),
    (r"odel loading took", "measuring what a step needs", 0.60, 0.60),
    (r"Encoder cache will be initialized", "measuring what an image needs", 0.63, 0.63),
    (r"Dynamo bytecode|ompiling a graph|Directly load the compiled", "compiling", 0.66, 0.66),
    (r"Available KV cache memory|KV cache size:", "the KV cache is there", 0.80, 0.80),
    (r"Capturing CUDA graphs?.*?(\d{1,3})%", "capturing CUDA graphs", 0.82, 0.94),
    (r"raph capturing finished", "CUDA graphs are captured", 0.94, 0.94),
    (r"init engine \(profile", "the engine is ready", 0.96, 0.96),
    (r"Starting vLLM (?:API )?server", "the server starts", 0.98, 0.98),
)  # fmt: skip

# pydantic says on the next lines what is wrong: a field at the margin where there is one, its message
# indented by two, and by four where to read more.
_VALIDATION: Final = re.compile(r".*\b\d+ validation errors? for ")
_DETAILS: Final = re.compile(r" \[type=\w+.*")
MAX_SAID: Final = 300  # characters of a message


class _VllmForm(LogForm):
    def exception_lines(self, lines: Sequence[str]) -> list[str]:
        """Lines of errors, without prefixes; a validation error's line also has its messages."""
        rest = [self.plain(line) for line in lines]
        return [
            "; ".join([line, *_messages(rest[number + 1 :])]) if _VALIDATION.match(line) else line
            for number, line in enumerate(rest)
            if self.is_error(line)
        ]


def _messages(lines: Sequence[str]) -> Iterator[str]:
    field = ""
    for line in lines:
        if line.startswith("    "):
            continue
        if line.startswith("  "):
            message = shorten(_DETAILS.sub("", line), MAX_SAID)
            yield f"{field}: {message}" if field else message
            field = ""
        elif field or FORM.is_error(line):
            return
        else:
            field = line


FORM: Final = _VllmForm(_PREFIX, _FAILED, _STAGES)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one GPU that vLLM said it took; None for a part that it did not say.

    Attributes:
        loaded: "Model loading took": weights, and the buffers made with them.
        kv: "Available KV cache memory".
        graphs: of the CUDA graphs.
        activation: the largest step of the start's trial run.
        kv_tokens: "GPU KV cache size".
    """

    loaded: int | None = None
    kv: int | None = None
    graphs: int | None = None
    activation: int | None = None
    kv_tokens: int | None = None


def read_measurements(lines: tuple[str, ...]) -> Measured:
    """The figures of a start."""
    run = scan(blocks(BytesIO("\n".join(lines).encode("utf-8", "replace"))))
    facts = gather(run)
    tokens = run.last("kv_tokens")
    return Measured(
        loaded=_bytes(facts.weights),
        kv=_bytes(facts.kv),
        graphs=_bytes(facts.graphs),
        activation=_bytes(facts.activation),
        kv_tokens=int(tokens.groups[0].replace(",", "")) if tokens else None,
    )


def _bytes(value: Value | None) -> int | None:
    return None if value is None else value.nbytes


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
    """vLLM's load and counters. `kv_usage`: used part of the KV cache, 0 to 1; `kv_bytes`: its size."""

    load: Load
    kv_usage: float
    kv_bytes: int | None = None


def read_counters(text: str) -> Counters:
    """The counters in the text of `/metrics`, summed over all engines of one server."""
    sums: dict[str, Any] = dict.fromkeys(_SUMS.values(), 0)
    usages: list[float] = []
    config: Mapping[str, str] = {}
    engines = 0
    for name, labels, value in samples(text, _WANTED.__contains__):
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


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


LOADED: Final = "weights and buffers"
REST: Final = "activations and libraries"
# Kinds of the plan's rows → the row that can be compared; weights are loaded, all others are the rest.
_JOINED: Final = {
    Kind.ROUNDING: LOADED, Kind.BUFFERS: LOADED, Kind.CACHE: Kind.CACHE,
    Kind.GRAPHS: Kind.GRAPHS,
}  # fmt: skip


class VllmGauge(Gauge):
    """The ledger of one vLLM server."""

    kinds: ClassVar = {LOADED: Kind.WEIGHTS, REST: Kind.CONTEXT}

    @staticmethod
    def row_of(planned: LedgerRow) -> str:
        return LOADED if planned.kind.group is Kind.WEIGHTS else _JOINED.get(planned.kind, REST)

    def read(self, log: Measured, counters: Counters, family: Sequence[psutil.Process]) -> Ledger:
        """The ledger now. Takes milliseconds: call it in a thread."""
        held = self.held_by(family)
        kv = log.kv if log.kv is not None else counters.kv_bytes
        known: dict[str, int | None] = {LOADED: log.loaded, Kind.CACHE: kv, Kind.GRAPHS: log.graphs}
        # While it sleeps it holds less than it loaded.
        rest = held.held - sum(nbytes or 0 for nbytes in known.values())
        known[REST] = rest if held.held and log.loaded is not None and rest > 0 else None
        return self.ledger(held, known, {Kind.CACHE: None if kv is None else round(kv * counters.kv_usage)})

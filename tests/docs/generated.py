"""Tables of the documentation that the code itself knows: `python -m tests.docs.generated` writes them.

A page marks the place: `<!-- generated: NAME -->` … `<!-- /generated -->`. A test fails when one is stale.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from snugvl.core.sampling import MAX_STOP, MAX_STOP_CHARACTERS
from snugvl.errors import CODES, EngineUnavailable, QueueFull, RateLimited, SnugvlError
from snugvl.inputs import constraints
from snugvl.inputs.constraints import MAX_CHARACTERS, MAX_CHOICES_LITERAL
from snugvl.inputs.grammar import AT_ONCE_BYTES
from snugvl.inputs.prompt import COUNTED_CONTEXTS
from snugvl.inputs.trials import CPU_S, GRAMMAR_BYTES
from snugvl.server import access, app, body, connection, errors, receiving, unsupported, vision
from snugvl.server.anthropic import CountTokensRequest, MessagesRequest
from snugvl.server.fields import MAX_ALL_PARTS, MAX_FIELDS, MAX_NAME, Body, Strict
from snugvl.server.forms import MAX_ARGUMENTS
from snugvl.server.media import urls
from snugvl.server.media.loading import MAX_MEDIA, MediaSettings
from snugvl.server.metrics import Metrics
from snugvl.server.ollama.request import ChatRequest, GenerateRequest, OllamaOptions, ShowRequest
from snugvl.server.openai import chat_request as asked
from snugvl.server.openai.chat import ChatCompletionRequest
from snugvl.server.openai.completions import MAX_CHARACTERS as MAX_PROMPT_CHARACTERS
from snugvl.server.openai.completions import MAX_CHOICES, MAX_PROMPTS, CompletionRequest
from snugvl.server.openai.responses_request import ResponseRequest
from snugvl.server.openai.tokens import DetokenizeRequest, TokenizeRequest
from snugvl.server.settings import ServerSettings
from tests.docs import clients
from tests.server.fake import FakeService

FOLDER = Path(__file__).parents[2] / "docs"
PLACE = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)
MIB = 1024 * 1024

REQUESTS: Mapping[str, type[Strict]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "messages": MessagesRequest,
    "ollama-chat": ChatRequest,
    "ollama-generate": GenerateRequest,
    "ollama-options": OllamaOptions,
    "ollama-show": ShowRequest,
    "tokenize": TokenizeRequest,
}
# What the page says in its own words.
OTHER_REQUESTS = (
    CountTokensRequest,
    vision.CaptionRequest,
    vision.AskRequest,
    vision.SceneRequest,
    vision.DetectRequest,
    DetokenizeRequest,
)


VERDICTS: Mapping[str, str] = {
    "honoured": "Honoured",
    "read": "Read as another name for a field",
    "checked": "Checked, and without effect",
    "refused": "Refused ([why](#what-is-refused))",
}


def fields(request: type[Strict]) -> str:
    """What becomes of each field of a request."""
    declared = {field.alias or name: field for name, field in request.model_fields.items()}
    found = unsupported.listed(request.unsupported, declared)
    rows = (
        (VERDICTS[kind], ", ".join(f"`{name}`" for name in found[kind])) for kind in VERDICTS if kind in found
    )
    rest = "ignored, and named in `Snugvl-Warning`" if issubclass(request, Body) else "ignored"
    return table(("what becomes of it", "fields"), (*rows, ("Everything else", rest)))


PROTOCOLS: Mapping[str, unsupported.UnsupportedFields] = {
    "chat": ChatCompletionRequest.unsupported,
    "completions": CompletionRequest.unsupported,
    "responses": ResponseRequest.unsupported,
    "items of responses": unsupported.ITEM,
    "messages": MessagesRequest.unsupported,
    "Ollama": ChatRequest.unsupported,
    "Ollama's `options`": OllamaOptions.unsupported,
}


def refusals() -> str:
    """Every field that would change the answer and that is refused, and what to do instead."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for protocol, table_of in PROTOCOLS.items():
        for name, field in table_of.items():
            if field.verdict == "refused":
                passes = " or ".join(f"`{text}`" for text in dict.fromkeys(map(json.dumps, field.nothing)))
                rows.setdefault((name, passes, field.why), []).append(protocol)
    return table(
        ("field", "in", "passes as", "instead"),
        ((f"`{name}`", ", ".join(where), passes, why) for (name, passes, why), where in sorted(rows.items())),
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- |", "|---|")
        .replace(" --- |", "---|")
    )


def metrics() -> str:
    """Every metric under the name that a scrape shows."""
    registry = Metrics(FakeService())._registry
    rows = []
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            found = collector.describe()
            labels = collector._labelnames
            rows += [(metric, tuple(labels)) for metric in found]
        else:
            rows += [(metric, _labels(metric)) for metric in collector.collect()]
    return table(
        ("metric", "kind", "labels", "what it is"),
        (
            (f"`{_scraped(metric)}`", metric.type, ", ".join(f"`{x}`" for x in labels), metric.documentation)
            for metric, labels in sorted(rows, key=lambda row: row[0].name)
        ),
    )


def _scraped(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def _labels(metric: Metric) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for sample in metric.samples for name in sample.labels))


RETRIED = (QueueFull, RateLimited, EngineUnavailable)


def error_table() -> str:
    """Every status with its codes."""
    rows = [
        (kind.http_status, f"`{code}`", _first(kind), "yes" if issubclass(kind, RETRIED) else "")
        for code, kind in CODES.items()
    ]
    words = {
        "missing_required_parameter": "A field is missing.",
        "unknown_parameter": "A field that our own protocol doesn't have.",
        "unsupported_parameter": "A field that would change the answer, and that we don't support.",
        "unsupported_value": "A value of the protocol that we don't support.",
        "invalid_json": "The body is not JSON.",
        "invalid_http": "What came is no request of HTTP/1.1, such as TLS or HTTP/2.",
        "invalid_form": "The multipart form can't be read.",
    }
    rows += [(400, f"`{code}`", text, "") for code, text in words.items()]
    rows += [
        (400, "`invalid_type`", "A field has a value of the wrong type.", ""),
        (400, "`invalid_value`", "A field has a value out of its bounds.", ""),
        (400, "null", "Fields that don't fit together, a prompt that can't be used.", ""),
        (
            500,
            "`internal_error`",
            "The engine failed, or a bug of ours; the log says why.",
            "",
        ),
    ]
    known = {(status, code) for status, code, *_ in rows}
    rows += [
        (status, f"`{code}`", app.MEANINGS[status], "")
        for status, code in errors.STATUS_CODES.items()
        if (status, f"`{code}`") not in known and status != 404
    ]
    rows.append((404, "`not_found`", "There is no such path.", ""))
    ordered = sorted(rows, key=lambda row: (row[0], row[1]))
    return table(("status", "code", "when", "Retry-After"), ((str(row[0]), *row[1:]) for row in ordered))


def _first(kind: type[SnugvlError]) -> str:
    """The first sentence of an exception's description."""
    text = " ".join((inspect.getdoc(kind) or "").split())
    return re.split(r"(?<=\.) |; the message|`", text)[0].rstrip(". ") + "."


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table of limits."""

    what: str
    value: str
    option: str = ""


def limit_rows() -> list[Limit]:
    """Limits of the server; those of media and the schemas' have tables of their own."""
    s = ServerSettings()
    return [
        Limit("bytes of a request", _mib(s.max_body_bytes), "`--max-body`"),
        Limit("header lines; their bytes", f"{access.MAX_HEADERS}; {s.max_header_bytes:,}"),
        Limit("bytes of all bodies at once, beyond 1 MiB each", _mib(receiving.BODIES * s.max_body_bytes)),
        Limit("characters of a prompt, white space included", "context × the longest token's"),
        Limit("tokens of what is only counted", f"context × {COUNTED_CONTEXTS}"),
        Limit("bytes of trailers, and of what describes chunks", f"{s.max_header_bytes:,}"),
        Limit("bytes of requests sent before the last one is answered", f"{connection.PIPELINED_BYTES:,}"),
        Limit("requests at once, waiting ones included", str(s.max_concurrent), "`--max-concurrent`"),
        Limit("seconds of one request", f"{s.deadline_s:g}", "`--deadline`"),
        Limit("requests a minute of one key", "no limit", "`--key-requests-per-minute`"),
        Limit("requests at once of one key", "no limit", "`--key-concurrent`"),
        Limit("seconds for the head of a request", f"{s.read_timeout_s:g}"),
        Limit("seconds that a client may leave its stream unread", f"{s.write_timeout_s:g}"),
        Limit(
            "JSON: levels; values; digits of a whole number",
            f"{body.MAX_DEPTH}; {body.MAX_VALUES:,}; {body.MAX_DIGITS}",
        ),
        Limit("values in the arguments of a call", f"{MAX_ARGUMENTS:,}"),
        Limit("fields of an object; characters of a name", f"{MAX_FIELDS}; {MAX_NAME:,}"),
        Limit("parts, calls and pictures of all messages together", f"{MAX_ALL_PARTS:,}"),
        Limit("pictures and videos of a conversation", str(MAX_MEDIA)),
        Limit("pictures of `/v1/vision/ask`", str(vision.MAX_IMAGES)),
        Limit("files of an upload", str(body.MAX_FORM_FILES)),
        Limit("tools", str(asked.MAX_TOOLS)),
        Limit("stop sequences; their characters in all", f"{MAX_STOP}; {MAX_STOP_CHARACTERS:,}"),
        Limit("prompts of `/v1/completions`; choices of all", f"{MAX_PROMPTS}; {MAX_CHOICES}"),
        Limit("characters of several prompts together", f"{MAX_PROMPT_CHARACTERS:,}"),
        Limit("seconds that running requests get at the end", f"{s.drain_s:g}", "`--drain`"),
    ]


def media_rows() -> list[Limit]:
    """What a picture or video may be, and what fetching one may take."""
    s = MediaSettings()
    video, fetch = s.video, s.fetch
    return [
        Limit("bytes of a picture; of a video", f"{_mib(s.image.max_bytes)}; {_mib(video.max_bytes)}"),
        Limit("pixels of a picture, before it is decoded", f"{s.image.max_pixels:,}"),
        Limit("seconds to decode a picture; a video", f"{s.decode_s:g}; {video.decode_s:g}"),
        Limit("characters of a URL that is fetched", f"{urls.MAX_URL:,}"),
        Limit("characters of a data URL without base64", f"{urls.MAX_PERCENT_ENCODED:,}"),
        Limit("seconds to fetch; to connect", f"{fetch.total_s:g}; {fetch.connect_s:g}"),
        Limit("seconds without a byte", f"{fetch.read_s:g}"),
        Limit("redirects", str(fetch.max_redirects)),
        Limit("fetches at once; from one address", f"{fetch.concurrent}; {fetch.per_address}"),
        Limit("seconds of a video", f"{video.max_duration_s:g}"),
        Limit("frames of a second; of a video, taken evenly", f"{video.fps:g}; {video.max_frames}"),
        Limit("pixels of one frame in the file", f"{video.max_frame_pixels:,}"),
        Limit("pixels of all frames, scaled down to it", f"{video.max_total_pixels:,}"),
        Limit("decoded pictures of one request, 3 bytes a pixel", _mib(s.max_live_bytes)),
        Limit(
            "the same of several requests; others wait for their turn, a larger one for its turn alone",
            _mib(s.shared_bytes),
        ),
        Limit("seconds that a picture waits for others to leave room, then 429", f"{s.wait_s:g}"),
    ]


def schema_rows() -> list[Limit]:
    """What a JSON schema may be."""
    return [
        Limit("levels of the document", str(constraints.MAX_DEPTH)),
        Limit("levels with everything that its `$ref`s lead to", str(constraints.MAX_LINKED_DEPTH)),
        Limit("properties of one object", f"{constraints.MAX_PROPERTIES:,}"),
        Limit("patterns and formats that `allOf` or `$ref` join on one value", str(constraints.MAX_PATTERNS)),
        Limit(
            "`multipleOf` without its decimal point, or the product of those in one place",
            f"{constraints.MAX_MULTIPLE:,}",
        ),
        Limit("characters of one literal (`const`, `enum`, a name)", f"{constraints.MAX_LITERAL:,}"),
        Limit("choices (`n`) × characters of the longest literal", f"{MAX_CHOICES_LITERAL:,}"),
        Limit("seconds of processor time to compile it", f"{CPU_S:g}"),
        Limit(
            "MiB of memory to compile it; of large ones in use together",
            f"{GRAMMAR_BYTES // MIB}; {AT_ONCE_BYTES // MIB}",
        ),
        Limit("characters, of all tools together too", f"{MAX_CHARACTERS['json_schema']:,}"),
    ]


def _mib(size: int) -> str:
    return f"{size // MIB:,} MiB"


def limit_table(rows: list[Limit]) -> str:
    """Limits as a table; the last column only where an option changes one."""
    if any(row.option for row in rows):
        return table(("limit", "by default", "option"), ((r.what, r.value, r.option) for r in rows))
    return table(("limit", "value"), ((r.what, r.value) for r in rows))


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def pocket_cost() -> str:
    """What each format costs pocket, as `training/pocket/format_error.py` wrote it down."""
    rows = json.loads((RESULTS / "pocket/format_error.json").read_text())["formats"]
    lines = ["| | error of the logits | KL, nats a token | same likeliest token |", "|---|---|---|---|"]
    for name, row in rows.items():
        kept = f"{row['relative_error']:.1%} | {row['kl_nats']:.5f} | {row['top1_agreement']:.2%}"
        lines.append(f"| {name} | {kept} |")
    return "\n".join(lines) + "\n"


def released_cost(name: str) -> str:
    """What each format costs a released model, as `training/format_cost.py` wrote it down."""
    found = json.loads((RESULTS / name / "format_cost.json").read_text())
    greedy = "greedy" in next(iter(found["formats"].values()))
    head = "| | bits | KL of its answers | same likeliest token | KL of a text | perplexity |"
    lines = [head + (" whole answers equal, and parted at a tie |" if greedy else "")]
    lines.append("|---" * (6 + greedy) + "|")
    lines.append(f"| fp32 | | | | | {found['fp32_perplexity']:.2f} |" + (" |" if greedy else ""))
    for way, row in found["formats"].items():
        kept = f"{row['kl_nats']:.4f} | {row['top1_agreement']:.1%} | {row['text_kl_nats']:.4f}"
        line = f"| {way} | {row['bits']:.2f} | {kept} | {row['perplexity']:.2f} |"
        if greedy:
            line += " {equal} and {ties} of {answers} |".format_map(row["greedy"])
        lines.append(line)
    return "\n".join(lines) + "\n"


def rounding_cost() -> str:
    """What each way of rounding costs SmolLM2, as `training/rounding.py` wrote it down."""
    rows = json.loads((RESULTS / "smollm2/rounding.json").read_text())["ways"]
    lines = ["| | bits | KL of a text | same likeliest token |", "|---|---|---|---|"]
    for name, row in rows.items():
        kept = f"{row['bits']:.2f} | {row['kl_nats']:.3f} | {row['top1_agreement']:.1%}"
        lines.append(f"| {name} | {kept} |")
    return "\n".join(lines) + "\n"


def quantized_cost() -> str:
    """What `snugvl quantize` makes of SmolLM2, as `training/quantized.py` wrote it down."""
    rows = json.loads((RESULTS / "smollm2/quantized.json").read_text())["ways"]
    head = "| | bits | matrices of 4, 5, 6, 8 bits | KL of its answers | same likeliest token |"
    lines = [f"{head} KL of a text |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        counts = row.get("widths")
        widths = ", ".join(str(counts.get(str(bits), 0)) for bits in (4, 5, 6, 8)) if counts else ""
        kept = f"{row['bits']:.2f} | {widths} | {row['kl_nats']:.4f} | {row['top1_agreement']:.1%}"
        lines.append(f"| {name} | {kept} | {row['text_kl_nats']:.4f} |")
    return "\n".join(lines) + "\n"


def llamacpp_buffers() -> str:
    """Planned beside taken of llama.cpp's buffers, as `tests/backends/llamacpp/buffers.py` wrote down."""
    rows = json.loads((RESULTS / "llamacpp/buffers.json").read_text())
    lines = ["| | cells | all buffers together | compute buffer | mmproj's |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        parts = (list(mine[0]["planned"]), ["compute buffer"], ["mmproj compute buffer"])
        kept = " | ".join(_band(mine, part) for part in parts)
        lines.append(f"| {name}, {mine[0]['type']} | {len(mine)} | {kept} |")
    return "\n".join(lines) + "\n"


def llamacpp_cpu() -> str:
    """Both engines on a CPU, as `benchmarks/llamacpp_smollm2.py` wrote it down."""
    rows = json.loads((RESULTS / "smollm2/llamacpp.json").read_text())["speed"]
    lines = ["| | tokens a second | beside the first | processor time a token |", "|---|---|---|---|"]
    for name, row in rows.items():
        kept = f"{row['tokens_per_s']:.1f} | {row['ratio']:.2f} | {row['processor_ms']:.0f} ms"
        lines.append(f"| {name} | {kept} |")
    return "\n".join(lines) + "\n"


def _band(rows: list[dict[str, Any]], parts: list[str]) -> str:
    """From the least to the most that was planned beyond what was taken."""
    sums = [[sum(row[which][part] for part in parts) for which in ("planned", "taken")] for row in rows]
    found = sorted(planned - taken for planned, taken in sums)
    shares = sorted(planned / taken - 1 for planned, taken in sums)
    return f"{shares[0]:+.1%} to {shares[-1]:+.1%} ({found[0]:+.0f} to {found[-1]:+.0f} MiB)"


SECTIONS: Mapping[str, Callable[[], str]] = {
    **{f"fields-{name}": lambda request=request: fields(request) for name, request in REQUESTS.items()},
    "refusals": refusals,
    "metrics": metrics,
    "errors": error_table,
    "limits": lambda: limit_table(limit_rows()),
    "media": lambda: limit_table(media_rows()),
    "schemas": lambda: limit_table(schema_rows()),
    "format-cost-pocket": pocket_cost,
    "format-cost-smollm2": lambda: released_cost("smollm2"),
    "format-cost-coder": lambda: released_cost("coder"),
    "rounding": rounding_cost,
    "quantized": quantized_cost,
    "llamacpp-buffers": llamacpp_buffers,
    "llamacpp-cpu": llamacpp_cpu,
    "clients": clients.script_table,
    "client-requests": clients.shape_table,
}


def written(page: str) -> str:
    """The page with today's tables."""
    return PLACE.sub(lambda found: found[1] + SECTIONS[found[2]]() + found[4], page)


def names(page: str) -> list[str]:
    """Sections that a page has."""
    return [found[2] for found in PLACE.finditer(page)]


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [FOLDER.parent / "README.md", *sorted(FOLDER.glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        text: Any = path.read_text(encoding="utf-8")
        path.write_text(written(text), encoding="utf-8")

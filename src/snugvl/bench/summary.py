"""The arithmetic: records of a level to medians, percentiles and rates, and those people compare. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal, get_args

from snugvl.bench.record import Record

Share = Literal["median", "p95", "p99"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How values lie. Percentiles are interpolated between the two nearest values."""

    count: int
    mean: float
    min: float
    median: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One level, all its repeats together.

    Attributes:
        errors: how often each code came.
        first_token_s, latency_s: seconds from sending to the first piece and to the end.
        inter_token_s: seconds between pieces of one answer, all answers together.
        decode_tokens_per_s: of single answers, after their first token.
        output_tokens_per_s, requests_per_s: of all clients together, one value a repeat.
        prompt_tokens, output_tokens: of single requests.
        pieces: of the answers that were not counted by usage: their number of pieces stands for tokens.
    """

    clients: int
    repeats: int
    requests: int
    failed: int
    errors: Mapping[str, int]
    first_token_s: Distribution | None
    inter_token_s: Distribution | None
    latency_s: Distribution | None
    decode_tokens_per_s: Distribution | None
    output_tokens_per_s: Distribution | None
    requests_per_s: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    pieces: Distribution | None
    counted_by_pieces: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    place = (len(ordered) - 1) * share
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Distribution | None:
    """Spread of the values that there are; None without any."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        len(ordered), fmean(ordered), ordered[0], median(ordered),
        percentile(ordered, 0.95), percentile(ordered, 0.99), ordered[-1],
    )  # fmt: skip


def summarize(clients: int, repeats: Sequence[Sequence[Record]]) -> Summary:
    """A level from the records of each of its repeats."""
    records = [record for repeat in repeats for record in repeat]
    good = [record for record in records if record.error is None]
    return Summary(
        clients=clients,
        repeats=len(repeats),
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        first_token_s=spread(record.first_token_s for record in good),
        inter_token_s=spread(gap for record in good for gap in record.gaps_s),
        latency_s=spread(record.latency_s for record in good),
        decode_tokens_per_s=spread(record.decode_tokens_per_s for record in good),
        output_tokens_per_s=spread(rate(repeat, tokens=True) for repeat in repeats),
        requests_per_s=spread(rate(repeat, tokens=False) for repeat in repeats),
        prompt_tokens=spread(record.prompt_tokens for record in good),
        output_tokens=spread(record.output_tokens for record in good),
        pieces=spread(len(record.pieces_s) for record in good),
        counted_by_pieces=sum(record.counted_by == "pieces" for record in good),
    )


def rate(records: Sequence[Record], *, tokens: bool) -> float | None:
    """Output tokens (or answers) of the good requests per second, from the first sent to the last ended."""
    good = [record for record in records if record.error is None]
    if not good:
        return None
    seconds = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    amount = sum(record.output_tokens for record in good) if tokens else len(good)
    return amount / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. `scale`: from our units to `unit`."""

    name: str
    unit: str
    of: Callable[[Summary], float | None]
    scale: float = 1.0
    higher_is_better: bool = False

    def shown(self, summary: Summary) -> str:
        """The figure in its unit, with three digits that matter; "–" where there is none."""
        value = self.of(summary)
        return "–" if value is None else number(value * self.scale)


def number(value: float) -> str:
    """A figure with about three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _of(
    name: str, unit: str, field: str, share: Share = "median", *, scale: float = 1.0, more: bool = False
) -> Metric:
    """A metric that reads a share of one of a level's spreads. `more`: higher is better."""

    def read(level: Summary) -> float | None:
        spread: Distribution | None = getattr(level, field)
        return None if spread is None else getattr(spread, share)

    return Metric(name, unit, read, scale, more)


def _shares(name: str, unit: str, field: str, scale: float = 1.0) -> tuple[Metric, ...]:
    return tuple(_of(f"{name}, {share}", unit, field, share, scale=scale) for share in get_args(Share))


FIRST_TOKEN: Final = _shares("time to first token", "ms", "first_token_s", 1e3)
INTER_TOKEN: Final = _shares("inter-token latency", "ms", "inter_token_s", 1e3)
LATENCY: Final = _shares("whole answer", "s", "latency_s")
EACH: Final = _of("decode of one request, median", "tokens/s", "decode_tokens_per_s", more=True)
ALL: Final = _of("output of all together", "tokens/s", "output_tokens_per_s", more=True)
REQUESTS: Final = _of("requests", "1/s", "requests_per_s", more=True)
METRICS: Final = (*FIRST_TOKEN, *INTER_TOKEN, *LATENCY, EACH, ALL, REQUESTS)

"""The figures of a level that people compare, once for the table, the plot and the comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from snugvl.bench.summary import Spread, Summary

Share = Literal["median", "p95", "p99"]


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


def _pick(spread: Spread | None, share: Share) -> float | None:
    return None if spread is None else {"median": spread.median, "p95": spread.p95, "p99": spread.p99}[share]


def _first_token(share: Share) -> Metric:
    return Metric(f"time to first token, {share}", "ms", lambda level: _pick(level.first_token_s, share), 1e3)


def _inter_token(share: Share) -> Metric:
    return Metric(f"inter-token latency, {share}", "ms", lambda level: _pick(level.inter_token_s, share), 1e3)


def _latency(share: Share) -> Metric:
    return Metric(f"whole answer, {share}", "s", lambda level: _pick(level.latency_s, share))


FIRST_TOKEN: Final = (_first_token("median"), _first_token("p95"), _first_token("p99"))
INTER_TOKEN: Final = (_inter_token("median"), _inter_token("p95"), _inter_token("p99"))
LATENCY: Final = (_latency("median"), _latency("p95"), _latency("p99"))
EACH: Final = Metric(
    "decode of one request, median",
    "tokens/s",
    lambda level: _pick(level.decode_tokens_per_s, "median"),
    higher_is_better=True,
)
ALL: Final = Metric(
    "output of all together",
    "tokens/s",
    lambda level: _pick(level.output_tokens_per_s, "median"),
    higher_is_better=True,
)
REQUESTS: Final = Metric(
    "requests", "1/s", lambda level: _pick(level.requests_per_s, "median"), higher_is_better=True
)
METRICS: Final = (*FIRST_TOKEN, *INTER_TOKEN, *LATENCY, EACH, ALL, REQUESTS)

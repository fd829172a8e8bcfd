"""A result as one SVG picture: throughput and latency over the number of clients, and the memory bars.

Readable in dark and light: it brings both, and the viewer's preference chooses. Nothing comes from outside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

from snugvl.bench.report import memory_peak, workload_line
from snugvl.bench.result import BenchmarkResult
from snugvl.bench.summary import ALL, EACH, FIRST_TOKEN, INTER_TOKEN, Metric, Summary, number
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.sizes import format_size

WIDTH, PAD = 960, 32
PANEL_WIDTH, PANEL_HEIGHT, PANEL_TOP = 264, 190, 130
BETWEEN = (WIDTH - 2 * PAD - 3 * PANEL_WIDTH) / 2
LEFT = 44  # of a panel: its axis
BAR_HEIGHT = 26
COLOURS = 8
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
LIGHT = ("#ffffff", "#20262e", "#566070", "#dfe4ea", "#1f5fd0", "#c2571a")
DARK = ("#14181d", "#e8ecf1", "#a3adba", "#333b45", "#6ea4ff", "#ff9d5c")
BARS_LIGHT = ("#3b6fd4", "#2f9e6e", "#c98a12", "#9a5fc0", "#c2571a", "#1d8aa5", "#7d8794", "#b34a78")
BARS_DARK = ("#6ea4ff", "#4fc28f", "#e6b04a", "#c193e6", "#ff9d5c", "#55c3de", "#a3adba", "#e884b0")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel: what it shows, its class in the style sheet."""

    label: str
    metric: Metric
    look: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    lines: tuple[Line, ...]


PANELS = (
    Panel("output tokens/s", (Line("all together", ALL, "one"), Line("each request", EACH, "two"))),
    Panel(
        "time to first token, ms", (Line("median", FIRST_TOKEN[0], "one"), Line("p95", FIRST_TOKEN[1], "two"))
    ),
    Panel(
        "inter-token latency, ms", (Line("median", INTER_TOKEN[0], "one"), Line("p95", INTER_TOKEN[1], "two"))
    ),
)


def svg(result: BenchmarkResult) -> str:
    """The picture."""
    peak = memory_peak(result)
    bars = list(_memory(peak.ledger)) if peak is not None and peak.ledger is not None else []
    legend_rows = (len(_shown(peak.ledger)) + 1) // 2 if peak is not None and peak.ledger is not None else 0
    height = PANEL_TOP + PANEL_HEIGHT + 84 + (150 + 22 * legend_rows if bars else 0)
    name = f"{result.server.manner.model}: {', '.join(str(level.clients) for level in result.levels)} clients"
    levels = [level for level in result.levels if level.requests > level.failed]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{FONT}" role="img">',
        f"<title>snugvl bench: {escape(name)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        _head(result.server.manner.model),
        _text(PAD, 70, workload_line(result.workload), "soft"),
        _text(PAD, 90, _where(result), "soft"),
        *(part for index, panel in enumerate(PANELS) for part in _panel(index, panel, levels)),
        *bars,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _head(name: str) -> str:
    """The model's name; a long one smaller. Bold letters are about 0.62 of their size wide."""
    size = min(20.0, (WIDTH - 2 * PAD) / (0.62 * max(len(name), 1)))
    place = f'x="{PAD}" y="46" style="font-size:{size:.1f}px"'
    return f'<text class="ink head" {place}>{escape(name)}</text>'


def style() -> str:
    """Both sets of colours."""
    common = (
        "text{font-size:13px}.head{font-weight:600}.title{font-size:14px;font-weight:600}"
        ".small{font-size:12px}polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}"
        "polyline.two{stroke-dasharray:6 4}"
    )
    dark = f"@media (prefers-color-scheme:dark){{{_colours(DARK, BARS_DARK)}}}"
    return common + _colours(LIGHT, BARS_LIGHT) + dark


def _colours(base: Sequence[str], bars: Sequence[str]) -> str:
    ground, ink, soft, grid, one, two = base
    rules = f".ground{{fill:{ground}}}.ink{{fill:{ink}}}.soft{{fill:{soft}}}.grid{{stroke:{grid}}}"
    for name, colour in (("one", one), ("two", two)):
        rules += f"polyline.{name}{{stroke:{colour}}}circle.{name},text.{name}{{fill:{colour}}}"
    rules += f".edge{{stroke:{ground};stroke-width:1.5}}"
    return rules + "".join(f".bar{index}{{fill:{colour}}}" for index, colour in enumerate(bars))


def _where(result: BenchmarkResult) -> str:
    machine = result.machine
    device = ", ".join(machine.gpus) or f"{machine.processor}, {machine.cpu_cores} cores"
    return f"{device} · {result.taken_at[:10]} · snugvl {result.snugvl}"


def _panel(index: int, panel: Panel, levels: Sequence[Summary]) -> Iterator[str]:
    left = PAD + index * (PANEL_WIDTH + BETWEEN)
    plot_left, bottom = left + LEFT, PANEL_TOP + 24 + PANEL_HEIGHT
    yield _text(left, PANEL_TOP + 4, panel.title, "ink title")
    values = [value for line in panel.lines for level in levels if (value := _value(line, level)) is not None]
    top = nice_top(max(values, default=1.0))
    for step in range(5):
        value, y = top * step / 4, bottom - PANEL_HEIGHT * step / 4
        yield f'<line class="grid" x1="{plot_left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        tick = f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.2g}"
        yield _text(plot_left - 6, y + 4, tick, "soft small", "end")
    places = x_places([level.clients for level in levels], plot_left + 14, left + PANEL_WIDTH - 14)
    for level, x in zip(levels, places, strict=True):
        yield _text(x, bottom + 18, f"{level.clients:,}", "soft small", "middle")
    yield _text((plot_left + left + PANEL_WIDTH) / 2, bottom + 36, "clients", "soft small", "middle")
    for row, line in enumerate(panel.lines):
        yield from _line(line, levels, places, lambda value: bottom - PANEL_HEIGHT * value / top)
        label = f"{'– –' if line.look == 'two' else '──'} {line.label}"
        yield _text(plot_left + 8 + row * 104, bottom + 54, label, f"{line.look} small")


def _value(line: Line, level: Summary) -> float | None:
    value = line.metric.of(level)
    return None if value is None else value * line.metric.scale


def _line(line: Line, levels: Sequence[Summary], places: Sequence[float], y_of: object) -> Iterator[str]:
    assert callable(y_of)
    points = [
        (x, y_of(value), value)
        for level, x in zip(levels, places, strict=True)
        if (value := _value(line, level)) is not None
    ]
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        yield f'<polyline class="{line.look}" points="{path}"/>'
    for x, y, value in points:
        tip = escape(f"{line.label}: {number(value)}")
        yield f'<circle class="{line.look}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{tip}</title></circle>'


def x_places(clients: Sequence[int], left: float, right: float) -> list[float]:
    """Doubling the clients is one step, wherever it starts; a single level stands in the middle."""
    if not clients:
        return []
    low, high = log2(min(clients)), log2(max(clients))
    if low == high:
        return [(left + right) / 2] * len(clients)
    return [left + (right - left) * (log2(each) - low) / (high - low) for each in clients]


def nice_top(highest: float) -> float:
    """The next of 1, 2, 4, 6, 8 times a power of ten: its quarters are short numbers."""
    power = 10.0**-9
    while power * 10 <= highest:
        power *= 10
    return next((step * power for step in (1, 2, 4, 6, 8) if step * power >= highest), 10 * power)


def _shown(ledger: Ledger) -> list[LedgerRow]:
    return [row for row in ledger.rows if row.planned_bytes or row.measured_bytes]


def _memory(ledger: Ledger) -> Iterator[str]:
    """Two bars of one scale, and their legend in two columns."""
    rows, top = _shown(ledger), PANEL_TOP + PANEL_HEIGHT + 116
    yield _text(PAD, top, f"memory: {ledger.device}", "ink title")
    planned = [row.planned_bytes or 0 for row in rows]
    measured = [row.measured_bytes or 0 for row in rows]
    scale = (WIDTH - 2 * PAD - 190) / max(sum(planned), sum(measured), 1)
    for number_, (name, sizes) in enumerate((("planned", planned), ("peak", measured))):
        y, x = top + 16 + number_ * (BAR_HEIGHT + 10), PAD + 72.0
        yield _text(PAD, y + 18, name, "soft")
        for index, size in enumerate(sizes):
            tip = escape(f"{rows[index].name}, {name}: {format_size(size)}")
            yield (
                f'<rect class="bar{index % COLOURS} edge" x="{x:.1f}" y="{y}" width="{size * scale:.1f}" '
                f'height="{BAR_HEIGHT}"><title>{tip}</title></rect>'
            )
            x += size * scale
        yield _text(x + 10, y + 18, format_size(sum(sizes)), "ink")
    yield from _legend(rows, top + 16 + 2 * (BAR_HEIGHT + 10) + 22)


def _legend(rows: Sequence[LedgerRow], top: float) -> Iterator[str]:
    half = (len(rows) + 1) // 2
    for index, row in enumerate(rows):
        x = PAD + 72 + (index // half) * (WIDTH - 2 * PAD - 72) / 2
        y = top + 22 * (index % half)
        place = f'x="{x:.1f}" y="{y - 11:.1f}" width="12" height="12"'
        yield f'<rect class="bar{index % COLOURS}" {place} rx="2"/>'
        yield _text(x + 20, y, row.name, "ink")
        sizes = f"{_size(row.planned_bytes)} → {_size(row.measured_bytes)}"
        yield _text(x + 380, y, sizes, "soft", "end")


def _size(nbytes: int | None) -> str:
    return "–" if nbytes is None else format_size(nbytes)


def _text(x: float, y: float, text: str, look: str, anchor: str = "start") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

"""A report as one SVG picture: the memory bar, its legend and the command. Nothing comes from outside."""

import re
from html import escape

from snugvl.core.sizes import format_size
from snugvl.planner.report.sections import MemoryRow, Report

WIDTH, PAD, BAR_TOP, BAR_HEIGHT, LINE = 960, 32, 128, 44, 26
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"
COMMAND_COLUMNS = 108


def svg(report: Report) -> str:
    """The picture."""
    command = wrapped((report.commands[-1] if report.commands else None) or "", COMMAND_COLUMNS)
    legend_top = BAR_TOP + BAR_HEIGHT + 44
    command_top = legend_top + LINE * len(report.rows) + 20
    height = command_top + 20 * len(command) + PAD
    # Bold letters are about 0.62 of their size wide.
    size = min(22, int((WIDTH - 2 * PAD) / (0.62 * max(len(report.headline), 1))))
    state = "takes" if report.fits else "would take"
    summary = f"{state} {format_size(report.used_bytes)} of {format_size(report.usable_bytes)}"
    kept = [value for label, value in report.facts if label in ("weights", "context", "images")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{FONT}" role="img">',
        f"<title>{escape(report.headline)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(PAD, 48, report.headline, size=size, weight=600),
        _text(PAD, 80, f"{summary} that may be used", size=14, colour="#4a5260"),
        _text(PAD, 104, " · ".join(kept), size=14, colour="#4a5260"),
        *_bar(report),
        *_legend(report.rows, legend_top),
        *[
            _text(PAD, command_top + 20 * number, line, size=13, family=MONO)
            for number, line in enumerate(command)
        ],
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def wrapped(command: str, columns: int) -> list[str]:
    """A command over several lines, each but the last ending in a backslash; cut before flags only, as a
    quoted value must stay whole."""
    lines: list[str] = []
    for word in re.split(r" (?=--)", command) if command else []:
        if lines and len(lines[-1]) + 1 + len(word) <= columns - 2:
            lines[-1] += " " + word
        else:
            lines.append(word if not lines else "  " + word)
    return [line + " \\" for line in lines[:-1]] + lines[-1:]


def _bar(report: Report) -> list[str]:
    total = max(sum(row.nbytes for row in report.rows), report.total_bytes, 1)
    scale, left, parts = (WIDTH - 2 * PAD) / total, float(PAD), []
    for row in report.rows:
        width = row.nbytes * scale
        tip = escape(f"{row.label}: {format_size(row.nbytes)}")
        parts.append(
            f'<rect x="{left:.1f}" y="{BAR_TOP}" width="{width:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{row.kind.fill}" stroke="#ffffff" stroke-width="1"><title>{tip}</title></rect>'
        )
        left += width
    edge = PAD + report.total_bytes * scale
    label = f"{format_size(report.total_bytes)} of the card"
    parts.append(
        f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{BAR_TOP - 6}" y2="{BAR_TOP + BAR_HEIGHT + 6}" '
        'stroke="#20262e" stroke-width="2"/>'
    )
    parts.append(_text(edge, BAR_TOP + BAR_HEIGHT + 22, label, size=13, colour="#4a5260", anchor="end"))
    return parts


def _legend(rows: tuple[MemoryRow, ...], top: int) -> list[str]:
    parts = []
    for number, row in enumerate(rows):
        y = top + LINE * number
        parts.append(
            f'<rect x="{PAD}" y="{y - 12}" width="14" height="14" rx="3" fill="{row.kind.fill}" '
            'stroke="#c3c9d2" stroke-width="0.5"/>'
        )
        parts.append(_text(PAD + 24, y, row.label, size=14))
        parts.append(_text(PAD + 340, y, format_size(row.nbytes), size=14, anchor="end"))
        parts.append(_text(PAD + 360, y, _short(row), size=13, colour="#4a5260"))
    return parts


def _short(row: MemoryRow) -> str:
    measured = f"measured {format_size(row.measured_bytes)}; " if row.measured_bytes is not None else ""
    text = measured + row.note
    return text if len(text) <= 78 else text[:77] + "…"


def _text(
    x: float, y: float, text: str, *, size: int, colour: str = "#20262e", weight: int = 400,
    anchor: str = "start", family: str = "",
) -> str:  # fmt: skip
    style = f' font-family="{family}"' if family else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{style} xml:space="preserve">{escape(text)}</text>'
    )

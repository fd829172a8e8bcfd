"""What `snugvl top` shows of one reading: pure, so that a frame can be tested without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from snugvl.cli.stderr import printable
from snugvl.core.memory_kinds import Kind, bar, marked
from snugvl.core.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from snugvl.client import Memory
    from snugvl.core.ledger import Ledger, LedgerRow

MOST_WIDTH: Final = 100
AROUND: Final = 6  # lines of a frame about the table: blank ones, the title, the bar, the table's head
KEPT: Final = (Kind.HELD, Kind.SPARE)
STATES: Final = {"ready": "green", "draining": "yellow", "starting": "yellow", "restarting": "yellow"}


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast it goes; None where nothing was generated since the last reading."""

    tokens_per_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """One reading, or none yet. `trouble`: why there is no newer one."""

    server: str
    memory: Memory | None
    pace: Throughput = Throughput()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class BarPart:
    """A piece of the bar, `nbytes` long, and a row of the table."""

    label: str
    kind: Kind
    nbytes: int
    planned_bytes: int | None = None
    measured_bytes: int | None = None


def parts(ledger: Ledger) -> list[BarPart]:
    """The whole device, piece by piece: the engine's components, what others hold, what is free."""
    pieces = [part for row in ledger.rows for part in _of_row(row)]
    known = sum(part.nbytes for part in pieces)
    if ledger.process_bytes > known:
        rest = ledger.process_bytes - known
        pieces.append(BarPart("not told apart", Kind.OTHER, rest, None, rest))
    others = ledger.others_bytes
    return [
        *pieces,
        BarPart(Kind.HELD.value, Kind.HELD, others, None, others),
        BarPart(Kind.SPARE.value, Kind.SPARE, ledger.free_bytes, None, ledger.free_bytes),
    ]


def _of_row(row: LedgerRow) -> Iterator[BarPart]:
    held = row.measured_bytes or 0
    if row.kind is not Kind.CACHE or row.used_bytes is None:
        yield BarPart(row.name, row.kind, held, row.planned_bytes, row.measured_bytes)
        return
    used = min(row.used_bytes, held)
    yield BarPart(row.name, Kind.UNUSED, held - used, row.planned_bytes, row.measured_bytes)
    yield BarPart("  in use", Kind.CACHE, used, None, used)


def frame(view: View, console: Console, height: int | None = None) -> RenderableType:
    """Everything, at most as wide as the console. With `height`, in at most so many lines: the smallest parts
    of the memory are then one."""
    from rich.console import Group
    from rich.text import Text

    width = min(console.width, MOST_WIDTH)
    colour = console.color_system is not None
    lines: list[RenderableType] = [_head(view)]
    if view.trouble:
        lines.append(Text(printable(view.trouble), "bold red"))
    if view.memory is None:
        return Group(*lines)
    lines += [_work(view, width), Text()]
    ledger = view.memory.ledger
    if ledger is None:
        return Group(*lines, Text("no memory to show before the engine was ready", "dim"))
    pieces = parts(ledger)
    above = sum(len(console.render_lines(line)) for line in lines)
    if height is not None:
        pieces = fewer(pieces, height - above - AROUND)
    title = f"{printable(ledger.device)}: {format_size(ledger.total_bytes)}"
    if ledger.cap_bytes is not None:
        title += f", the engine takes at most {format_size(ledger.cap_bytes)}"
    return Group(*lines, Text(title), _bar(pieces, width, colour), Text(), _table(pieces, ledger, colour))


def fewer(pieces: list[BarPart], most: int) -> list[BarPart]:
    """At most so many parts: of the engine's, the smallest are put together."""
    over = len(pieces) - max(most, len(KEPT) + 1)
    if over <= 0:
        return pieces
    ours = [piece for piece in pieces if piece.kind not in KEPT]
    small = sorted(ours, key=lambda piece: piece.nbytes)[: over + 1]
    planned = [piece.planned_bytes for piece in small if piece.planned_bytes is not None]
    nbytes = sum(piece.nbytes for piece in small)
    rest = BarPart(
        f"{len(small)} smaller parts", Kind.OTHER, nbytes, sum(planned) if planned else None, nbytes
    )
    found = [rest if piece is small[-1] else piece for piece in pieces]
    return [piece for piece in found if piece not in small]


def _head(view: View) -> Text:
    from rich.text import Text

    head = Text.assemble(("snugvl top  ", "bold"), view.server)
    if view.memory is not None and view.trouble is None:
        health = view.memory.health
        progress = f" {health.progress:.0%}" if health.progress is not None else ""
        head.append(f"  {health.state}{progress}", f"bold {STATES.get(health.state, 'red')}")
        if health.restarts:
            head.append(f"  restarted {health.restarts}×", "yellow")
        if not health.ready:
            head.append(f"\n{printable(health.detail)}", "yellow")
    return head


def _work(view: View, width: int) -> Text:
    """Requests, speed and the KV cache, on as many lines as they need; a name and its value stay together."""
    from rich.text import Text

    assert view.memory is not None
    load = view.memory.load
    held = load.num_blocks - load.free_blocks
    share = f"{held / load.num_blocks:.0%}" if load.num_blocks else "–"
    facts = [
        ("running", f"{load.running}"),
        ("waiting", f"{load.waiting}"),
        ("tokens/s", _number(view.pace.tokens_per_s, "{:.1f}")),
        ("first token", _number(view.pace.first_token_s, "{:.2f} s")),
        ("KV used", share),
    ]
    if load.num_blocks < load.planned_blocks:
        facts.append(("KV lent to other programs", f"{1 - load.num_blocks / load.planned_blocks:.0%}"))
    if load.encoder_queries:
        facts.append(("picture cache hits", f"{load.encoder_hits / load.encoder_queries:.0%}"))
    if load.drafted_tokens:
        right = load.accepted_tokens / load.drafted_tokens
        facts.append((f"drafts accepted ({load.draft_method})", f"{right:.0%}"))
    if load.shortages:
        facts.append(("out of memory", f"{load.shortages}"))
    if load.faults:
        facts.append(("faults", f"{load.faults}"))
    lines = [Text()]
    for name, value in facts:
        fact = Text.assemble((f"{name} ", "cyan"), (value, "bold"))
        if lines[-1] and lines[-1].cell_len + 3 + fact.cell_len > width:
            lines.append(Text())
        lines[-1].append_text(Text.assemble("   " if lines[-1] else "", fact))
    return Text("\n", style="dim" if view.trouble else "").join(lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _bar(pieces: Sequence[BarPart], width: int, colour: bool) -> Text:
    """The device as one line; every piece rounded so that the whole is exactly `width` cells."""
    from rich.text import Text

    return Text.assemble(*bar(((piece.kind, piece.nbytes) for piece in pieces), width, colour=colour))


def _table(pieces: Sequence[BarPart], ledger: Ledger, colour: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("planned", "measured", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for piece in pieces:
        entry = marked(piece.kind, printable(piece.label), colour=colour)
        held = piece.nbytes if piece.measured_bytes is None else piece.measured_bytes
        share = f"{held / ledger.total_bytes:.1%}" if ledger.total_bytes else ""
        table.add_row(entry, _size(piece.planned_bytes), _size(piece.measured_bytes), share)
    return table


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes)

"""Results for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snugvl.tasks.results import Answer, Caption, Detections, Scene


def words(result: Caption | Answer) -> str:
    """The text itself."""
    return result.text


def scene(result: Scene) -> str:
    """The summary, then a line for each part that has something."""
    lines = [result.summary] if result.summary else []
    if result.setting:
        lines.append(f"Setting: {result.setting}")
    for thing in result.objects:
        where = f" ({'; '.join(thing.positions)})" if thing.positions else ""
        lines.append(f"{thing.count} × {thing.name}{where}")
    if result.text:
        lines.append("Text: " + ", ".join(f"“{text}”" for text in result.text))
    lines.extend(f"- {relation}" for relation in result.relations)
    return "\n".join(lines) or "nothing described"


def detections(result: Detections, asked: Sequence[str] = ()) -> str:
    """A line per object: label, then x1 y1 x2 y2 in whole pixels; and one for each that was `asked` for and
    isn't there."""
    missing = [name for name in asked if not any(_same(name, thing.label) for thing in result.objects)]
    if not result.objects and len(missing) < 2:
        return f"nothing found: no {missing[0]}" if missing else "nothing found"
    width = max(len(name) for name in (*missing, *(thing.label for thing in result.objects)))
    rows = []
    for thing in result.objects:
        box = thing.box
        numbers = " ".join(f"{round(value):5d}" for value in (box.x1, box.y1, box.x2, box.y2))
        rows.append(f"{thing.label:<{width}} {numbers}")
    return "\n".join([*rows, *(f"{name:<{width}} not found" for name in missing)])


def _same(name: str, label: str) -> bool:
    """Whether a model's label is of what was asked for: it may write one more or less of it."""
    name, label = name.casefold(), label.casefold()
    return name in label or label in name

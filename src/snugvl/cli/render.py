"""Results for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def detections(result: Detections) -> str:
    """A line per object: label, then x1 y1 x2 y2 in whole pixels."""
    if not result.objects:
        return "nothing found"
    width = max(len(thing.label) for thing in result.objects)
    rows = []
    for thing in result.objects:
        box = thing.box
        numbers = " ".join(f"{round(value):5d}" for value in (box.x1, box.y1, box.x2, box.y2))
        rows.append(f"{thing.label:<{width}} {numbers}")
    return "\n".join(rows)

"""A diagnosis as plain text and as JSON."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import json
from dataclasses import asdict

from snugvl.diagnose.facts import GIB
from snugvl.diagnose.result import Budget, Change, Diagnosis
from snugvl.diagnose.stream import clean

WIDTH = 46


def to_json(diagnosis: Diagnosis) -> str:
    """One object; the schema is in docs/diagnose.md."""
    data = asdict(diagnosis)
    for cause, shown in zip(diagnosis.causes, data["causes"], strict=True):
        shown["title"] = cause.title
    return json.dumps(data, indent=2, ensure_ascii=True)


def to_text(diagnosis: Diagnosis) -> str:
    """For people: what ran, causes, budget, command."""
    sections = [_head(diagnosis), *_causes(diagnosis), _budget(diagnosis.budget), _command(diagnosis)]
    if diagnosis.advice:
        sections.append(diagnosis.advice)
    sections += diagnosis.notes
    return "\n\n".join(_safe(section) for section in sections if section) + "\n"


def _safe(section: str) -> str:
    return "\n".join(clean_line(line) for line in section.split("\n"))


def clean_line(line: str) -> str:
    """The line without control characters, its indentation kept."""
    return " " * (len(line) - len(line.lstrip(" "))) + clean(line)


def _head(diagnosis: Diagnosis) -> str:
    ran = " ".join(part for part in (diagnosis.engine, diagnosis.version) if part)
    facts = (ran, diagnosis.model, diagnosis.gpu, "WSL2" if diagnosis.wsl2 else None)
    understood = " · ".join(fact for fact in facts if fact)
    if diagnosis.causes:
        return understood or "engine unknown"
    if diagnosis.healthy:
        return f"{understood}\nNo failure found: the engine came up."
    if diagnosis.recognised:
        return f"{understood}\nNo failure found, and no sign that the engine came up either; the log may be cut off."
    known = f" Understood: {understood}." if understood else ""
    return f"Not recognised: none of the {diagnosis.lines:,} lines is known to snugvl.{known}"


def _causes(diagnosis: Diagnosis) -> list[str]:
    sections = []
    for number, cause in enumerate(diagnosis.causes, 1):
        lines = [f"Cause {number} ({cause.confidence}): {cause.title}", f"  {cause.explanation}"]
        lines += [f"  line {evidence.line}: {evidence.text}" for evidence in cause.evidence]
        sections.append("\n".join(lines))
    return sections


def _budget(budget: Budget) -> str:
    if not budget:
        return ""
    lines = ["Memory of this run, GiB"]
    for part in (*budget.frame, *budget.uses):
        where = f"{part.origin}, line {part.line}" if part.line else part.origin
        lines.append(_row(part.name, part.nbytes, where))
    if budget.needed_bytes is not None:
        lines.append(_row("asked for", budget.needed_bytes, ""))
    if budget.remainder_bytes is not None:
        lines.append(_row("remains", budget.remainder_bytes, "computed"))
    if budget.note:
        lines.append(f"  {budget.note}")
    return "\n".join(lines)


def _row(name: str, nbytes: int, where: str) -> str:
    return f"  {name:<{WIDTH}}{nbytes / GIB:8.2f}  {where}".rstrip()


def _command(diagnosis: Diagnosis) -> str:
    if not diagnosis.changes:
        return ""
    lines = ["Changed command", f"  {diagnosis.command}"] if diagnosis.command else ["Flags to change"]
    lines += [f"  {_change(change)}" for change in diagnosis.changes]
    return "\n".join(lines)


def _change(change: Change) -> str:
    joint = " " if change.flag.startswith("-") else "="
    if change.new is None:
        return f"remove {change.flag}: {change.why}"
    text = f"{change.flag}{joint}{change.new}" if change.new else change.flag
    return f"{text}: {change.why}" + (f" (was {change.old})" if change.old else "")

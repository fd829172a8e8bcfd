"""The result of a diagnosis: causes with evidence, the run's budget, the changed command. Sizes: bytes."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from snugvl.core.sizes import GIB

SHOWN_BYTES: Final = GIB // 200  # of two decimals
NAME_WIDTH: Final = 46  # characters of a row of the budget

Kind = Literal[
    "vision_profile", "context", "utilisation_over_free", "utilisation_low", "tenants",
    "profiling_disturbed", "cuda_graphs", "batch", "uva", "fp8_kernels", "dtype", "tied_head", "weights",
    "fragmentation", "encoder_cache", "image_buffer", "prompt_too_long", "too_many_images", "spill",
    "residency", "cpu_offload", "unknown_flag", "removed_switch", "port", "model_access", "architecture",
    "driver", "host_killed", "host_memory", "shared_memory", "out_of_memory", "settings", "serving_memory",
    "vision_weights", "compiler", "no_kernel", "checkpoint", "packages", "communication", "forked_cuda",
    "compute_buffer", "projector", "disk_full", "exception",
]  # fmt: skip
Confidence = Literal["certain", "likely", "possible"]
Origin = Literal["measured", "computed", "inferred"]
Engine = Literal["vllm", "ollama", "llama.cpp", "transformers", "pytorch"]


@cache
def known() -> Mapping[str, Any]:
    """The tables of `known.toml` by name; the file explains each."""
    return tomllib.loads(files("snugvl.diagnose").joinpath("known.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of the log, counted from 1, cleaned of control characters and shortened."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of the failure. `explanation` is whole sentences with this run's numbers."""

    kind: Kind
    confidence: Confidence
    explanation: str
    evidence: tuple[Evidence, ...]

    @property
    def title(self) -> str:
        """The kind in words."""
        title: str = known()["titles"][self.kind]
        return title


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A line of the budget. Measured: a figure of the log; computed: a formula of such; inferred: assumed."""

    name: str
    nbytes: int
    origin: Origin
    line: int | None = None


@dataclass(frozen=True, slots=True)
class RunBudget:
    """The memory budget of a run.

    Attributes:
        frame: memory at hand: total, free, ceiling.
        uses: parts that it was used for; together at most the ceiling.
        remainder_bytes: ceiling − uses; None where the log does not say enough. Negative: over the ceiling.
        needed_bytes: bytes that the run asked for in vain, such as its KV cache; None: not said.
        note: a sentence on what is unknown, or "".
        needed_name: the purpose of `needed_bytes`.
    """

    frame: tuple[MemoryPart, ...] = ()
    uses: tuple[MemoryPart, ...] = ()
    remainder_bytes: int | None = None
    needed_bytes: int | None = None
    note: str = ""
    needed_name: str = "asked for last, and refused"

    def __bool__(self) -> bool:
        return bool(self.frame or self.uses or self.needed_bytes)


@dataclass(frozen=True, slots=True)
class Change:
    """One change. `flag` with `new` None: remove it. Flags without dashes are environment variables."""

    flag: str
    old: str | None
    new: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a log.

    Attributes:
        recognised: False if no line of the log is known.
        healthy: whether the engine came up and no failure was found.
        starts: number of starts in the log; only the last is diagnosed.
        command: the changed command, safe to paste, or None without one in the log.
        changes: the changes of the command, or flags to add.
        advice: the engine's own advice, and whether it is right here.
        notes: sentences on all else that was understood, and on what to run.
    """

    recognised: bool
    healthy: bool
    engine: Engine | None
    version: str | None
    model: str | None
    gpu: str | None
    wsl2: bool
    starts: int
    lines: int
    causes: tuple[Cause, ...] = ()
    budget: RunBudget = field(default_factory=RunBudget)
    command: str | None = None
    changes: tuple[Change, ...] = ()
    advice: str = ""
    notes: tuple[str, ...] = ()


def clean(text: str) -> str:
    """The text without characters that move a cursor, ring, hide or reorder text on a terminal."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " if char in "\t\r\n" else "" for char in text)
    return text.strip()


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as a JSON object; the schema is in docs/diagnose.md."""
    data = asdict(diagnosis)
    for cause, shown in zip(diagnosis.causes, data["causes"], strict=True):
        shown["title"] = cause.title
    return json.dumps(data, indent=2, ensure_ascii=True)


def to_text(diagnosis: Diagnosis) -> str:
    """The diagnosis as text for people: what ran, causes, budget, command."""
    sections = [_head(diagnosis), *_causes(diagnosis), _budget(diagnosis.budget), _command(diagnosis)]
    if diagnosis.advice:
        sections.append(diagnosis.advice)
    sections += diagnosis.notes
    return "\n\n".join(_safe(section) for section in sections if section) + "\n"


def _safe(section: str) -> str:
    """The section without control characters, its lines' indentation kept."""
    lines = section.split("\n")
    return "\n".join(" " * (len(line) - len(line.lstrip(" "))) + clean(line) for line in lines)


def _head(diagnosis: Diagnosis) -> str:
    ran = " ".join(part for part in (diagnosis.engine, diagnosis.version) if part)
    facts = (ran, diagnosis.model, diagnosis.gpu, "WSL2" if diagnosis.wsl2 else None)
    understood = " · ".join(fact for fact in facts if fact)
    if diagnosis.causes:
        return understood or "engine unknown"
    if diagnosis.healthy:
        return f"{understood}\nNo failure found: the engine came up."
    if diagnosis.recognised:
        return f"{understood}\nNo failure found, and no sign that the engine came up; the log may be cut off."
    known = f" Understood: {understood}." if understood else ""
    return f"Not recognised: snugvl knows no line of this log, of {diagnosis.lines:,} in all.{known}"


def _causes(diagnosis: Diagnosis) -> list[str]:
    sections = []
    for number, cause in enumerate(diagnosis.causes, 1):
        lines = [f"Cause {number} ({cause.confidence}): {cause.title}", f"  {cause.explanation}"]
        lines += [f"  line {evidence.line}: {evidence.text}" for evidence in cause.evidence]
        sections.append("\n".join(lines))
    return sections


def _budget(budget: RunBudget) -> str:
    if not budget:
        return ""
    lines = ["Memory of this run, GiB"]
    for part in (*budget.frame, *budget.uses):
        where = f"{part.origin}, line {part.line}" if part.line else part.origin
        lines.append(_row(part.name, part.nbytes, where))
    if budget.needed_bytes is not None:
        lines.append(_row(budget.needed_name, budget.needed_bytes, ""))
    rest = budget.remainder_bytes
    if rest is not None and abs(rest) >= SHOWN_BYTES:
        lines.append(_row("not accounted for" if rest > 0 else "more than there was", abs(rest), "computed"))
    if budget.note:
        lines.append(f"  {budget.note}")
    return "\n".join(lines)


def _row(name: str, nbytes: int, where: str) -> str:
    shown = round(nbytes / GIB, 2) + 0.0  # no "-0.00"
    return f"  {name:<{NAME_WIDTH}}{shown:8.2f}  {where}".rstrip()


def _command(diagnosis: Diagnosis) -> str:
    if not diagnosis.changes:
        return ""
    variables = not any(change.flag.startswith("-") for change in diagnosis.changes)
    title = "Environment variables to set" if variables else "Flags to change"
    lines = ["Changed command", f"  {diagnosis.command}"] if diagnosis.command else [title]
    lines += [f"  {_change(change)}" for change in diagnosis.changes]
    return "\n".join(lines)


def _change(change: Change) -> str:
    joint = " " if change.flag.startswith("-") else "="
    if change.new is None:
        return f"remove {change.flag} ({change.why})"
    text = f"{change.flag}{joint}{change.new}" if change.new else change.flag
    return f"{text} ({change.why}{f'; was {change.old}' if change.old else ''})"

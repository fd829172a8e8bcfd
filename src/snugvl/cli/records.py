"""JSON Lines: one record per image, written as soon as it is done, and read again to resume.

    {"image": "a.png", "task": "ask", "model": "pocket", "params": {"question": "…"},
     "result": {…}, "usage": {"prompt_tokens": 210, "completion_tokens": 9, "image_tokens": 196},
     "seconds": 0.41}
    {"image": "b.png", "task": "ask", "model": "pocket", "params": {"question": "…"},
     "error": {"type": "ImageError", "message": "…"}}

`result` is the task's result as in `snugvl.tasks.results`, without its usage.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snugvl.cli.task import Job, Outcome, Task
from snugvl.errors import InputError, OutputError

_SAME = ("task", "model", "params")


def record(outcome: Outcome, task: Task, model: str) -> dict[str, Any]:
    """The record of an outcome."""
    head = {"image": outcome.job.image, "task": task.name, "model": model, "params": task.params}
    if outcome.result is None:
        return head | {"error": _error(outcome.error)}
    usage = outcome.result.usage
    return head | {
        "result": outcome.result.model_dump(mode="json", exclude={"usage"}),
        "usage": asdict(usage) if usage else None,
        "seconds": round(outcome.seconds, 3),
    }


def encode(value: dict[str, Any]) -> str:
    """One line. Non-ASCII text stays readable, except where a file name isn't text at all."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text + "\n"


def _error(error: Exception | None) -> dict[str, str]:
    fields = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OutputError):
        fields["text"] = error.text
    return fields


def check_new(path: Path) -> None:
    """Raises InputError where a file would be lost."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; --output takes a file")
    if path.exists() and path.stat().st_size:
        raise InputError(f"{path} exists; continue it with --resume, or remove it")


def results_in(path: Path, task: Task, model: str) -> list[dict[str, Any]]:
    """The records with a result in the file of an earlier run; none where it doesn't exist.

    Records of failures are left out, so those images are tried again, and so is a last line that was torn
    when the run ended.

    Raises:
        InputError: not such a file, or one of another task, model or question.
    """
    if not path.exists():
        return []
    try:
        *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; --output takes a file") from None
    kept = []
    for number, line in enumerate([*lines, torn], 1):
        value = _decoded(line)
        last = number >= len(lines)
        if value is None and (last or not line.strip()):
            continue
        if value is None or "image" not in value or not set(_SAME) <= value.keys():
            raise InputError(f"{path}, line {number} is not a record of snugvl; --resume can't continue it")
        _check_same(value, {"task": task.name, "model": model, "params": task.params}, path, number)
        if "result" in value:
            kept.append(value)
    return kept


def rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file by `records`, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text("".join(map(encode, records)), encoding="utf-8")
    draft.replace(path)


def remaining(jobs: Sequence[Job], records: list[dict[str, Any]]) -> list[Job]:
    """The jobs that `records` has no result of."""
    have = {json.dumps(each["image"]) for each in records}
    return [job for job in jobs if json.dumps(job.image) not in have]


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _check_same(value: dict[str, Any], wanted: dict[str, Any], path: Path, number: int) -> None:
    for key, mine in wanted.items():
        if value[key] != mine:
            raise InputError(
                f"{path}, line {number} has {key} {json.dumps(value[key], ensure_ascii=False)}, not "
                f"{json.dumps(mine, ensure_ascii=False)}; --resume continues the same work only"
            )

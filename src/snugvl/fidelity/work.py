"""Results of a comparison so far: in host memory, or in a folder from which it can go on.

FILE.partial/comparison.json     what is compared; only the same goes on
             NAME.jsonl          records, each written as soon as there is one
             NAME.safetensors    tensors, each file whole or not at all

`Clock` estimates how long it will take, from the bytes that are still to be read: nearly all the time goes
into reading weights and computing beside that. The rate is measured at the start, on one layer's way from the
disk to the device, and then on what was read. Answering is taken to last as long for the next variant as for
the last.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from snugvl.core.folders import json_object, read_small, write_whole
from snugvl.errors import InputError

FORMAT = 1  # of what is in the folder
MAX_RECORD_BYTES: Final = 1 << 20  # of what is compared


def folder_of(output: Path) -> Path:
    """The folder in which the work for `output` is kept meanwhile."""
    return output.with_name(f"{output.name}.partial")


class Work:
    """Records and tensors by name."""

    def __init__(self, folder: Path | None, what: Mapping[str, Any], *, resume: bool = False) -> None:
        """
        Args:
            folder: None keeps all in host memory.
            what: description of the comparison, as JSON values.
            resume: whether to go on with the folder's content; else it must not be there.

        Raises:
            InputError: the folder is there already, or of another comparison.
        """
        self._folder = folder
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        if folder is None:
            return
        mark = folder / "comparison.json"
        wanted = json.loads(json.dumps({"format": FORMAT, **what}))
        if folder.exists() and not resume:
            raise InputError(f"{folder} is an unfinished comparison; go on with --resume, or remove it")
        if mark.exists():
            _check_same(_read(mark), wanted, mark)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(mark, lambda draft: draft.write_text(json.dumps(wanted, indent=1) + "\n", "utf-8"))

    def records(self, name: str) -> list[dict[str, Any]]:
        """All records of that name; one that was torn when the work ended is left out."""
        if self._folder is None:
            return self._records.setdefault(name, [])
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        found = [json_object(line) for line in path.read_text("utf-8", "replace").splitlines()]
        return [each for each in found if each is not None]

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Add a record."""
        if self._folder is None:
            self._records.setdefault(name, []).append(record)
            return
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(("\n" if _torn(file.name) else "") + json.dumps(record) + "\n")

    def has(self, name: str) -> bool:
        """Whether there are tensors of that name; not in a file that a crash of the machine left damaged."""
        if self._folder is None:
            return name in self._tensors
        try:
            with safe_open(self._folder / f"{name}.safetensors", "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were put under a name."""
        if self._folder is None:
            return self._tensors[name]
        return load_file(self._folder / f"{name}.safetensors")

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors of the host."""
        if self._folder is None:
            self._tensors[name] = dict(tensors)
            return
        whole = {key: value.contiguous() for key, value in tensors.items()}
        write_whole(self._folder / f"{name}.safetensors", lambda draft: save_file(whole, draft))

    def remove(self) -> None:
        """Remove the folder, as all is done."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _torn(path: str) -> bool:
    """Whether a file's last line lacks its line break."""
    with Path(path).open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read(path: Path) -> dict[str, Any]:
    value = json_object(read_small(path, MAX_RECORD_BYTES))
    if value is None:
        raise InputError(f"{path} is not a record of a comparison; remove {path.parent}")
    return value


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key in {**wanted, **found}:
        if found.get(key) != wanted.get(key):
            before, now = (json.dumps(each.get(key), ensure_ascii=False)[:120] for each in (found, wanted))
            raise InputError(
                f"{path} has {key} {before}, not {now}; --resume continues the same comparison only"
            )


Tell = Callable[[str, str, float, float | None], None]
"""Told the stage, what of it is done, how much of all is done (0 to 1), and seconds left, where known."""

EVERY_S: Final = 0.2  # between two reports


@dataclass(slots=True)
class _Stage:
    nbytes: int
    done: int = 0
    answers: int = 0


class Clock:
    """Estimates the time that remaining stages take. Not thread-safe. `seconds`: since it was made."""

    def __init__(self, stages: Mapping[str, int], tell: Tell) -> None:
        """`stages`: bytes that each stage reads at most, by name."""
        self._stages = {name: _Stage(nbytes) for name, nbytes in stages.items()}
        self._tell = tell
        self._rate: float | None = None  # bytes a second, as measured first
        self._read, self._reading_s = 0, 0.0
        self._answers, self._answering_s = 0, 0.0
        self._stage: _Stage | None = None
        self._text, self._detail = "", ""
        self._began = self._since = time.monotonic()
        self._told = -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._began

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note the rate of the first bytes: `nbytes` in `seconds`."""
        self._rate = nbytes / max(seconds, 1e-6)

    def begin(self, name: str, text: str, answers: int = 0) -> None:
        """Begin a stage, which reads first; `answers`: number of answers that it makes then."""
        self._stage = self._stages.setdefault(name, _Stage(0))
        self._stage.answers = answers
        self._text, self._detail, self._since = text, "", time.monotonic()
        self._report(at_once=True)

    def read(self, nbytes: int) -> None:
        """Note `nbytes` more bytes read; before the first stage they aren't counted."""
        if self._stage is None:
            return
        now = time.monotonic()
        self._stage.done += nbytes
        self._read += nbytes
        self._reading_s += now - self._since
        self._since = now
        self._report()

    def answered(self, detail: str) -> None:
        """Note one more answer."""
        assert self._stage is not None, "a stage has begun"
        now = time.monotonic()
        self._answers += 1
        self._stage.answers -= 1
        self._answering_s += now - self._since
        self._since, self._detail = now, detail
        self._report()

    def end(self, name: str) -> None:
        """End a stage, also one that was found done."""
        stage = self._stages.setdefault(name, _Stage(0))
        stage.nbytes, stage.answers = stage.done, 0

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end; None where nothing was measured yet."""
        left = sum(max(stage.nbytes - stage.done, 0) for stage in self._stages.values())
        rate = self._read / self._reading_s if self._read and self._reading_s > 1 else self._rate
        if rate is None:
            return None
        answers = sum(stage.answers for stage in self._stages.values())
        each = self._answering_s / self._answers if self._answers else 0.0
        return left / rate + answers * each

    def _report(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self._told < EVERY_S:
            return
        self._told = now
        total = sum(stage.nbytes for stage in self._stages.values())
        done = sum(stage.done for stage in self._stages.values())
        self._tell(self._text, self._detail, min(done / total, 1.0) if total else 0.0, self.left_s)

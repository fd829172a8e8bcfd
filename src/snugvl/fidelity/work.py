"""What a comparison has found out so far: in main memory, or in a folder from which it can go on.

FILE.partial/comparison.json     what is compared; only the same goes on
             NAME.jsonl          records, each written as soon as there is one
             NAME.safetensors    tensors, each file whole or not at all
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from snugvl.errors import InputError

FORMAT = 1  # of what is in the folder


def folder_of(output: Path) -> Path:
    """Where the work that becomes `output` is kept meanwhile."""
    return output.with_name(f"{output.name}.partial")


class Work:
    """Records and tensors by name."""

    def __init__(self, folder: Path | None, what: Mapping[str, Any], *, resume: bool = False) -> None:
        """
        Args:
            folder: None keeps all in main memory.
            what: is compared, as values of JSON.
            resume: go on with what the folder has; else it must not be there.

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
        _write(mark, json.dumps(wanted, indent=1) + "\n")

    def records(self, name: str) -> list[dict[str, Any]]:
        """All records of that name; one that was torn when the work ended is left out."""
        if self._folder is None:
            return self._records.setdefault(name, [])
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        found = [_decoded(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [each for each in found if each is not None]

    def add(self, name: str, record: dict[str, Any]) -> None:
        """One more record."""
        if self._folder is None:
            self._records.setdefault(name, []).append(record)
            return
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(("\n" if _torn(file.name) else "") + json.dumps(record) + "\n")

    def has(self, name: str) -> bool:
        """Whether there are tensors of that name."""
        return (
            name in self._tensors if self._folder is None else (self._folder / f"{name}.safetensors").exists()
        )

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
        draft = self._folder / f".{name}.{os.getpid()}.tmp"
        save_file({key: value.contiguous() for key, value in tensors.items()}, draft)
        draft.replace(self._folder / f"{name}.safetensors")

    def remove(self) -> None:
        """It is all done."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _torn(path: str) -> bool:
    """Whether a file's last line has no end."""
    with Path(path).open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _read(path: Path) -> dict[str, Any]:
    value = _decoded(path.read_text(encoding="utf-8", errors="replace"))
    if value is None:
        raise InputError(f"{path} is no record of a comparison; remove {path.parent}")
    return value


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key in {**wanted, **found}:
        if found.get(key) != wanted.get(key):
            before, now = (json.dumps(each.get(key), ensure_ascii=False)[:120] for each in (found, wanted))
            raise InputError(
                f"{path} has {key} {before}, not {now}; --resume continues the same comparison only"
            )

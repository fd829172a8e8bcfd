"""Headers read from the Hub, kept by commit, so that a plan works offline afterwards.

headers/OWNER--NAME/refs.json      branch or tag → [commit, when it was asked, seconds since 1970]
headers/OWNER--NAME/COMMIT.json    configuration and tensors
"""

import json
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from snugvl.checkpoint.assemble import Material, Stored

FRESH_SECONDS = 24 * 3600  # a branch may move: after a day the Hub is asked again, if there is a network
_COMMIT = re.compile(r"[0-9a-f]{40}")


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/snugvl/headers`, `%LOCALAPPDATA%` on Windows, else below `~/.cache`."""
    chosen = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return Path(chosen or "~/.cache").expanduser() / "snugvl" / "headers"


class HeaderCache:
    """What was read of repositories. A broken file counts as none; one that can't be written is left out."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_cache() if folder is None else folder

    def get(self, repo: str, revision: str | None, *, stale: bool) -> Material | None:
        """What is known of `revision`. `stale`: also if its branch was last asked for more than a day ago."""
        revision = revision or "main"
        commit: Any = revision
        if not _COMMIT.fullmatch(revision):
            commit, asked = self._refs(repo).get(revision, (None, 0.0))
            if not stale and not 0 <= time.time() - asked < FRESH_SECONDS:
                return None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            return None
        return self._load(repo, commit)

    def put(self, repo: str, revision: str | None, material: Material) -> None:
        """Keep `material` under its commit, and the commit under its branch."""
        if material.revision is None or not _COMMIT.fullmatch(material.revision):
            return
        values = {
            "config": material.config,
            "images": material.images,
            "tensors": material.tensors,
            "download_bytes": material.download_bytes,
        }
        refs = self._refs(repo) | {revision or "main": (material.revision, time.time())}
        with suppress(OSError):
            _write(self._place(repo) / f"{material.revision}.json", values)
            _write(self._place(repo) / "refs.json", refs)

    def _place(self, repo: str) -> Path:
        return self.folder / repo.replace("/", "--")

    def _refs(self, repo: str) -> dict[str, tuple[Any, float]]:
        try:
            values = json.loads((self._place(repo) / "refs.json").read_text(encoding="utf-8"))
            return {str(name): (commit, float(asked)) for name, (commit, asked) in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _load(self, repo: str, commit: str) -> Material | None:
        try:
            values = json.loads((self._place(repo) / f"{commit}.json").read_text(encoding="utf-8"))
            tensors = tuple(
                Stored(str(name), str(dtype), tuple(map(int, shape)), int(nbytes))
                for name, dtype, shape, nbytes in values["tensors"]
            )
            material = Material(
                repo,
                "hub",
                commit,
                values["config"],
                values["images"],
                tensors,
                int(values["download_bytes"]),
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        right = isinstance(material.config, dict) and isinstance(material.images, dict | None) and tensors
        return replace(material, tensors=tensors) if right else None


def _write(path: Path, value: object) -> None:
    """Write JSON whole or not at all, also when two processes write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

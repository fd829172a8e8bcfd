"""A stand-in Hub, and nothing of this machine's own caches or tokens."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hub_server import FakeHub, serve


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty stand-in Hub; caches are below tmp_path, no token is known."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def write_header(path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]], fill: bytes = b"") -> Path:
    """A safetensors file of these tensors; sparse, unless `fill` is repeated as its data."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if fill:
            file.write((fill * (end // len(fill) + 1))[:end])
        else:
            file.truncate(8 + len(raw) + end)
    return path

"""Files are read ahead while a first start waits for its kernels, as far as host memory is free."""

from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from snugvl.backends.native import loading
from snugvl.backends.native.loading import _cache_files, _read_ahead
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.models.tensor_files import CHUNK_BYTES

LONG_S = 30.0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Event]:
    """What is read of which folder, and what is set once that has begun."""
    begun: list[Any] = []
    event = Event()

    def cache(files: Iterable[Path], most: int, done: Event) -> int:
        begun.append((list(files), most, done))
        event.set()
        return 0

    def tensors(folder: Path) -> dict[str, TensorEntry]:
        places = [("a", "1"), ("b", "1"), ("c", "2")]
        return {name: TensorEntry(name, "BF16", (1,), folder / file, 0, 2) for name, file in places}

    monkeypatch.setattr(loading, "_cache_files", cache)
    monkeypatch.setattr(loading, "read_weights", tensors)
    return begun, event


def test_while_kernels_are_waited_for(
    read: tuple[list[Any], Event], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, event = read
    monkeypatch.setattr(loading, "AHEAD_S", 0.0)
    with _read_ahead(tmp_path):
        assert event.wait(LONG_S)
        (files, most, done) = begun[0]
        assert files == [tmp_path / "1", tmp_path / "2"], "each once"
        assert most <= loading.host.memory().total_bytes - loading.KEPT_BYTES
        assert not done.is_set()
    assert done.is_set(), "weights are read now"


def test_not_where_nothing_is_waited_for(read: tuple[list[Any], Event], tmp_path: Path) -> None:
    with _read_ahead(tmp_path):
        pass
    assert not read[1].wait(0.2)


def test_no_more_than_there_is_memory_for(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + 5
    files = [tmp_path / "1", tmp_path / "2"]
    for file in files:
        file.write_bytes(bytes(size))
    assert _cache_files(files, 1 << 40, Event()) == 2 * size
    assert _cache_files(files, size + 1, Event()) == size + CHUNK_BYTES
    assert _cache_files(files, -1, Event()) == 0
    done = Event()
    done.set()
    assert _cache_files(files, 1 << 40, done) == 0

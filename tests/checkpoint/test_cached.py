"""Which models the Hub cache has, and how large they are; `tests/cli/test_models.py`: how they go."""

from pathlib import Path

import pytest

from snugvl.checkpoint.cached import cached

MIB = 2**20


def test_downloads_with_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("models--Qwen--small", 1), ("models--Qwen--Qwen3-VL-4B", 3), ("datasets--x--y", 9)):
        blobs = tmp_path / name / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "a").write_bytes(bytes(size * MIB))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert [(each.name, each.nbytes) for each in cached()] == [
        ("Qwen/Qwen3-VL-4B", 3 * MIB),
        ("Qwen/small", MIB),
    ]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert cached() == []

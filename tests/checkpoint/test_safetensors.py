"""Headers: read exactly, and every lie in them is found before a byte is trusted."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from snugvl.checkpoint.safetensors import read_header, read_tensors, weight_files
from snugvl.errors import CheckpointError, SnugvlError, UnsupportedModel
from tests.draws import draws


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_entries_equal_the_official_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.ones(3, 5).to(torch.float8_e4m3fn),
    }
    save_file(state, path, metadata={"format": "pt"})
    entries = read_header(path)
    raw = path.read_bytes()
    with safe_open(path, "pt") as official:
        assert set(entries) == set(official.keys())
    for name, entry in entries.items():
        data = raw[entry.offset : entry.offset + entry.nbytes]
        assert data == state[name].flatten().view(torch.uint8).numpy().tobytes()
        assert entry.shape == tuple(state[name].shape)
        assert entry.numel == state[name].numel()


ONE = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": ONE["w"] | changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "corrupt header"),
        (b"[1, 2]", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "corrupt header"),
        ({"w": 3}, b"", "tensor 'w' has a corrupt header entry"),
        (entry(shape=[-2]), b"x" * 8, "expected whole numbers"),
        (entry(shape=["2"]), b"x" * 8, "expected whole numbers"),
        (entry(data_offsets=[0]), b"x" * 8, "expected whole numbers"),
        (entry(data_offsets=[0, 4]), b"x" * 8, "needs 8 bytes, its header gives it 4"),
        (entry(shape=[2**58], data_offsets=[0, 2**60]), b"x" * 8, "truncated"),
        (ONE, b"x" * 7, "truncated"),
    ],
)
def test_a_lying_header_is_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_an_unknown_dtype_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="F4"):
        read_header(write(tmp_path / "x.safetensors", entry(dtype="F4"), b"x" * 8))


@pytest.mark.parametrize("raw", [b"", b"\x08\x00\x00", struct.pack("<Q", 2**60) + b"{}"])
def test_a_file_too_short_for_its_header_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n",
            "is a Git LFS pointer, not the file",
        ),
        (
            b"<!DOCTYPE html><html><title>Sign in</title></html>",
            "is a web page, saved under the model's name",
        ),
    ],
)
def test_what_is_no_weights_file_is_named(raw: bytes, words: str, tmp_path: Path) -> None:
    """An LFS pointer once "announced a header of 2,336,927,755,350,992,246 bytes"."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


@draws(200)
@given(raw=st.binary(max_size=200))
def test_random_bytes_never_escape_as_another_exception(
    raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with contextlib.suppress(SnugvlError):
        read_header(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", ONE, b"x" * 8)
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'w' is also in a\.safetensors"):
        read_tensors(tmp_path)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights \(model\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"has model-q4\.gguf"):
        weight_files(tmp_path)

"""GGUF headers: read as llama.cpp's own reader reads them, piece by piece, and every lie in them is found."""

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.checkpoint.gguf import TYPES, Items, parse_gguf, read_gguf
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, SnugvlError, UnsupportedModel
from tests.checkpoint.gguf_samples import model, of_layers, tower
from tests.draws import draws


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return model(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def parsed(data: bytes, size: int | None = None) -> Any:
    return parse_gguf("m.gguf", len(data) if size is None else size, lambda at, count: data[at : at + count])


def test_headers_equal_the_official_reader(tmp_path: Path) -> None:
    path = model(tmp_path / "model.gguf", attention__sliding_window=7, rope__dimension_sections=[1, 2, 3])
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert [(each.name, each.dtype, each.nbytes) for each in mine.tensors] == [
        (each.name, each.tensor_type.name, each.n_bytes) for each in theirs.tensors
    ]
    assert [each.shape for each in mine.tensors] == [
        tuple(reversed(each.shape.tolist())) for each in theirs.tensors
    ]
    for key, value in mine.values.items():
        field = theirs.fields[key]
        assert value == (len(field.data) if isinstance(value, Items) else field.contents()), key
    assert mine.values["llama.rope.dimension_sections"] == [1, 2, 3]


def test_types_are_those_of_the_official_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    newest = {40, 41} - theirs.keys()  # the oldest package that we take, 0.18, doesn't know these yet
    assert dict(TYPES) == {number: TYPES[number] if number in newest else theirs[number] for number in TYPES}


def test_no_more_is_read_than_the_header_needs(whole: bytes) -> None:
    asked: list[tuple[int, int]] = []

    def read(at: int, count: int) -> bytes:
        asked.append((at, count))
        return (whole + bytes(9 << 20))[at : at + count]

    parse_gguf("m.gguf", len(whole) + (9 << 20), read)
    assert asked == [(0, 1 << 20)]


@pytest.mark.parametrize(
    ("at", "data", "error", "message"),
    [
        (0, b"GGML", CheckpointError, "not a GGUF file: it begins with b'GGML'"),
        (4, struct.pack(">I", 3), UnsupportedModel, "for big-endian machines"),
        (4, struct.pack("<I", 1), UnsupportedModel, "of version 1; versions 2 and 3 are read"),
        (8, struct.pack("<Q", 2**60), CheckpointError, "tensors"),
        (16, struct.pack("<Q", 2**60), CheckpointError, "keys; 16,384 are read at most"),
        (24, struct.pack("<Q", 2**60), CheckpointError, "a length of 1,152,921,504,606,846,976 at byte 24"),
    ],
)
def test_what_the_first_bytes_may_say(
    whole: bytes, at: int, data: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parsed(whole[:at] + data + whole[at + len(data) :])


def changed(whole: bytes, name: bytes, skip: int, form: str, *values: int) -> bytes:
    """With other numbers, `skip` bytes behind a name."""
    at = whole.index(name) + len(name) + skip
    return whole[:at] + struct.pack(form, *values) + whole[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("name", "skip", "form", "values", "message"),
    [
        (b"token_embd.weight", 0, "<I", (9,), "tensor token_embd.weight has 9 dimensions"),
        (b"token_embd.weight", 4, "<QQ", (32, 2**61), "which no file can hold"),
        (b"token_embd.weight", 4, "<QQ", (33, 64), "rows of 33 values; Q8_0 has blocks of 32"),
        (b"token_embd.weight", 20, "<I", (99,), "of type 99, which snugvl doesn't know"),
        (b"blk.0.attn_q.weight", 24, "<Q", (0,), "share bytes"),
        (b"blk.0.attn_norm.weight", 16, "<Q", (2**40,), "ends at byte"),
        (b"tokenizer.ggml.tokens", 8, "<Q", (2**40,), "a length of 1,099,511,627,776"),
        (b"tokenizer.ggml.tokens", 16, "<Q", (2**40,), "a string of 1,099,511,627,776 bytes"),
        (b"llama.block_count", 0, "<I", (77,), "'llama.block_count' is of type 77"),
    ],
)
def test_what_entries_may_say(
    whole: bytes, name: bytes, skip: int, form: str, values: tuple[int, ...], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(changed(whole, name, skip, form, *values))


def test_a_key_stands_once() -> None:
    pair = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)
    with pytest.raises(CheckpointError, match="'k' is in it twice"):
        parsed(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * pair)


def test_arrays_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path / "m.gguf", rope__dimension_sections=[1, 2, 3])  # beside 64 tokens
    monkeypatch.setattr("snugvl.checkpoint.gguf.MAX_ITEMS", 66)
    with pytest.raises(CheckpointError, match="its arrays have over 66 items"):
        read_gguf(path)


@draws(60)
@given(st.data())
def test_a_broken_file_is_one_line(whole: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(whole) - 1))
    at = data.draw(st.integers(0, max(end - 1, 0)))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    broken = (whole[:at] + noise + whole[at + len(noise) :])[:end]
    with pytest.raises(SnugvlError):
        parsed(broken)


def test_facts_of_a_file(tmp_path: Path) -> None:
    path = model(tmp_path / "model-Q8_0.gguf")
    facts = facts_of(str(path))
    assert (facts.family, facts.tied, facts.native, facts.source) == ("llama", True, False, "file")
    assert facts.gguf is not None
    assert (facts.gguf.file_type, facts.quantization) == ("Q8_0", "int8")
    assert facts.text.vocab_size == 64
    (layer,) = facts.text.kv_layers
    assert (layer.kv_heads, layer.head_dim, layer.window) == (1, 16, None)
    assert facts.vision is None


def test_a_tower_belongs_to_a_model_of_its_width(tmp_path: Path) -> None:
    model(tmp_path / "model-Q8_0.gguf")
    tower(tmp_path / "mmproj-other-F16.gguf", width=48)
    assert facts_of(str(tmp_path)).vision is None
    tower(tmp_path / "mmproj-model-F16.gguf")
    facts = facts_of(str(tmp_path))
    assert facts.vision is not None
    assert facts.vision.rule.tokens(1024, 1024) == 1024
    assert facts.vision.rule.tokens(16384, 16384) == 4096, "what llama.cpp takes at most"
    assert facts.vision.deepstack_levels == 1
    assert facts.gguf is not None
    assert Path(facts.gguf.projector).name == "mmproj-model-F16.gguf"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention__kv_lora_rank": 512}, "a cache of a kind that isn't planned yet"),
        ({"attention__key_length": 16, "attention__value_length": 8}, "keys of 16 and values of 8"),
        ({"ssm__state_size": 16}, "recurrent states of a kind"),
    ],
)
def test_what_is_not_planned_is_named(tmp_path: Path, more: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        facts_of(str(model(tmp_path / "m.gguf", **more)))


def test_an_unknown_projector_is_named(tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    tower(tmp_path / "mmproj-m.gguf", projector="ldp")
    with pytest.raises(UnsupportedModel, match="the projector ldp; the tokens of its pictures aren't known"):
        facts_of(str(tmp_path / "m.gguf"))


def test_a_tower_alone_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="a vision tower alone"):
        facts_of(str(tower(tmp_path / "mmproj.gguf")))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (("blk.1.attn_q.weight",), "blk.1.attn_q.weight"),
        (("blk.0.attn_norm.weight", "blk.0.attn_q.weight"), "blk.0.attn_norm.weight"),
    ],
)
def test_a_layer_that_lacks_tensors_is_refused(tmp_path: Path, lost: tuple[str, ...], said: str) -> None:
    """By the plan already, which every start begins with; biases may be left out."""
    whole = of_layers((0, 1)) | {"blk.1.attn_q.bias": (32,)}
    path = model(tmp_path / "m.gguf", block_count=2, tensors=whole)
    assert facts_of(str(path)).text.num_layers == 2
    kept = {name: shape for name, shape in whole.items() if name not in lost}
    path = model(tmp_path / "lacks.gguf", block_count=2, tensors=kept)
    with pytest.raises(CheckpointError, match=f"lacks.gguf lacks tensor '{said}', which other layers have"):
        facts_of(str(path))


@pytest.mark.parametrize("architecture", ["olmo2", "qwen999"])
def test_an_architecture_that_nobody_knows_here_is_llamacpps_to_refuse(
    tmp_path: Path, architecture: str
) -> None:
    """A newer llama.cpp than the package gguf may run it."""
    path = model(tmp_path / "m.gguf", architecture=architecture)
    assert facts_of(str(path)).architecture == architecture


def test_windows_of_layers(tmp_path: Path) -> None:
    more: dict[str, Any] = {"attention__sliding_window": 512, "attention__sliding_window_pattern": [1, 0]}
    path = model(tmp_path / "m.gguf", block_count=2, attention__head_count_kv=[1, 2], **more)
    layers = facts_of(str(path)).text.kv_layers
    assert [(layer.window, layer.kv_heads) for layer in layers] == [(512, 1), (None, 2)]

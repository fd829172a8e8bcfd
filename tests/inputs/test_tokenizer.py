"""Ids and bytes of tokens, the tokens that end an answer, and files that are no tokenizer."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from snugvl.checkpoint.families import read_config
from snugvl.core.messages import user
from snugvl.errors import CheckpointError, RequestError, RequestTooLarge, UnsupportedModel
from snugvl.inputs import tokenizer as tokenizer_module
from snugvl.inputs.detokenizer import ByteLevel
from snugvl.inputs.prompt import Processor
from snugvl.inputs.tokenizer import COUNTED_TEXT, LONG_TEXT, Pieces, Tokenizer
from tests.patience import NEVER_S

POCKET = Path(__file__).parents[2] / "src/snugvl/pocket"


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == unicodedata.normalize("NFC", text)


@given(st.data())
def test_bytes_of_tokens_make_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids, also such that no text has: broken UTF-8, tokens out of the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5)))
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special=False)


@given(
    st.text(st.sampled_from("aé😀 \t\u3000n<|im_end|>1e\u0301") | st.characters(exclude_categories=["Cs"]))
)
def test_the_lower_bound_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    with patch.object(tokenizer_module, "LONG_TEXT", 0):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
        characters = "".join(text.split())
        if characters:
            assert tokenizer.least_tokens(characters * 50) > 0


def test_many_of_one_byte_cost_as_many_tokens_as_hold_no_more_of_it() -> None:
    tokenizer = Tokenizer.from_folder(POCKET)  # its longest token has 98 characters, few of them spaces
    spaces = " " * 300_000
    most = max(tokenizer.token_bytes(i).count(b" ") for i in range(tokenizer.vocab_size))
    assert most < 20
    assert len(spaces) // most - 1 <= tokenizer.least_tokens(spaces) <= len(tokenizer.encode(spaces))


def test_what_is_sure_to_be_too_long_is_not_tokenised(checkpoint: Path) -> None:
    processor = Processor.from_folder(checkpoint, read_config(checkpoint))
    text = "😀" * 700_000
    with patch.object(Tokenizer, "encode", side_effect=AssertionError("tokenised")):
        for prepare in (
            lambda: processor.prepare([user(text)], max_tokens=8191),
            lambda: processor.prepare_prompt(text, max_tokens=8191),
        ):
            with pytest.raises(RequestTooLarge, match=r"at least [\d,]+ tokens.*at most 8,191 fit"):
                prepare()
    spaces = processor.prepare([user(" " * 70_000 + "short")], max_tokens=80_000)
    assert len(spaces.prompt_ids) < 80_000


def dense(tokenizer: Tokenizer, length: int) -> str:
    """Bytes of the longest token in another order, which no bound of single bytes knows as so many tokens."""
    longest = max((tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), key=len).decode()
    return "".join(sorted(longest)) * (length // len(longest))


def test_dense_text_is_counted_by_pieces_no_further_than_needed() -> None:
    processor = Processor.from_folder(POCKET, read_config(POCKET))
    tokenizer = processor.tokenizer
    text = dense(tokenizer, tokenizer.most_characters(4096))
    assert tokenizer.least_tokens(text) <= 4096
    sizes: list[int] = []

    class Noting:
        normalizer = None

        def encode_batch_fast(self, batch: list[str], **options: Any) -> list[Any]:
            sizes.append(len(batch[0]))
            return list(backend.encode_batch_fast(batch, **options))

    backend, tokenizer._backend = tokenizer._backend, Noting()  # type: ignore[assignment]
    with pytest.raises(RequestTooLarge, match=r"at least [\d,]+ tokens, at most 4,096 fit"):
        processor.prepare_prompt(text, max_tokens=4096)
    assert sizes == [LONG_TEXT], "the first piece says it"
    with pytest.raises(RequestTooLarge, match=r"at least [\d,]+ tokens, at most 16,384 fit"):
        processor.count_prompt(text, most=4096)
    tokenizer._backend = backend
    assert 0 < tokenizer._counted(text, 1 << 30) <= len(tokenizer.encode(text))


def test_long_text_that_fits_is_not_refused() -> None:
    processor = Processor.from_folder(POCKET, read_config(POCKET))
    longest = max(map(processor.tokenizer.token_bytes, range(processor.tokenizer.vocab_size)), key=len)
    text = longest.decode() * 4000
    assert len(text) > COUNTED_TEXT
    assert len(processor.prepare_prompt(text, max_tokens=4000).prompt_ids) == 4000


def test_single_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert end in tokenizer.special_ids
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(1 << 40) == tokenizer.token_bytes(-1) == b""
    half = tokenizer.encode("é")[0]
    if len(tokenizer.encode("é")) == 2:
        assert tokenizer.token_bytes(half) == b"\xc3"
        assert tokenizer.token_text(half) == "\ufffd"


def test_the_longest_token(tokenizer: Tokenizer) -> None:
    """In bytes that it stands for, which is not how it is written."""
    for spelling in (ByteLevel(), Pieces((("▁", " "),), byte_tokens=True)):
        vocabulary = {"<unk>": 0, "▁" * 9: 1, "<0xC3>": 2, "日本語の字": 3, "0123456789": 4, "Ġé": 5}
        backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
        made = Tokenizer(backend, eos_ids=frozenset(), spelling=spelling)
        assert made.longest_token == max(len(spelling.inside(token)) for token in vocabulary)
    spelled = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    assert tokenizer.longest_token == max(map(len, spelled))


def test_a_start_makes_no_table_of_the_vocabulary(checkpoint: Path) -> None:
    """For 150,000 tokens that takes as long as all other files of a checkpoint."""
    config = read_config(checkpoint)
    with patch.object(ByteLevel, "inside", side_effect=ByteLevel.inside, autospec=True) as inside:
        processor = Processor.from_folder(checkpoint, config)
        assert processor.tokenizer.most_characters(512) > 512
    assert processor.pictures is not None
    assert inside.call_count < 200


def test_end_of_sequence(broken: Path) -> None:
    def ids() -> set[str]:
        tokenizer = Tokenizer.from_folder(broken)
        return {tokenizer.token_text(i) for i in tokenizer.eos_ids}

    assert ids() == {"<|im_end|>", "<|endoftext|>"}
    (broken / "generation_config.json").write_text("{}")
    assert ids() == {"<|im_end|>"}  # the tokenizer's own
    (broken / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert ids() == {"<|endoftext|>"}  # as older files write it
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no token that ends an answer: generation_config.json"):
        ids()
    (broken / "generation_config.json").unlink()
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 3
    (broken / "config.json").write_text(json.dumps(config))
    assert len(ids()) == 1
    (broken / "generation_config.json").write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(CheckpointError, match=r"'eos_token_id' = '<|im_end|>', expected token ids"):
        ids()


def test_broken_files(broken: Path) -> None:
    path = broken / "tokenizer.json"
    for content in ("", "{", "[]", '{"version": "1.0"}', path.read_text()[:5000]):
        path.write_text(content)
        with pytest.raises(CheckpointError, match="is not a tokenizer") as raised:
            Tokenizer.from_folder(broken)
        assert "\n" not in str(raised.value)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(broken)


def test_a_folder_may_have_a_name_that_is_not_text(broken: Path) -> None:
    named = broken.rename(Path(os.fsdecode(os.fsencode(broken) + b"\xff")))
    assert Tokenizer.from_folder(named).encode("red")


def test_other_kinds_are_refused_by_name(broken: Path) -> None:
    path = broken / "tokenizer.json"
    values = json.loads(path.read_text()) | {"decoder": None}
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match="neither a byte-level tokenizer nor"):
        Tokenizer.from_folder(broken)
    path.write_text(json.dumps(values | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}))
    with pytest.raises(UnsupportedModel, match="decodes by BPEDecoder"):
        Tokenizer.from_folder(broken)


def test_padding_and_truncation_of_the_file_are_off(broken: Path) -> None:
    path = broken / "tokenizer.json"
    backend = Backend.from_file(str(path))
    expected = backend.encode("a b c d e").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=30)
    backend.save(str(path))
    assert Tokenizer.from_folder(broken).encode("a b c d e") == expected


def test_control_tokens(tokenizer: Tokenizer, broken: Path) -> None:
    tokenizer.refuse_control_tokens("plain <|text|> with <think> and <tool_call>")
    with pytest.raises(RequestError, match=r"'<\|im_end\|>', a control token of this model; remove it"):
        tokenizer.refuse_control_tokens("x<|im_end|>", field="messages")
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.refuse_control_tokens("\ud800")
    with pytest.raises(RequestError, match="can't be tokenised"):
        tokenizer.encode("\ud800")


def test_control_tokens_that_a_normaliser_would_make(broken: Path) -> None:
    path = broken / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.normalizer = normalizers.NFKC()
    backend.save(str(path))
    with pytest.raises(RequestError, match="control token"):
        Tokenizer.from_folder(broken).refuse_control_tokens("＜|im_end|＞")


def test_long_texts_are_tokenised_one_at_a_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting:
        """The tokenizer's Rust side; counts who is inside."""

        inside = most = 0

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            Counting.inside += 1
            Counting.most = max(Counting.most, Counting.inside)
            if len(texts[0]) < LONG_TEXT:
                barrier.wait(NEVER_S)  # all three come together
            else:
                sleep(0.02)
            Counting.inside -= 1
            return [SimpleNamespace(ids=[len(texts[0])])]

    def encode_three(characters: int) -> int:
        Counting.most = 0
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(tokenizer.encode, ["a" * characters] * 3)) == [[characters]] * 3
        return Counting.most

    barrier = Barrier(3)
    monkeypatch.setattr(tokenizer, "_backend", Counting())
    assert encode_three(LONG_TEXT) == 1
    assert encode_three(LONG_TEXT - 1) == 3

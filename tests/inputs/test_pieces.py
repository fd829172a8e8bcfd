"""SentencePiece's tokenizers: bytes of tokens, streams and frames, as transformers has them."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from snugvl.core.messages import Grammar
from snugvl.errors import RequestError
from snugvl.inputs import tokenizer as tokenizer_module
from snugvl.inputs.detokenizer import Detokenizer
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.tokenizer import Tokenizer, spelling_of
from tests.draws import draws
from tests.inputs.pieces import STYLES, pieces, write

text = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" ▁the🦊é\n")), max_size=30
)


@cache
def ours(style: str) -> Tokenizer:
    backend = pieces(style)
    return Tokenizer(backend, eos_ids=frozenset({2}), spelling=spelling_of(backend, style))


@cache
def theirs(style: str) -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pieces(style), bos_token="<s>", eos_token="</s>"
    )


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("style", STYLES)
@given(text=text)
@draws(60)
def test_a_stream_of_any_text_equals_transformers_decode(style: str, text: str) -> None:
    ids = ours(style).encode(text)
    assert ids == theirs(style).encode(text, add_special_tokens=False)
    whole = theirs(style).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert streamed(ours(style), ids) == whole == ours(style).decode(ids)


@pytest.mark.parametrize("style", STYLES)
@given(text=text)
@draws(60)
def test_the_lower_bound_of_tokens(style: str, text: str) -> None:
    with patch.object(tokenizer_module, "LONG_TEXT", 0):
        assert ours(style).least_tokens(text) <= len(ours(style).encode(text))
    assert 100_000 <= ours(style).least_tokens("🦊" * 100_000) <= 400_000


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
@draws(60)
def test_any_tokens_but_broken_characters_equal_transformers_decode(style: str, data: st.DataObject) -> None:
    size = ours(style).vocab_size
    ids = data.draw(st.lists(st.integers(259, size - 1) | st.integers(0, 3 + 127), max_size=12))
    whole = theirs(style).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert streamed(ours(style), ids) == whole


def test_spaces_at_the_beginning() -> None:
    word = ours("llama 2").encode("the")
    assert ours("llama 2").token_bytes(word[0]).startswith(b" ")
    assert streamed(ours("llama 2"), word) == "the"
    assert streamed(ours("llama 2"), [1, *word]) == "the"  # a control token is no text
    assert streamed(ours("llama 2"), word, continues=True) == " the"  # goes on after a prompt
    assert streamed(ours("llama 2"), [*word, *word]) == "the the"
    assert streamed(ours("gemma"), ours("gemma").encode("  a")) == "  a"


def test_bytes_of_characters_come_when_they_are_whole() -> None:
    tokenizer = ours("llama 2")
    ids = tokenizer.encode("🦊")[-4:]
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🦊".encode()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "🦊"]
    assert streamed(tokenizer, ids[:2]) == "\ufffd"


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_the_frame_around_a_whole_text(flags: dict[str, Any], tmp_path: Path) -> None:
    """That of tokenizer.json, whatever the flags beside it say: as transformers has it."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, **flags))
    assert tokenizer.encode("the fox", framed=True) == [1, *tokenizer.encode("the fox")]
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert oracle("the fox")["input_ids"] == tokenizer.encode("the fox", framed=True)


def test_control_tokens_are_refused_and_end_answers(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    assert tokenizer.eos_ids >= {2}
    assert tokenizer.variables["bos_token"] == "<s>"
    for control in ("<s>", "</s>", "<|end|>"):
        with pytest.raises(RequestError, match="a control token of this model"):
            tokenizer.refuse_control_tokens(f"a {control} b")
    tokenizer.refuse_control_tokens("<0x41> and ▁ are text")


@pytest.mark.parametrize("style", STYLES)
def test_a_grammar_over_pieces_allows_exactly_its_texts(style: str) -> None:
    import torch

    tokenizer = ours(style)
    state = GrammarCompiler(tokenizer, 512).compile(Grammar("regex", "(the fox|é)")).start()
    bits, made = torch.zeros(16, dtype=torch.int32), b""
    while True:
        state.fill(bits)
        allowed = [t for t in range(512) if bits[t // 32] >> (t % 32) & 1]
        if allowed == [2]:
            break
        longest = max(allowed, key=lambda t: len(tokenizer.token_bytes(t)))
        assert b"the fox".startswith(made + tokenizer.token_bytes(longest)) or made == b""
        made += tokenizer.token_bytes(longest)
        state.accept(longest)
    assert made.decode() in ("the fox", "é")

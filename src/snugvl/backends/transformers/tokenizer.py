"""The tokenizer of a checkpoint in our form, whatever kind it is.

Ours (`inputs/tokenizer.py`) reads most of them exactly. Of any other that has a form in Rust, a token's text
is what decoding it after another token adds, which is right for all tokens that are whole characters.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from snugvl.errors import CheckpointError, RequestError, UnsupportedModel
from snugvl.inputs.spelling import spelling_of
from snugvl.inputs.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class DecodedTokenizer(Tokenizer):
    """A tokenizer whose tokens' bytes are found by decoding."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: frozenset[int], variables: dict[str, str]
    ) -> None:
        super().__init__(backend, eos_ids=eos_ids, variables=variables)
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._anchor = next((i for text in "aAeE.0" if (i := backend.token_to_id(text)) is not None), None)
        self._decoded = cache(self._decode_one)

    def least_tokens(self, text: str) -> int:
        """Nothing is known of how such a tokenizer cuts text."""
        return 0

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty outside the vocabulary."""
        return self._decoded(token_id)

    def opening_bytes(self, token_id: int) -> bytes:
        """The bytes it stands for at the beginning of a text."""
        return self.decode([token_id], skip_special=False).encode()

    def _decode_one(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        if self._anchor is None:
            return self.decode([token_id]).encode()
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token_id]).removeprefix(before).encode()


def tokenizer_of(folder: Path, hugging: Any, eos_ids: frozenset[int]) -> Tokenizer:
    """`hugging`, a tokenizer that transformers loaded from `folder`, as ours. `eos_ids`: the model's.

    Raises:
        UnsupportedModel: it has no form in Rust, so nobody can say what a grammar allows.
        CheckpointError: nothing ends an answer.
    """
    try:
        ours = Tokenizer.from_folder(folder)
    except (UnsupportedModel, CheckpointError):
        ours = None
    if ours is not None and ours.vocab_size >= len(hugging):
        ours.eos_ids |= eos_ids
        return ours
    backend = getattr(hugging, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel(
            f"{folder} has a tokenizer in Python only ({type(hugging).__name__}), which this backend can't "
            "stream or constrain; a checkpoint with a tokenizer.json is needed"
        )
    backend = tokenizers.Tokenizer.from_str(backend.to_str())  # without what a call may set: padding
    backend.no_padding()
    backend.no_truncation()
    if hugging.eos_token_id is not None:
        eos_ids |= {hugging.eos_token_id}
    if not eos_ids:
        raise CheckpointError(f"{folder} names no token that ends an answer (eos_token_id)")
    variables = variables_of(hugging)
    try:  # files that name some tokens outside tokenizer.json
        spelling = spelling_of(backend, str(folder))
    except UnsupportedModel:
        return DecodedTokenizer(backend, eos_ids=eos_ids, variables=variables)
    return Tokenizer(backend, eos_ids=eos_ids, variables=variables, spelling=spelling)


def variables_of(hugging: Any) -> dict[str, str]:
    """bos_token, eos_token, …: what chat templates see."""
    return {name: str(text) for name in _NAMED if (text := getattr(hugging, name, None)) is not None}


def refuse_texts(texts: frozenset[str], text: str, field: str) -> None:
    """Raise RequestError if `text` holds one of `texts`: what a processor replaces by pictures."""
    found = next((each for each in sorted(texts, key=len, reverse=True) if each in text), None)
    if found is not None:
        raise RequestError(
            f"text contains {found!r}, which stands for a picture in this model's prompts; remove it or "
            "break it up",
            field=field,
        )

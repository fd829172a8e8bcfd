"""Text to token ids, over `tokenizers.Tokenizer`. The way back is `detokenizer.py`."""

import json
import re
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from snugvl.checkpoint.section import read_json
from snugvl.core.messages import Logprob, TokenLogprob
from snugvl.errors import CheckpointError, RequestError, RequestTooLarge, UnsupportedModel
from snugvl.inputs.defusing import JOINER, broken_up, joints_of, pattern_of
from snugvl.inputs.detokenizer import ByteLevel, Spelling, Vocabulary

_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")
LONG_TEXT = 1 << 16  # characters; what is shorter is tokenised in no time
COUNTED_TEXT = 1 << 18  # characters; tokens of what is longer are counted piece by piece before
SHORT_TEXT = 1 << 11  # characters that are tokenised with Python's lock held: letting go of it takes longer
_WIDEST = 4  # bytes of a character, at most: a spelling makes no more of it
_COMPOSED = 4  # characters that Unicode normalisation makes one of, at most
_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}  # bytes that a text can have
# Tokenising takes up to 430 bytes a character and a whole core, so it is done for one long text at a time.
_one_long_text = threading.Lock()


@dataclass(frozen=True, slots=True)
class Pieces:
    """Characters, a mark for spaces, tokens of one byte.

    Attributes:
        marks: what stands for what, in order, such as ("▁", " ").
        byte_tokens: whether "<0xC3>" is a byte.
        stripped: spaces that a text loses at its beginning.
        unmarked: a mark that the first token of a text loses wherever it stands (Metaspace), or None.
    """

    marks: tuple[tuple[str, str], ...]
    byte_tokens: bool
    stripped: int = 0
    unmarked: str | None = None

    @property
    def decoder(self) -> dict[str, Any] | None:
        """A Metaspace spelled out."""
        if self.unmarked is None:
            return None
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": mark}, "content": text} for mark, text in self.marks
        ]
        if self.byte_tokens:
            steps.append({"type": "ByteFallback"})
        return {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}

    def inside(self, token: str) -> bytes:
        """The bytes a token stands for."""
        for mark, text in self.marks:
            token = token.replace(mark, text)
        byte = _BYTE.fullmatch(token) if self.byte_tokens else None
        return token.encode() if byte is None else bytes.fromhex(byte[1])

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text, where some spaces are dropped."""
        if self.unmarked is not None:
            token = token.replace(self.unmarked, "")
        data = self.inside(token)
        spaces = len(data) - len(data.lstrip(b" "))
        return data[min(spaces, self.stripped) :]


def spelling_of(backend: tokenizers.Tokenizer, where: str) -> Spelling:
    """The spelling of this tokenizer.

    Raises:
        UnsupportedModel: a decoder that we don't know; `where` names the file.
    """
    steps = list(_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__())))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    marks: list[tuple[str, str]] = []
    stripped, unmarked = 0, None
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)}:
                marks.append((mark, text))
            case {"type": "Metaspace", "replacement": str(mark)}:
                marks.append((mark, " "))
                unmarked = mark if step.get("prepend_scheme", "always") != "never" else None
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                stripped = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise UnsupportedModel(
                    f"{where} decodes by {' + '.join(kinds)}, which this version doesn't read: only "
                    "byte-level tokenizers and SentencePiece's are"
                )
    if not marks:
        raise UnsupportedModel(
            f"{where} is neither a byte-level tokenizer nor one of SentencePiece's pieces, which is all that "
            "this version reads"
        )
    return Pieces(tuple(marks), "ByteFallback" in kinds, stripped, unmarked)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's steps, one after the other."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


class Tokenizer(Vocabulary):
    """A checkpoint's tokenizer. `eos_ids`: tokens that end an answer; `variables`: for chat templates."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int],
        variables: dict[str, str] | None = None,
        spelling: Spelling | None = None,
    ) -> None:
        super().__init__(backend, spelling)
        self.eos_ids = eos_ids
        self.variables = variables or {}
        added = backend.get_added_tokens_decoder()
        contents = sorted((added[i].content for i in self.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self._marks = lru_cache(4)(lambda also: pattern_of((*contents, *also)))
        self._joints = joints_of(token.content for token in added.values())
        # Some control tokens swallow the white space beside them: then it may cost nothing.
        self._swallows = any(token.lstrip or token.rstrip for token in added.values())

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and the end-of-sequence tokens of a checkpoint folder.

        Raises:
            CheckpointError: a file is missing or corrupt, or no token ends an answer.
            UnsupportedModel: neither byte-level nor SentencePiece's.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{folder} has no tokenizer.json; it is not a complete checkpoint")
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())  # a path may hold what is no text
        except Exception as error:  # the Rust side raises plain Exception
            raise CheckpointError(f"{path} is not a tokenizer: {str(error).splitlines()[0][:200]}") from None
        spelling = spelling_of(backend, str(path))
        backend.no_padding()
        backend.no_truncation()
        config = (
            read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        )
        variables = _special_strings(config)
        eos_ids = _eos_ids(folder, backend, variables)
        return cls(backend, eos_ids=eos_ids, variables=variables, spelling=spelling)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones among them. A model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """Token ids; the strings of control tokens become control tokens (see `refuse_control_tokens`).

        `framed`: with what the tokenizer puts around a whole text, such as "<s>". Chat templates write that
        themselves.
        """
        if JOINER in text and not framed and isinstance(self._spelling, ByteLevel):
            # Each piece is a text of its own: no control token begins in one and ends in the next.
            return [token for piece in self._joints.split(text) for token in self._encode(piece, framed)]
        return self._encode(text, framed)

    def _encode(self, text: str, framed: bool) -> list[int]:
        try:
            if len(text) <= SHORT_TEXT:
                return self._backend.encode(text, add_special_tokens=framed).ids
            with _one_long_text if len(text) >= LONG_TEXT else nullcontext():
                # A batch is tokenised without Python's lock: nobody's stream stops for it.
                return self._backend.encode_batch_fast([text], add_special_tokens=framed)[0].ids
        except Exception as error:  # a lone surrogate is the one way text can't become UTF-8
            raise RequestError(f"text can't be tokenised: {str(error).splitlines()[0][:200]}") from None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no token stands for more characters than that."""
        added = (token.content.encode() for token in self._backend.get_added_tokens_decoder().values())
        longest = max(map(len, added), default=1)
        # Of the strings those that could still be longer, as to look at all takes a tenth of a whole start.
        for token in sorted(self._backend.get_vocab(with_added_tokens=True), key=len, reverse=True):
            if len(token) * _WIDEST <= longest:
                break
            longest = max(longest, len(self._spelling.inside(token)))
        return longest

    def most_characters(self, tokens: int) -> int:
        """Most characters, white space included, that `tokens` tokens can stand for."""
        composed = 1 if self._backend.normalizer is None else _COMPOSED
        return tokens * self.longest_token * composed

    def refuse_oversized(self, characters: int, max_tokens: int | None, *, field: str) -> None:
        """Raise RequestTooLarge if no text of `characters` characters fits into `max_tokens`.

        It takes no time, so it comes before anything looks at the text itself.
        """
        if max_tokens is None or characters <= self.most_characters(max_tokens):
            return
        least = -(-characters * max_tokens // self.most_characters(max_tokens)) if max_tokens else 1
        raise RequestTooLarge(
            f"the prompt has {characters:,} characters, which are at least {least:,} tokens (white space "
            f"counts); at most {max_tokens:,} fit; send less text",
            field=field,
        )

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of a long text, in a hundredth of the time; 0 for a short one.

        A byte costs 1 / L, with L the length of the longest token that has this byte. The bytes of a token
        of length n cost 1 / n each at most, so a token costs 1 at most. Of one byte alone the cost is 1 / m,
        with m how often a token has it at most: that tells more of a text of spaces. White space is free
        where control tokens swallow it, and where a tokenizer isn't byte-level: some take several for one.
        """
        if len(text) < LONG_TEXT:
            return 0
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        exact = isinstance(self._spelling, ByteLevel)
        if self._swallows or not exact:
            text = "".join(text.split())
        spelled = text.encode() if exact else b"".join(self._spelling.inside(text).split())
        counts = np.bincount(np.frombuffer(spelled, np.uint8), minlength=256)
        together, alone = self._costs
        return int(max(counts @ together, (counts * alone).max()) * (1 - 1e-9))

    def refuse_long(self, text: str, max_tokens: int | None, *, field: str, more: int = 0) -> None:
        """Raise RequestTooLarge if `text` is sure to have too many tokens, without tokenising it as a whole.

        `more`: tokens that come besides, of pictures.
        """
        if max_tokens is None:
            return
        least = self.least_tokens(text)
        if least + more <= max_tokens:
            least = self._counted(text, max_tokens - more)
        if least and least + more > max_tokens:
            raise RequestTooLarge(
                f"the prompt has at least {least + more:,} tokens, at most {max_tokens:,} fit; "
                "send less text",
                field=field,
            )

    def _counted(self, text: str, most: int) -> int:
        """A lower bound of the tokens of a very long text, in the memory of a piece of it; else 0.

        It goes no further than `most`. Where a piece ends a token may be cut, which counts then as more, at
        most as many as the longest has bytes.
        """
        found = 0
        if len(text) > COUNTED_TEXT:
            for start in range(0, len(text), LONG_TEXT):
                piece = text[start : start + LONG_TEXT]
                (tokens,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
                found += max(0, len(tokens) - self.longest_token)
                if found > most:
                    break
        return found

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact string, such as "<|im_end|>"."""
        return self._backend.token_to_id(text)

    def serialized(self) -> str:
        """The whole tokenizer in the form of tokenizer.json, with a decoder that llguidance knows."""
        decoder = self._spelling.decoder if isinstance(self._spelling, Pieces) else None
        whole = self._backend.to_str()
        return whole if decoder is None else json.dumps(json.loads(whole) | {"decoder": decoder})

    def logprob(self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> Logprob:
        """A token with its log-probability, and those of the most likely ones, by their texts and bytes."""
        own, *others = (self._scored(*each) for each in ((token_id, logprob), *top))
        return Logprob(own.token, own.bytes, own.logprob, tuple(others))

    def _scored(self, token_id: int, logprob: float) -> TokenLogprob:
        raw = self.token_bytes(token_id)
        return TokenLogprob(raw.decode("utf-8", errors="replace"), raw, logprob)

    def break_up(self, text: str, also: tuple[str, ...] = ()) -> str:
        """The text with a joiner within each control token that it spells, and within each of `also`."""
        marks = self._marks(also)
        text = broken_up(text, marks)
        if self._backend.normalizer is not None:
            normal = self._backend.normalizer.normalize_str(text)
            text = broken_up(normal, marks) if marks.search(normal) else text
        return text

    def refuse_control_tokens(self, text: str, *, field: str | None = None) -> None:
        """Raise RequestError if `text` would become a control token of the model.

        Anyone who could write one could end their turn and speak as the system. In a conversation they are
        broken up before (`defusing.py`); what is left are those of one character, and bare prompts.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("text has a lone surrogate, which is not a character", field=field) from None
        found = self._special.search(text)
        if found is None and self._backend.normalizer is not None:
            # A normaliser such as NFKC could turn full-width brackets into plain ones.
            found = self._special.search(self._backend.normalizer.normalize_str(text))
        if found:
            raise RequestError(
                f"text contains {found.group()!r}, a control token of this model; remove it or break it up",
                field=field,
            )

    @cached_property
    def _costs(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Least cost of each byte, in tokens: all together, and each where no other is counted.

        Nothing where not every text is tokens of its bytes.
        """
        added = [token.content.encode() for token in self._backend.get_added_tokens_decoder().values()]
        longest, most, alone = np.zeros(256), np.zeros(256), set()
        stored = (self._spelling.inside(token) for token in self._backend.get_vocab(with_added_tokens=True))
        for token in (*stored, *added):
            if len(token) == 1:
                alone.add(token[0])
            for byte in set(token):
                longest[byte] = max(longest[byte], len(token))
                most[byte] = max(most[byte], token.count(byte))
        known = float(alone >= _UTF8)
        return known / np.maximum(longest, 1), known / np.maximum(most, 1)


def _special_strings(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … of tokenizer_config.json, which older files write as objects."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, variables: dict[str, str]) -> frozenset[int]:
    """Tokens that end an answer: the generation (else model) configuration's and the tokenizer's own."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        values = read_json(path)
        text = values.get("text_config")
        value = values.get("eos_token_id") or (text.get("eos_token_id") if isinstance(text, dict) else None)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in listed):
            raise CheckpointError(f"{path} has 'eos_token_id' = {value!r}, expected token ids")
        ids.update(listed)
        if ids:
            break
    own = backend.token_to_id(variables.get("eos_token", ""))
    if own is not None:
        ids.add(own)
    if not ids:
        raise CheckpointError(
            f"{folder} names no token that ends an answer: generation_config.json needs an eos_token_id"
        )
    return frozenset(ids)

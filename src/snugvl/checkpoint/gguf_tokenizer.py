"""A GGUF's vocabulary as `tokenizer.json`, its chat template and the tokens that end an answer.

llama.cpp names how text is cut before byte pairs are merged (`tokenizer.ggml.pre`); the rules themselves are
those of the published tokenizers. A vocabulary of SentencePiece's has scores instead of merges, and is
refused.

Source of the rules: llama.cpp, `src/llama-vocab.cpp` (MIT), which repeats each model's own tokenizer.json.
"""

from collections.abc import Mapping
from typing import Any, Final

from snugvl.checkpoint.gguf_network import INSTEAD, TOKENS
from snugvl.checkpoint.section import Section, plain, shown
from snugvl.errors import CheckpointError, UnsupportedModel

KINDS: Final = "tokenizer.ggml.token_type"
MERGES: Final = "tokenizer.ggml.merges"
KEPT: Final = (TOKENS, KINDS, MERGES)  # arrays that are needed whole
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_CONTROL, _DEFINED, _UNUSED = 3, 4, 5  # types of tokens
# Control tokens that end an answer in llama.cpp by their names, whatever else a file says.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORDS = _WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_CUTS: "Final[Mapping[str, Cut]]" = {  # by llama.cpp's names
    "gpt-2": (None, [{**_BYTES, "use_regex": True}], False),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}], False),
    "qwen2": ("NFC", _split(_WORDS % ""), False),
    "qwen35": ("NFC", _split(_MARKED_WORDS % ""), False),
    "llama-bpe": (None, _split(_WORDS % "{1,3}"), True),
}


Cut = tuple[str | None, list[dict[str, Any]], bool]
"""Normaliser, how text is cut, whether a word that is a token is taken as that."""


def cut_of(section: Section) -> Cut:
    """How text is cut before byte pairs are merged.

    Raises:
        UnsupportedModel: a kind of vocabulary, or a cut, that isn't known.
    """
    model, pre = section.get(_MODEL, str), section.get(_PRE, str, "default")
    if model != "gpt2" or pre not in _CUTS:
        what = f"{_MODEL} {plain(model)}" if model != "gpt2" else f"{_PRE} {plain(pre)}"
        raise UnsupportedModel(
            f"{section.where} has {what}; our engine reads gpt2 with {', '.join(_CUTS)}: {INSTEAD}"
        )
    return _CUTS[pre]


def tokenizer_files(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The tokenizer's small files of a checkpoint folder, made from the metadata, by file name.

    `values`: the metadata, with the arrays of `KEPT`.

    Raises:
        CheckpointError: an array is missing or nonsense.
        UnsupportedModel: a kind of vocabulary, or a cut, that isn't known.
    """
    section = Section(values, where)
    cut = cut_of(section)
    tokens, kinds = _texts(section, TOKENS), section.get(KINDS, list)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where} has {len(tokens):,} tokens, but {KINDS} of {len(kinds):,}")
    told = {name: _token(section, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("bos", "eos")}
    named = {f"{name}_token": token for name, token in told.items() if token is not None}
    ends = {token for number, token in enumerate(tokens) if kinds[number] == _CONTROL and token in _ENDS}
    ends |= {named["eos_token"]} if "eos_token" in named else set()
    eot = _token(section, "tokenizer.ggml.eot_token_id", tokens)
    ends |= {eot} if eot is not None else set()
    framed = told["bos"] if values.get("tokenizer.ggml.add_bos_token") else None
    config: dict[str, Any] = dict(named)
    if (template := values.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": _document(tokens, kinds, _merges(section), cut, framed),
        "tokenizer_config.json": config,
        "generation_config.json": {
            "eos_token_id": [number for number, token in enumerate(tokens) if token in ends]
        },
    }


def _document(
    tokens: list[str],
    kinds: list[int],
    merges: list[list[str]],
    cut: Cut,
    framed: str | None,
) -> dict[str, Any]:
    """The content of `tokenizer.json`. `framed`: tokens that come before a whole text."""
    normaliser, steps, whole = cut
    vocab = {token: number for number, token in enumerate(tokens) if kinds[number] != _UNUSED}
    if len(vocab) < sum(kind != _UNUSED for kind in kinds):
        raise CheckpointError(f"{TOKENS} has a token twice")
    # Some files have merges that make no token, as llama.cpp insists on one: they never apply.
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, **flags, "special": kinds[number] == _CONTROL}
        for number, token in enumerate(tokens)
        if kinds[number] in (_CONTROL, _DEFINED)
    ]
    processor: dict[str, Any] | None = None
    if framed is not None:
        single = [{"SpecialToken": {"id": framed, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {framed: {"id": framed, "ids": [vocab[framed]], "tokens": [framed]}}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if normaliser is None else {"type": normaliser},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": processor,
        "decoder": {**_BYTES, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": whole, "vocab": vocab, "merges": merges},
    }


def _merges(section: Section) -> list[list[str]]:
    """The merges as pairs of tokens. No token holds a space: byte-level vocabularies write it otherwise."""
    pairs = [merge.split(" ") for merge in _texts(section, MERGES)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise CheckpointError(f"{section.where} has a merge {shown(' '.join(wrong))}; two tokens are merged")
    return pairs


def _texts(section: Section, key: str) -> list[str]:
    found = section.get(key, list)
    if not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"{section.where}: {key} are no texts")
    return list(found)


def _token(section: Section, key: str, tokens: list[str]) -> str | None:
    """The token that a key names by its id."""
    number = section.values.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(f"{section.where} has {key} {shown(number)}, of {len(tokens):,} tokens")
    return tokens[number]

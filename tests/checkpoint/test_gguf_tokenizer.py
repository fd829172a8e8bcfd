"""A GGUF's vocabulary against the tokenizers of transformers that it came from."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from snugvl.checkpoint.gguf_facts import KINDS, MERGES, tokenizer_files
from snugvl.checkpoint.gguf_network import TOKENS
from snugvl.errors import CheckpointError, UnsupportedModel

TEXTS = (
    "Hello  world, it's 12345 o'clock\n\n  and I'LL see.\tTwo\r\nlines ",
    "naïve café, e\u0301 is é; 中文字 と かな, ١٢٣ ½ ﬁ",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # 99%\n\n\n",
    " <|im_start|>user\nhi<|im_end|>  \u3000x<think>y",
)
CONTROL, DEFINED, UNUSED = 3, 4, 5


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """Metadata of a vocabulary that was learned from the texts."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator([*TEXTS, "hello world and I see the user"] * 3, trainer)
    model = json.loads(learned.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    words += ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "[PAD1]"]
    kinds = [1] * (len(words) - 5) + [CONTROL] * 3 + [DEFINED, UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", TOKENS: words, KINDS: kinds,
        MERGES: [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(words) - 3, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


def made(values: dict[str, Any], **more: Any) -> Tokenizer:
    files = tokenizer_files(values | {f"tokenizer.ggml.{key}": each for key, each in more.items()}, "x.gguf")
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def theirs(kind: Any, values: dict[str, Any]) -> Any:
    words, kinds = values[TOKENS], values[KINDS]
    vocab = {word: number for number, word in enumerate(words) if kinds[number] == 1}
    made = kind(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in values[MERGES]])
    made.add_tokens([tokenizers.AddedToken(word, special=True, normalized=False) for word in words[-5:-2]])
    made.add_tokens([tokenizers.AddedToken(words[-2], normalized=False)])
    return made


@pytest.mark.parametrize(("pre", "kind"), [("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)])
def test_text_is_cut_as_by_the_original(pre: str, kind: Any, values: dict[str, Any]) -> None:
    ours, original = made(values, pre=pre), theirs(kind, values)
    for text in TEXTS:
        words = original.convert_ids_to_tokens(original.encode(text, add_special_tokens=False))
        assert ours.encode(text).tokens == words


def test_llama_3_cuts_digits_in_threes_and_takes_whole_words(values: dict[str, Any]) -> None:
    document = tokenizer_files(values | {"tokenizer.ggml.pre": "llama-bpe"}, "x.gguf")["tokenizer.json"]
    split, _ = document["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"]["Regex"] == TikTokenConverter().pattern
    assert document["model"]["ignore_merges"]
    digits = made(values, pre="smollm").pre_tokenizer.pre_tokenize_str("a 123")
    assert [each for each, _ in digits] == ["a", "Ġ", "1", "2", "3"]


def test_what_stands_around_text_and_ends_an_answer(values: dict[str, Any]) -> None:
    files = tokenizer_files(values, "x.gguf")
    words = values[TOKENS]
    assert files["generation_config.json"]["eos_token_id"] == [len(words) - 5, len(words) - 3]
    assert files["tokenizer_config.json"] == {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    framed = made(values, add_bos_token=True, bos_token_id=len(words) - 5)
    assert framed.encode("hello").tokens[0] == "<|endoftext|>"
    assert framed.encode("hello").tokens[1:] == made(values).encode("hello").tokens
    assert framed.token_to_id("[PAD1]") is None
    assert framed.get_vocab_size(with_added_tokens=True) == len(words) - 1


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, UnsupportedModel, "tokenizer.ggml.model llama.*llamacpp"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, "tokenizer.ggml.pre tekken.*llamacpp"),
        ({KINDS: [1]}, CheckpointError, "tokens, but tokenizer.ggml.token_type of 1"),
        ({TOKENS: ["a", "a"], KINDS: [1, 1], "tokenizer.ggml.eos_token_id": 0}, CheckpointError, "twice"),
        ({TOKENS: [1, 2]}, CheckpointError, "not texts"),
        ({MERGES: ["a b c"]}, CheckpointError, "a merge 'a b c'"),
        ({"tokenizer.ggml.eos_token_id": 10**9}, CheckpointError, "eos_token_id 1000000000, of"),
    ],
)
def test_nonsense_is_named(
    changes: dict[str, Any], error: type[Exception], said: str, values: dict[str, Any]
) -> None:
    with pytest.raises(error, match=said):
        tokenizer_files(values | changes, "x.gguf")
